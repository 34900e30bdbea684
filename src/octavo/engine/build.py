"""From a model's name and settings to an engine that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.clock import Clock, RealClock
from octavo.config import EngineConfig, format_size
from octavo.core.layout import KVLayout
from octavo.decode.lookup import PromptLookup
from octavo.engine.engine import Engine
from octavo.engine.gpu_memory import gpu_memory, largest_step, on_gpu, plan_gpu_memory, step_memory
from octavo.engine.intake import Intake
from octavo.engine.memory import MemoryPlan, plan_memory, plan_swap
from octavo.engine.persist import open_disk
from octavo.errors import ConfigError, ModelError
from octavo.execute.executor import LocalExecutor
from octavo.kernels.backend import Backend
from octavo.kernels.triton.device import choose_device, interpret
from octavo.loading import open_model
from octavo.loading.checkpoint import Checkpoint
from octavo.models.decoder import compile_model, kv_layout, load_weights
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget
from octavo.schedule.policies import POLICIES, FairShare, Policy
from octavo.schedule.preempt import SwapChoice
from octavo.text.chat import ChatTemplate
from octavo.text.guides import Guides
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger("octavo.engine")

Progress = Callable[[str, int, int], None]  # stage, done, of

LOGITS_BYTES = 64 << 20  # most that the logits of one scoring chunk may take


@dataclass
class Parts:
    """An engine and what belongs to it."""

    engine: Engine
    intake: Intake
    tokenizer: Tokenizer
    template: ChatTemplate
    checkpoint: Checkpoint
    memory: MemoryPlan
    config: EngineConfig


def make_backend(config: EngineConfig) -> Backend:
    """The kernels that the settings name; raises ConfigError for a device that can't be had.

    Only what is chosen is imported: torch takes a second, and need not be installed.
    """
    device = choose_device(config.device, config.backend, config.tensor_parallel)
    name = ("triton" if device == "cuda" else "cpu") if config.backend == "auto" else config.backend
    if name == "triton":
        return _triton(config, device)
    if config.kv_dtype == "fp8":
        raise ConfigError("kv_dtype fp8 is for a GPU; on the CPU int8 takes as little memory", "kv_dtype")
    if config.gemm != "fixed":
        raise ConfigError(f"gemm {config.gemm} is for a GPU; on the CPU sums have a fixed order anyway", "gemm")
    if name == "reference":
        from octavo.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    from octavo.kernels.cpu import CpuBackend

    return CpuBackend(threads=config.threads, compute=config.compute, isa=config.isa)


def _triton(config: EngineConfig, device: str) -> Backend:
    if config.gemm == "cublas":
        log.warning("gemm cublas: the same request may get other bytes in another batch")
    if device == "cpu":
        interpret()
    from octavo.kernels.triton.backend import TritonBackend

    return TritonBackend(device=device, gemm=config.gemm)


def make_policy(config: EngineConfig) -> Policy:
    return FairShare(config.user_weights) if config.policy == "fair" else POLICIES[config.policy]()


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.metadata is not None:
        return Tokenizer.from_gguf(checkpoint.metadata)
    if checkpoint.folder is None:
        raise ModelError(f"{checkpoint.path} has no tokenizer")
    return Tokenizer.from_folder(checkpoint.folder)


def layout_of(checkpoint: Checkpoint, config: EngineConfig) -> KVLayout:
    return kv_layout(checkpoint.spec, config.block_size, config.kv_dtype)


def context_of(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """The most tokens of one sequence: the model's, or less if set so."""
    most = checkpoint.spec.max_context
    if config.max_context is not None and config.max_context > most:
        raise ConfigError(f"max_context {config.max_context} is beyond the model's {most} tokens", "max_context")
    return config.max_context or most


def end_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """All ids that end an output: the generation config's and the tokenizer's, in order, once each."""
    ids = [*checkpoint.generation.get("eos_token_ids", ()), *tokenizer.eos_ids]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < checkpoint.spec.vocab))


def sampling_defaults(checkpoint: Checkpoint, config: EngineConfig) -> dict[str, Any]:
    """What the model's generation config sets for requests that do not; logged, and off on request."""
    given = checkpoint.generation
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    defaults = {name: given[name] for name in names if given.get(name) is not None}
    if given.get("do_sample") is False and "temperature" not in defaults:
        defaults = {"temperature": 0.0}
    if not defaults:
        return {}
    shown = ", ".join(f"{k} {v:g}" for k, v in defaults.items())
    if not config.generation_defaults:
        log.info("generation defaults of the model are off (%s)", shown)
        return {}
    log.info("defaults from the model's generation config, where a request sets none: %s", shown)
    return defaults


def build(model: str, config: EngineConfig, progress: Progress | None = None, clock: Clock | None = None) -> Parts:
    """Open, check, size, pack: an engine for ``model``, a name, a file or a folder."""
    clock = clock or RealClock()
    checkpoint = open_model(model, config.max_context)
    spec = checkpoint.spec
    context = context_of(checkpoint, config)
    layout = layout_of(checkpoint, config)
    backend = make_backend(config)
    most_logits = max(1, LOGITS_BYTES // (4 * spec.vocab))
    if on_gpu(backend):
        # What can't fit is refused before it is loaded; what can is sized by what a step then takes.
        plan_gpu_memory(config, layout, context, gpu_memory(backend, weights=checkpoint.nbytes))
    else:
        memory = plan_memory(config, layout, context, checkpoint.nbytes)
    tokenizer = open_tokenizer(checkpoint)
    packed = (lambda done, total: progress("loading", done, total)) if progress else None
    weights = load_weights(backend, checkpoint, packed)
    checkpoint.tensors.release()
    program = compile_model(backend, spec, weights, layout)
    if on_gpu(backend):
        step = step_memory(backend, program, layout, largest_step(config, context, most_logits))
        memory = plan_gpu_memory(config, layout, context, gpu_memory(backend, step=step))
    # Rows of the head that no token has must never be drawn: they have no text.
    banned = range(tokenizer.vocab_size, spec.vocab)
    host = plan_swap(config, layout, memory.blocks)
    store, files = (open_disk(checkpoint, layout, config, backend) or (None, 0)) if config.kv_disk else (None, 0)
    executor = LocalExecutor(backend, program, layout, memory.blocks, banned, host, store)
    kv = KV(memory.blocks, config.block_size, layout.windows, config.prefix_cache, host_slots=host, disk_slots=files)
    if store is not None and kv.disk is not None:
        store.adopt(kv.disk.adopt(store.files()))
    budget = TokenBudget(config.max_batched_tokens, report=log.info)
    choice = SwapChoice(kv, config.preempt, layout.block_bytes, executor.copy_rate(), lambda: budget.rate)
    ends = end_ids(checkpoint, tokenizer)
    engine = Engine(
        executor,
        kv,
        tokenizer=tokenizer,
        eos_ids=ends,
        policy=make_policy(config),
        budget=budget,
        swap_pays=choice,
        max_running=config.max_running,
        most_logits=most_logits,
        clock=clock,
        audited=config.audit,
        block_bytes=layout.block_bytes,
        drafter=PromptLookup(config.speculate) if config.speculate else None,
    )
    intake = Intake(
        tokenizer=tokenizer,
        vocab=spec.vocab,
        context=context,
        longest=memory.longest,
        eos_ids=ends,
        defaults=sampling_defaults(checkpoint, config),
        guides=Guides(tokenizer, ends),
        now=clock.now,
        blocks=memory.blocks,
        beam_blocks=kv.beam_blocks,
    )
    log.info("%s: weights %s, %s", model, format_size(checkpoint.nbytes), memory.describe())
    chosen = config.max_batched_tokens
    log.info("a step computes up to %s tokens", chosen or f"{engine.budget.tokens} (adapting to the machine)")
    return Parts(engine, intake, tokenizer, tokenizer.chat, checkpoint, memory, config)
