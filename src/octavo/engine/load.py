"""A model on its backend: weights packed, a program made of them, the KV cache sized."""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import EngineConfig
from octavo.core.layout import KVLayout
from octavo.engine.gpu_memory import gpu_memory, largest_step, on_gpu, plan_gpu_memory, step_memory
from octavo.engine.memory import MemoryPlan, plan_memory
from octavo.errors import ConfigError
from octavo.kernels.backend import Backend, Program
from octavo.loading.checkpoint import Checkpoint
from octavo.models.decoder import compile_model, kv_layout, load_weights

LOGITS_BYTES = 64 << 20  # most that the logits of one scoring chunk may take


def layout_of(checkpoint: Checkpoint, config: EngineConfig) -> KVLayout:
    return kv_layout(checkpoint.spec, config.block_size, config.kv_dtype)


def context_of(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """The most tokens of one sequence: the model's, or less if set so."""
    most = checkpoint.spec.max_context
    if config.max_context is not None and config.max_context > most:
        raise ConfigError(f"max_context {config.max_context} is beyond the model's {most} tokens", "max_context")
    return config.max_context or most


def most_logits(vocab: int) -> int:
    """Logits rows of one scoring chunk."""
    return max(1, LOGITS_BYTES // (4 * vocab))


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
    whole = layout_of(checkpoint, config)
    if on_gpu(backend):
        coming = checkpoint.nbytes // config.tensor_parallel
        plan_gpu_memory(config, own, context, gpu_memory(backend, weights=coming))
    else:  # all ranks share this machine's memory
        memory = plan_memory(config, whole, context, checkpoint.nbytes)
    weights = load_weights(backend, checkpoint, progress)
    checkpoint.tensors.release()
    program = compile_model(backend, spec, weights, whole)
    if on_gpu(backend):
        step = step_memory(backend, program, own, largest_step(config, context, most_logits(spec.vocab)))
        memory = plan_gpu_memory(config, own, context, gpu_memory(backend, step=step))
    return program, memory
