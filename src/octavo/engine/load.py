"""A model on its backend: weights packed, a program made of them, the KV cache sized."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.engine.gpu_memory import (
    gpu_memory,
    largest_step,
    measured_memory,
    on_gpu,
    plan_gpu_memory,
    room_for,
    swap_buffers,
)
from octavo.engine.memory import MemoryPlan, plan_memory
from octavo.errors import ConfigError
from octavo.kernels.backend import Backend, Program
from octavo.loading.checkpoint import Checkpoint
from octavo.models.decoder import compile_model, kv_layout, load_weights

LOGITS_BYTES = 64 << 20  # most that the logits of the scored chunks of one step may take


def layout_of(checkpoint: Checkpoint, config: EngineConfig) -> KVLayout:
    return kv_layout(checkpoint.spec, config.block_size, config.kv_dtype)


def context_of(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """The most tokens of one sequence: the model's, or less if set so."""
    most = checkpoint.spec.max_context
    if config.max_context is not None and config.max_context > most:
        raise ConfigError(f"max_context {config.max_context} is beyond the model's {most} tokens", "max_context")
    return config.max_context or most


def most_logits(vocab: int) -> int:
    """Logits rows of the scored chunks of one step."""
    return max(1, LOGITS_BYTES // (4 * vocab))


def largest_of(checkpoint: Checkpoint, config: EngineConfig) -> LargestStep:
    """The largest step that the engine's scheduler makes."""
    return largest_step(config, context_of(checkpoint, config), most_logits(checkpoint.spec.vocab))


def load(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backend: Backend,
    own: KVLayout,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Program, MemoryPlan]:
    """``own``: the layout of this process's blocks.  What can't fit is refused before anything is loaded.

    On a GPU the cache gets what a largest step, which is then run, leaves.  Raises ConfigError or ModelError.
    """
    spec, context = checkpoint.spec, context_of(checkpoint, config)
    whole, coming = layout_of(checkpoint, config), checkpoint.nbytes // config.tensor_parallel
    gpu = gpu_memory(backend, coming, swap_buffers(config, own)) if on_gpu(backend) else None
    if gpu is not None:
        plan_gpu_memory(config, own, context, gpu)
    else:  # all ranks share this machine's memory
        memory = plan_memory(config, whole, context, checkpoint.nbytes)
    with room_for("while its weights were loaded", backend, config, coming):
        weights = load_weights(backend, checkpoint, progress)
    checkpoint.tensors.release()
    program = compile_model(backend, spec, weights, whole)
    if gpu is not None:
        with room_for("in the largest step, which was tried", backend, config, coming):
            gpu = measured_memory(backend, program, own, largest_of(checkpoint, config), gpu)
        memory = plan_gpu_memory(config, own, context, gpu)
    return program, memory
