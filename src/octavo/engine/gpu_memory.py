"""How much of a GPU's memory the KV cache gets: what the largest step leaves, found by running one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from octavo.config import EngineConfig, format_size
from octavo.core.layout import KVLayout
from octavo.engine.memory import MemoryPlan, planned, sizing
from octavo.errors import ConfigError
from octavo.kernels.backend import Backend, Program
from octavo.paging.kv import KV
from octavo.schedule.budget import HIGHEST, LOWEST


@dataclass(frozen=True)
class LargestStep:
    """The most that one step computes: tokens in so many rows, logits that are wanted, and how far back rows see."""

    tokens: int
    rows: int
    logits: int
    context: int


def largest_step(config: EngineConfig, context: int, most_logits: int) -> LargestStep:
    """A step as the scheduler would make it at the most; ``most_logits``: of one scored chunk."""
    tokens = config.max_batched_tokens or max(HIGHEST, config.max_running + LOWEST)
    rows = min(config.max_running, tokens)
    logits = min(tokens, rows * (1 + (config.speculate or 0)) + most_logits)
    # Attention's working memory does not grow with the context, so it need not be run over all of a long one.
    return LargestStep(tokens, rows, logits, min(context, 32768))


@dataclass(frozen=True)
class GpuMemory:
    """What takes a GPU's memory, in bytes: others (programs, and what the driver keeps), weights, a largest step."""

    name: str
    total: int
    others: int
    weights: int
    step: int

    @property
    def taken(self) -> int:
        return self.others + self.weights + self.step

    def describe(self) -> str:
        return (
            f"weights {format_size(self.weights)}, a largest step {format_size(self.step)}, "
            f"others {format_size(self.others)}"
        )


def plan_gpu_memory(config: EngineConfig, layout: KVLayout, context: int, gpu: GpuMemory) -> MemoryPlan:
    """Size the KV cache on a GPU: as set, or the share of its memory that may be used, less what else takes it.

    Raises ConfigError that says what there is, what is needed, and what would help.
    """
    size, share = layout.block_bytes, config.gpu_memory
    shape = KV(1, layout.block_size, layout.windows)
    asked = config.kv_blocks is not None or config.kv_memory is not None
    beside = gpu.total - gpu.taken  # physically there
    free = beside if asked else int(share * gpu.total) - gpu.taken
    if free < shape.blocks_for(1) * size:
        raise ConfigError(
            f"{gpu.name} has {format_size(gpu.total)}, gpu_memory {share:g} lets {format_size(share * gpu.total)} of "
            f"it be used, and {format_size(gpu.taken)} are taken ({gpu.describe()}), so that no KV cache fits: a "
            "higher gpu_memory, a lower max_batched_tokens, smaller weights or tensor_parallel over more GPUs would "
            "make room, and device cpu works without",
            "gpu_memory",
        )
    fits = f"{format_size(layout.bytes_per_token)} a token, {int(free / layout.bytes_per_token)} tokens would fit"
    if config.kv_blocks is not None:
        blocks, why = config.kv_blocks, "kv_blocks"
    elif config.kv_memory is not None:
        assert isinstance(config.kv_memory, int)
        blocks, why = config.kv_memory // size, "kv_memory"
    else:
        useful = config.max_running * shape.blocks_for(context)
        blocks = min(free // size, useful)
        why = f"what {share:.0%} of {gpu.name} leaves" if blocks < useful else "all that can be used"
    if blocks * size > beside:
        raise ConfigError(
            f"a KV cache of {format_size(blocks * size)} is beyond the {format_size(beside)} that {gpu.describe()} "
            f"leave of {gpu.name} ({fits})",
            sizing(config),
        )
    return planned(config, layout, context, blocks, why, fits)


# ---- asking the GPU --------------------------------------------------------------------------------------------------


def on_gpu(backend: Backend) -> bool:
    return backend.name.startswith("triton") and cast(Any, backend).device.type == "cuda"


def gpu_memory(backend: Any, weights: int | None = None, step: int = 0) -> GpuMemory:
    """What takes the GPU's memory now; ``weights`` if they are still to come."""
    from octavo.kernels.triton.profile import memory_of

    name, total, others, own = memory_of(backend.device)
    return GpuMemory(name, total, others, own if weights is None else weights, step)


def step_memory(backend: Any, program: Program, layout: KVLayout, most: LargestStep) -> int:
    """Bytes that the largest step takes beside weights and blocks, found by running it."""
    from octavo.kernels.triton.profile import largest_batch, largest_samples, step_bytes

    batch = largest_batch(layout, most.tokens, most.rows, most.logits, most.context)
    return step_bytes(backend, program, layout, backend.device, batch, largest_samples(len(batch.logits_at)))
