"""How much of a GPU's memory the KV cache gets: what the largest step leaves, found by running one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from octavo.config import EngineConfig, format_size
from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.engine.memory import MemoryPlan, plan_swap, planned, sizing
from octavo.errors import ConfigError
from octavo.kernels.backend import Backend, Program
from octavo.paging.kv import KV
from octavo.schedule.budget import HIGHEST, LOWEST


def largest_step(config: EngineConfig, context: int, most_logits: int) -> LargestStep:
    """What the scheduler keeps to with these settings; ``most_logits``: of the scored chunks of one step."""
    tokens = config.max_batched_tokens or max(HIGHEST, config.max_running + LOWEST)
    rows = min(config.max_running, tokens)
    logits = min(tokens, rows * (1 + (config.speculate or 0)) + most_logits)
    return LargestStep(tokens, rows, logits, context)


@dataclass(frozen=True)
class GpuMemory:
    """What takes a GPU's memory, in bytes.

    ``others``: programs, and what the driver keeps; the weights; the largest step; the graphs of small ones with their
    inputs; the buffers in which blocks wait for the way to the host.
    """

    name: str
    total: int
    others: int
    weights: int
    step: int = 0
    graphs: int = 0
    swap: int = 0

    @property
    def taken(self) -> int:
        return self.others + self.weights + self.step + self.graphs + self.swap

    def describe(self) -> str:
        parts = {
            "weights": self.weights,
            "a largest step": self.step,
            "graphs": self.graphs,
            "swap buffers": self.swap,
            "others": self.others,
        }
        return ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)


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


def gpu_memory(backend: Any, weights: int, swap: int = 0) -> GpuMemory:
    """What takes the GPU's memory now, and will when the weights have come."""
    from octavo.kernels.triton.profile import memory_of

    held = memory_of(backend.device)
    return GpuMemory(held.name, held.total, held.others, weights, swap=swap)


def measured_memory(
    backend: Any, program: Program, layout: KVLayout, most: LargestStep, coming: GpuMemory
) -> GpuMemory:
    """What takes the GPU's memory once the weights are there, found by running the largest step.

    Raises whatever torch raises where that step does not fit.
    """
    from octavo.kernels.triton.profile import measure

    found = measure(backend, program, layout, backend.device, most)
    return coming if found is None else replace(coming, **asdict(found))


def swap_buffers(config: EngineConfig, layout: KVLayout) -> int:
    """Bytes on the GPU that blocks wait in on their way to the host tier."""
    from octavo.kernels.triton.swap import waiting_room

    size = layout.block_bytes
    return 2 * waiting_room(size) * size if plan_swap(config, layout, 1 << 40) else 0


@contextmanager
def room_for(what: str, backend: Backend, config: EngineConfig, needed: int) -> Iterator[None]:
    """Memory that runs out in here is a ConfigError that says what the GPU has, and what works instead.

    ``needed``: bytes that this process can't do without.
    """
    try:
        yield
    except RuntimeError as error:  # as torch's own and CUDA's
        if not on_gpu(backend) or "out of memory" not in str(error):
            raise
        gpu = gpu_memory(backend, needed)
        raise ConfigError(
            f"{gpu.name} ran out of memory {what}: of its {format_size(gpu.total)} others have "
            f"{format_size(gpu.others)}, and the weights alone need {format_size(needed)} beside a KV cache and a "
            f"step of {config.max_batched_tokens or HIGHEST} tokens; fewer other programs on it, smaller weights, a "
            "lower max_batched_tokens or gpu_memory, or tensor_parallel over more GPUs would make room, and device cpu "
            "works without",
            "gpu_memory",
        ) from error
