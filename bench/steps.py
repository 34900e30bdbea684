"""What a step costs beside its kernels, how it grows, and how evenly tokens come while prompts are read.

    python bench/steps.py [--model NAME] [--only overhead --only growth --only gaps --only scheduling]

- overhead: the share of a step that is not spent inside the kernels (model and sampler), with 1 and with 64 sequences
- growth: a decode step over the length of its context, against the bytes of K and V that are added; output tokens a
  second over the number of running sequences
- gaps: time between tokens of 64 chats that arrive at once, while any prompt is still being read
- scheduling: the time of a step without a model, over rows, and in pools of a thousand and of a million blocks

Exits with 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import common
import loads
import numpy as np

from octavo import LLM, SamplingParams
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.kernels.threads import choose_threads
from octavo.loadgen import plots
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget

PARTS = ("overhead", "growth", "gaps", "scheduling")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Stopwatch:
    """Owns: how long the calls of some methods took, added up.  Promises: what it watches behaves as before."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(owner, name, timed)


class Native:
    """Stands before a native object, and times one of its methods."""

    def __init__(self, inner: Any, name: str, watch: Stopwatch) -> None:
        self.inner = inner
        setattr(self, name, getattr(inner, name))
        watch.watch(self, name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def prompts(llm: LLM, count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(f"{count} {length} {seed}")
    return [[rng.randrange(100, llm.tokenizer.vocab_size - 100) for _ in range(length)] for _ in range(count)]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def stepped(llm: LLM, asks: Sequence[Sequence[int]], tokens: int) -> list[float]:
    """Seconds of each pure decode step (every sequence in it, one token each)."""
    engine = llm.parts.engine
    times: list[float] = []
    step = engine.step

    def timed() -> int:
        began = time.perf_counter()
        done = step()
        if done == len(asks):
            times.append(time.perf_counter() - began)
        return done

    engine.step = timed  # type: ignore[method-assign]
    try:
        llm.reset_prefix_cache()
        llm.generate([list(a) for a in asks], greedy(tokens))
    finally:
        del engine.step  # type: ignore[attr-defined]
    return times


def overhead(llm: LLM, report: dict[str, Any]) -> bool:
    kernels, steps = Stopwatch(), Stopwatch()
    engine = llm.parts.engine
    executor: Any = engine.executor
    executor.program.native = Native(executor.program.native, "run", kernels)
    executor.backend.native = Native(executor.backend.native, "sample", kernels)
    steps.watch(engine, "step")
    good = True
    for count, bound in ((1, 0.08), (64, 0.05)):
        shares = []
        for round in range(4):
            llm.reset_prefix_cache()
            kernels.seconds = steps.seconds = 0.0
            llm.generate(prompts(llm, count, 64, round), greedy(128))
            shares.append(1 - kernels.seconds / steps.seconds)
        report[f"{count}"] = shares
        good &= common.verdict(
            f"{count} sequences: share of a step outside the kernels", statistics.median(shares[1:]), bound, False
        )
    executor.program.native, executor.backend.native = executor.program.native.inner, executor.backend.native.inner
    del engine.step  # type: ignore[attr-defined]
    return good


def growth(llm: LLM, report: dict[str, Any]) -> bool:
    memory = np.ones(512 << 20, np.uint8)
    backend: Any = llm.parts.engine.executor.backend  # type: ignore[attr-defined]
    read = statistics.median(backend.kernels.probe_read(memory, backend.threads.count) for _ in range(5))
    most = min(llm.parts.memory.limit, 8192) - 80
    lengths = [most // 16, most // 4, most // 2, most]
    per_token = llm.parts.memory.layout.bytes_per_token
    times = [statistics.median(stepped(llm, prompts(llm, 1, n), 64)) for n in lengths]
    lines = [[f"{n:,}", f"{t * 1e3:.2f}"] for n, t in zip(lengths, times, strict=True)]
    common.table(["context", "ms a decode step"], lines)
    slope = (times[-1] - times[0]) / (lengths[-1] - lengths[0])
    middle = times[0] + slope * (lengths[2] - lengths[0])
    report["context"] = {"lengths": lengths, "seconds": times, "read": read, "bytes_per_token": per_token}
    print(f"slope: K and V at {per_token / slope / 1e9:.1f} GB/s; a plain read of memory: {read / 1e9:.1f} GB/s")
    good = common.verdict("decode at half the context, over the straight line", times[2] / middle, 1.1, False)
    rates = {}
    for rows in ROWS:
        decode = statistics.median(stepped(llm, prompts(llm, rows, 32), 48))
        rates[rows] = rows / decode
    print()
    common.table(["sequences", "tokens/s"], [[f"{n}", f"{r:,.0f}"] for n, r in rates.items()])
    report["running"] = rates
    plots.lines(
        common.OUT / "steps-running.svg", "Decoding together", "sequences", "tokens/s", {"": [*rates.items()]}, "x"
    )
    points = [(n, t * 1e3) for n, t in zip(lengths, times, strict=True)]
    plots.lines(common.OUT / "steps-context.svg", "A decode step over its context", "tokens", "ms", {"": points})
    rising = all(rates[b] >= 0.95 * rates[a] for a, b in zip(ROWS, ROWS[1:], strict=False))
    good &= common.verdict("tokens a second at 64 sequences over one", rates[64] / rates[1], 3.0)
    print(f"rising all the way: {'yes' if rising else 'no, see above'}")
    return good


def gaps(llm: LLM, report: dict[str, Any]) -> bool:
    """Between two tokens of one chat, while prompts are read."""
    good = True
    median, worst = [], []
    for round in range(3):
        asks = loads.own(llm.tokenizer)("chat64", round)
        llm.reset_prefix_cache()
        last: dict[str, float] = {}
        spans: list[tuple[float, float]] = []
        parts = llm.parts

        def sink(event: Any, last: dict[str, float] = last, spans: list[tuple[float, float]] = spans) -> None:
            now = time.perf_counter()
            if hasattr(event, "tokens") and event.tokens:
                if event.request in last:
                    spans.append((now, now - last[event.request]))
                last[event.request] = now

        requests = [parts.intake.request(a.prompt, greedy(a.max_tokens), sink=sink) for a in asks]
        for request in requests:
            parts.engine.add(request)
        reading = time.perf_counter()
        while parts.engine.busy:
            parts.engine.step()
            if len(last) < len(requests):
                reading = time.perf_counter()
        during = [span for at, span in spans if at <= reading]
        median.append(statistics.median(during))
        worst.append(statistics.quantiles(during, n=100)[98])
    report |= {"median": median, "p99": worst}
    ratio = statistics.median(w / m for w, m in zip(worst, median, strict=True))
    print(f"median {statistics.median(median) * 1e3:.0f} ms, p99 {statistics.median(worst) * 1e3:.0f} ms")
    good &= common.verdict("time between tokens while prompts are read, p99 over median", ratio, 3.0, False)
    return good


def bare(blocks: int, rows: int, length: int) -> tuple[float, float]:
    """Median seconds that a decode step of ``rows`` sequences of ``length`` tokens takes without a model: for being
    decided and committed to blocks, and for all of it, results folded back and told."""
    kv = KV(blocks, 16, (None,))
    engine = Engine(common.Counting(), kv, budget=TokenBudget(1 << 20), max_running=rows)
    intake = Intake(tokenizer=None, vocab=1000, context=4096, longest=kv.longest(), now=engine.clock.now)
    rng = random.Random(1)
    for _ in range(rows):
        engine.add(intake.request([rng.randrange(1000) for _ in range(length)], greedy(200)))
    scheduling = Stopwatch()
    scheduling.watch(engine.scheduler, "decide")
    scheduling.watch(engine.scheduler, "commit")
    times, scheduled = [], []
    while engine.busy:
        scheduling.seconds, began = 0.0, time.perf_counter()
        if engine.step() == rows:
            times.append(time.perf_counter() - began)
            scheduled.append(scheduling.seconds)
    return statistics.median(scheduled), statistics.median(times)


def scheduling(report: dict[str, Any]) -> bool:
    rows = (1, 16, 64, 256)
    times = {}
    for r in rows:
        found = [bare(16_384, r, 32) for _ in range(3)]
        times[r] = statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)
    lines = [[f"{r}", *(f"{t * 1e3:.3f}" for t in pair)] for r, pair in times.items()]
    common.table(["rows", "ms to decide and commit", "ms a step without a model"], lines)
    small, large = bare(1024, 16, 32)[1], bare(1_000_000, 16, 32)[1]
    report |= {"rows": times, "thousand": small, "million": large}
    good = common.verdict("ms to decide and commit 256 rows", times[256][0] * 1e3, 1.0, False)
    good &= common.verdict("a row of 256 over a row of 64", times[256][1] / times[64][1] / 4, 1.5, False)
    return good & common.verdict("16 rows in a million blocks over a thousand", large / small, 1.3, False)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/steps.py", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a .gguf file (default: %(default)s)")
    p.add_argument("--only", action="append", choices=PARTS, help="a part to run (may be given again)")
    p.add_argument("--threads", type=int, help="default: the CPUs this process may use")
    return p.parse_args()


def main() -> int:
    given = arguments()
    wanted = given.only or PARTS
    report: dict[str, Any] = {"model": given.model}
    good = True
    if "scheduling" in wanted:
        print("\n== scheduling")
        good &= scheduling(report.setdefault("scheduling", {}))
    measures = {"overhead": overhead, "growth": growth, "gaps": gaps}
    if any(name in wanted for name in measures):
        with LLM(given.model, threads=given.threads or choose_threads().count, speculate=None) as llm:
            llm.generate(prompts(llm, 8, 64), greedy(16))
            for name, part in measures.items():
                if name in wanted:
                    print(f"\n== {name}")
                    good &= part(llm, report.setdefault(name, {}))
    common.save("steps", report)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
