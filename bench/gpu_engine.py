"""The engine on random weights: decode at batch sizes, and a load of many requests."""

from __future__ import annotations

import random
import time
from typing import Any, cast

import torch
from common import Length, shared_chats
from gpu_shapes import (
    SHAPES,
    RandomBackend,
    RandomCheckpoint,
    Sizes,
    layout_of,
    read_bytes,
    token_bytes,
    token_operations,
)

from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.load import largest_of, load
from octavo.execute.executor import LocalExecutor
from octavo.loading.checkpoint import Checkpoint
from octavo.models.spec import ModelSpec
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget

Report = dict[str, Any]


class RandomEngine:
    """Owns: an engine on random weights, without a tokenizer."""

    def __init__(self, device: torch.device, name: str, gemm: str = "fixed", **settings: Any) -> None:
        self.spec: ModelSpec = SHAPES[name]
        context = min(4096, self.spec.max_context)
        config = EngineConfig(max_running=512, max_context=context, gemm=gemm, swap_memory=0, **settings)
        backend = RandomBackend(str(device), gemm=gemm)
        layout = layout_of(self.spec)
        checkpoint = cast(Checkpoint, RandomCheckpoint(self.spec))
        program, memory = load(checkpoint, config, backend, layout)
        self.memory = memory
        executor = LocalExecutor(backend, program, layout, memory.blocks)
        program.prepare(executor.blocks, largest_of(checkpoint, config))
        kv = KV(memory.blocks, layout.block_size, layout.windows, False)
        budget = TokenBudget(config.max_batched_tokens)
        self.engine = Engine(executor, kv, budget=budget, max_running=512, ahead=True)
        self.intake = Intake(
            tokenizer=None,
            vocab=self.spec.vocab,
            context=context,
            longest=memory.longest,
            eos_ids=(),
            blocks=memory.blocks,
            beam_blocks=kv.beam_blocks,
            now=self.engine.clock.now,
        )

    def add(self, prompt: int, output: int, seed: int) -> Any:
        rng = random.Random(seed)
        ids = [rng.randrange(self.spec.vocab) for _ in range(prompt)]
        request = self.intake.request(ids, SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True))
        self.engine.add(request)
        return request

    def run(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def close(self) -> None:
        self.engine.close()


def decode_rates(made: RandomEngine, sizes: Sizes, limits: Report) -> list[Report]:
    """Tokens a second of so many sequences that decode together, and the share of what memory and products allow.

    ``waiting``: the rate when each step is decided only after the one before it has ended.
    """
    found = []
    for batch in sizes.batches:
        requests = [made.add(sizes.prompt, 2 * sizes.steps + 16, seed) for seed in range(batch)]
        while any(len(r.branches[0].tokens) <= sizes.prompt for r in requests):
            made.engine.step()
        made.engine.ahead = False
        waiting = _steps_timed(made, sizes.steps)
        made.engine.ahead = True
        rate = _steps_timed(made, sizes.steps)
        made.run()
        context = sizes.prompt + 1.5 * sizes.steps
        step = least_seconds(made.spec, batch, context, limits)
        share = rate * step / batch
        found.append({"batch": batch, "rate": rate, "waiting": waiting, "roofline": batch / step, "share": share})
    return found


def _steps_timed(made: RandomEngine, steps: int) -> float:
    """Tokens a second of so many steps, after a few to get going."""
    for _ in range(3):
        made.engine.step()
    began = time.perf_counter()
    tokens = sum(made.engine.step() for _ in range(steps))
    return tokens / (time.perf_counter() - began)


def least_seconds(spec: ModelSpec, batch: int, context: float, limits: Report) -> float:
    """What a decode step takes at least: its bytes at the copy's rate, or its products at the large product's."""
    memory = (read_bytes(spec) + batch * context * token_bytes(spec)) / limits["copy"]
    return max(memory, batch * token_operations(spec) / limits["matmul"])


def load_of(sizes: Sizes) -> list[Length]:
    """Lengths as the PagedAttention paper gives them for ShareGPT."""
    return shared_chats(sizes.requests, sizes.load_context, 0, *sizes.lengths)


def load_rate(made: RandomEngine, sizes: Sizes) -> Report:
    """All requests of the load at once: generated tokens a second."""
    requests = load_of(sizes)
    for seed, length in enumerate(requests[:32]):  # kernels are compiled when first used
        made.add(length.prompt, min(length.output, 8), seed)
    made.run()
    for seed, length in enumerate(requests):
        made.add(length.prompt, length.output, seed)
    began = time.perf_counter()
    made.run()
    took = time.perf_counter() - began
    tokens = sum(length.output for length in requests)
    return {"requests": len(requests), "tokens": tokens, "seconds": took, "rate": tokens / took}
