"""From a model's name and settings to an engine that is ready to run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.clock import Clock, RealClock
from octavo.config import EngineConfig, format_size
from octavo.decode.lookup import PromptLookup
from octavo.engine.backends import make_backend
from octavo.engine.engine import Engine
from octavo.engine.gpu_memory import room_for
from octavo.engine.intake import Intake
from octavo.engine.load import context_of, largest_of, layout_of, load, most_logits
from octavo.engine.memory import MemoryPlan, plan_swap
from octavo.engine.persist import open_disk
from octavo.engine.ranks import load_parallel
from octavo.errors import ModelError
from octavo.execute.executor import LocalExecutor
from octavo.loading import open_model
from octavo.loading.checkpoint import Checkpoint
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget
from octavo.schedule.policies import POLICIES, FairShare, Policy
from octavo.schedule.preempt import SwapChoice
from octavo.text.chat import ChatTemplate
from octavo.text.guides import Guides
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger("octavo.engine")

Progress = Callable[[str, int, int], None]  # stage, done, of


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


def make_policy(config: EngineConfig) -> Policy:
    return FairShare(config.user_weights) if config.policy == "fair" else POLICIES[config.policy]()


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.metadata is not None:
        return Tokenizer.from_gguf(checkpoint.metadata)
    if checkpoint.folder is None:
        raise ModelError(f"{checkpoint.path} has no tokenizer")
    return Tokenizer.from_folder(checkpoint.folder)


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
    tokenizer = open_tokenizer(checkpoint)
    # Rows of the head that no token has must never be drawn: they have no text.
    banned = range(tokenizer.vocab_size, spec.vocab)
    packed = (lambda done, total: progress("loading", done, total)) if progress else None
    store, files = None, 0
    executor: LocalExecutor
    if config.tensor_parallel > 1:
        executor, memory, host = load_parallel(model, checkpoint, config, backend, banned, packed)
    else:
        program, memory = load(checkpoint, config, backend, layout, packed)
        host = plan_swap(config, layout, memory.blocks)
        store, files = (open_disk(checkpoint, layout, config, backend) or (None, 0)) if config.kv_disk else (None, 0)
        recorded = (lambda done, total: progress("recording", done, total)) if progress else None
        with room_for("when the KV cache and the graphs had their turn", backend, config, checkpoint.nbytes):
            executor = LocalExecutor(backend, program, layout, memory.blocks, banned, host, store)
            program.prepare(executor.blocks, largest_of(checkpoint, config), recorded)
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
        most_logits=most_logits(spec.vocab),
        clock=clock,
        audited=config.audit,
        block_bytes=layout.block_bytes,
        drafter=PromptLookup(config.speculate) if config.speculate else None,
        ahead=executor.ahead,
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
