"""Throughput of an engine on a load: what ``octavo bench`` prints and ``bench/run.py`` compares."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.cli.console import rows
from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM
from octavo.errors import EngineError


@dataclass(frozen=True)
class Ask:
    """One greedy request of a load: its prompt's token ids, and how many tokens it answers."""

    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True)
class Measured:
    """One run of a load: seconds in all and, of a single request, to its first token."""

    prompt_tokens: int
    output_tokens: int
    seconds: float
    first_token: float | None = None

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return (self.output_tokens - 1) / (self.seconds - (self.first_token or 0.0))

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens a second until the first token is there."""
        return self.prompt_tokens / (self.first_token or self.seconds)

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds


def measure(llm: LLM, load: Sequence[Ask]) -> Measured:
    """Runs a load, all requests at once, greedy and without early ends."""
    params = [SamplingParams(temperature=0.0, max_tokens=ask.max_tokens, ignore_eos=True) for ask in load]
    began = time.perf_counter()
    outputs = llm.generate([ask.prompt for ask in load], params)
    seconds = time.perf_counter() - began
    failed = next((o.error for o in outputs if o.error), None)
    if failed is not None:
        raise EngineError(f"a request of the load failed: {failed}")
    return Measured(
        sum(len(o.prompt_token_ids) for o in outputs),
        sum(len(o.outputs[0].token_ids) for o in outputs),
        seconds,
        outputs[0].first_token_seconds if len(outputs) == 1 else None,
    )


def run(model: str, prompt: int, output: int, requests: int, engine: dict[str, Any]) -> int:
    """Single-stream prefill and decode, then ``requests`` at once, on random tokens."""
    with LLM(model, progress=True, **engine) as llm:
        rng = random.Random(0)
        vocab = llm.tokenizer.vocab_size

        def ask(length: int, answer: int) -> Ask:
            return Ask([rng.randrange(vocab) for _ in range(length)], answer)

        measure(llm, [ask(prompt, 2)])  # first use touches memory and settles the step size
        single = measure(llm, [ask(prompt, output)])
        batch = measure(llm, [ask(prompt, output) for _ in range(requests)])
        rows(
            [
                ("prefill", f"{single.prompt_rate:,.0f} tokens a second ({prompt:,} tokens, one request)"),
                ("decode", f"{single.decode_rate:,.1f} tokens a second ({output:,} tokens, one request)"),
                ("batch", f"{batch.output_rate:,.1f} tokens a second ({requests} requests of {prompt:,} + {output:,})"),
                ("blocks", str(llm.stats())),
                *([("gemm", "cublas: bytes depend on the batch")] if engine.get("gemm") == "cublas" else []),
            ]
        )
    return 0
