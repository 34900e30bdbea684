"""One KV budget, four memory rules: paged on demand against contiguous reservation, on chats' lengths.

The engine is the same in all four.  A reservation rule is a gate before it: a request is let in when a contiguous
range of the budget's slots is free for it (first fit, in order of arrival), and gives the range back when it ends.
What is let in cannot overflow, so the engine behind the gate has blocks in plenty and never preempts; on demand it
has the budget's blocks and nothing else.  All requests are there from the start: arrivals faster than service.

Means are taken from the moment that a tenth of the requests have finished to the one when nobody waits any more.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import OUT, Counting, Length, save, shared_chats, table, traced, verdict

from octavo import LLM, SamplingParams
from octavo.clock import RealClock
from octavo.core.request import Request
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.loadgen import plots
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget

VOCAB = 32_000  # of the scripted run
PAPER = {"paged": (30.42, 96.3), "max": (7.0, 20.4), "pow2": (9.81, 26.8), "oracle": (13.62, 38.2)}


def pow2(n: int) -> int:
    return 1 << (n - 1).bit_length()


RULES: dict[str, Callable[[Length, int], int] | None] = {
    "paged": None,
    "max": lambda length, context: context,
    "pow2": lambda length, context: min(context, length.prompt + pow2(length.output)),
    "oracle": lambda length, context: length.total,
}


class Ledger:
    """Owns: which slots of the budget are reserved.  Promises: ranges are contiguous, the first that fits is taken."""

    def __init__(self, slots: int) -> None:
        self.free = [(0, slots)]
        self.reserved = 0

    def reserve(self, count: int) -> int | None:
        for i, (start, stop) in enumerate(self.free):
            if stop - start >= count:
                self.free[i : i + 1] = [(start + count, stop)] if stop - start > count else []
                self.reserved += count
                return start
        return None

    def release(self, start: int, count: int) -> None:
        insort(self.free, (start, start + count))
        merged: list[tuple[int, int]] = []
        for a, b in self.free:
            if merged and merged[-1][1] == a:
                merged[-1] = (merged[-1][0], b)
            else:
                merged.append((a, b))
        self.free = merged
        self.reserved -= count


@dataclass
class Run:
    """What a rule did, step by step; ``first`` and ``last`` bound the steps that means are taken of."""

    rule: str
    running: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # token states held
    used: list[int] = field(default_factory=list)  # slots of used blocks, or reserved slots
    generated: list[int] = field(default_factory=list)  # so far
    seconds: list[float] = field(default_factory=list)  # since the start
    first: int = 0
    last: int = 0
    preemptions: int = 0

    def mean(self, values: Sequence[float]) -> float:
        part = values[self.first : self.last]
        return sum(part) / len(part)

    def summary(self, budget: int) -> dict[str, Any]:
        a, b = self.first, self.last - 1
        made, took = self.generated[b] - self.generated[a], self.seconds[b] - self.seconds[a]
        return {
            "running": self.mean(self.running),
            "tokens_per_step": made / max(1, b - a),
            "tokens_per_second": made / took if took > 0 else 0.0,
            "budget_share": self.mean(self.tokens) / budget,
            "used_share": self.mean(self.used) / budget,
            "filled_share": self.mean(self.tokens) / max(1e-9, self.mean(self.used)),
            "steps": len(self.running),
            "measured_steps": self.last - self.first,
            "seconds": self.seconds[-1],
            "tokens": self.generated[-1],
            "preemptions": self.preemptions,
            "running_all_steps": sum(self.running) / len(self.running),
        }


def drive(rule: str, engine: Engine, intake: Intake, lengths: Sequence[Length], given: argparse.Namespace) -> Run:
    """Run all requests under a rule."""
    run = Run(rule)
    reserve = RULES[rule]
    ledger = Ledger(given.budget)
    waiting = deque((length, request_of(intake, i, length, given)) for i, length in enumerate(lengths))
    inside: list[tuple[Request, int, int]] = []
    enough, saturated = len(lengths) // 10, True
    before = engine.counters.finished, engine.counters.generated_tokens
    began = time.perf_counter()
    if reserve is None:
        for _, request in waiting:
            engine.add(request)
        waiting.clear()
    while engine.busy or waiting:
        while reserve is not None and waiting:
            size = reserve(waiting[0][0], given.context)
            start = ledger.reserve(size)
            if start is None:
                break
            request = waiting.popleft()[1]
            inside.append((request, start, size))
            engine.add(request)
        engine.step()
        scheduler = engine.scheduler
        saturated = saturated and bool(waiting if reserve else scheduler.waiting)
        run.running.append(len(scheduler.running))
        run.tokens.append(sum(s.computed for s in scheduler.running))
        pool = engine.kv.pool
        run.used.append(ledger.reserved if reserve else (pool.size - pool.free) * engine.kv.block_size)
        run.generated.append(engine.counters.generated_tokens - before[1])
        run.seconds.append(time.perf_counter() - began)
        for entry in [e for e in inside if e[0].finished]:
            inside.remove(entry)
            ledger.release(entry[1], entry[2])
        run.first += engine.counters.finished - before[0] < enough
        run.last += saturated
    run.preemptions = scheduler.preemptions
    finished = engine.counters.finished - before[0]
    if finished != len(lengths) or engine.counters.failed or (reserve is not None and run.preemptions):
        raise SystemExit(f"error: {rule}: {finished} finished, {run.preemptions} preemptions")
    if run.last - run.first < 2:
        raise SystemExit("error: too few --requests to fill the budget: nobody waits when the measuring begins")
    return run


def request_of(intake: Intake, number: int, length: Length, given: argparse.Namespace) -> Request:
    """Random ids, so that no two prompts share a block."""
    rng = random.Random(f"{given.seed} {number}")
    prompt = [rng.randrange(intake.vocab) for _ in range(length.prompt)]
    return intake.request(prompt, SamplingParams(temperature=0.0, max_tokens=length.output, ignore_eos=True))


def one_rule(rule: str, lengths: Sequence[Length], given: argparse.Namespace) -> Run:
    blocks = given.budget // given.block_size
    if RULES[rule] is not None:  # the gate's ledger is what is short, blocks are not
        blocks = 2 * blocks + given.max_running
    if given.executor == "scripted":
        kv = KV(blocks, given.block_size, prefix_cache=given.prefix_cache, host_slots=blocks)
        clock = RealClock()
        budget = TokenBudget(given.step_tokens)
        engine = Engine(Counting(), kv, budget=budget, max_running=given.max_running, clock=clock)
        intake = Intake(tokenizer=None, vocab=VOCAB, context=given.context, longest=kv.longest(), now=clock.now)
        return drive(rule, engine, intake, lengths, given)
    with LLM(
        given.model,
        kv_blocks=blocks,
        block_size=given.block_size,
        max_context=given.context,
        max_running=given.max_running,
        max_batched_tokens=given.step_tokens,
        prefix_cache=given.prefix_cache,
        threads=given.threads,
    ) as llm:
        llm.generate([[1] * 32], SamplingParams(temperature=0.0, max_tokens=2))  # memory is touched
        engine = llm.parts.engine
        return drive(rule, engine, llm.parts.intake, lengths, given)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/oversubscribe.py", description=__doc__.splitlines()[0])
    p.add_argument("--executor", choices=("scripted", "model"), default="scripted", help="count only, or compute")
    p.add_argument("--model", default="smollm2-135m", help="for --executor model (default: %(default)s)")
    p.add_argument("--requests", type=int, help="how many (default: 1000 scripted, 160 with a model)")
    p.add_argument("--budget", type=int, default=16_000, help="KV slots in all (default: %(default)s)")
    p.add_argument("--block-size", type=int, default=16, help="slots a block (default: %(default)s)")
    p.add_argument("--context", type=int, default=2048, help="most tokens of a request (default: %(default)s)")
    p.add_argument("--trace", type=Path, metavar="CSV", help="lengths from ContextTokens and GeneratedTokens of a file")
    p.add_argument("--rule", action="append", choices=tuple(RULES), help="a rule to run (may be given again)")
    p.add_argument("--max-running", type=int, default=256, help="most sequences at a time (default: %(default)s)")
    p.add_argument("--step-tokens", type=int, default=512, help="token budget of a step (default: %(default)s)")
    p.add_argument("--prefix-cache", action="store_true", help="leave the prefix cache on; nothing can hit it")
    p.add_argument("--threads", type=int, help="threads of the model")
    p.add_argument("--seed", type=int, default=0, help="of lengths and token ids (default: %(default)s)")
    given = p.parse_args()
    if given.context > given.budget or given.context < 2 or given.budget < given.block_size:
        p.error("--context must be at least 2 and within --budget, and --budget at least a block")
    if given.requests is None:
        given.requests = 1000 if given.executor == "scripted" else 160
    if given.requests < 1:
        p.error("--requests must be at least 1")
    return given


def main() -> int:
    given = arguments()
    if given.trace:
        lengths = traced(given.trace, given.requests, given.context)
    else:
        lengths = shared_chats(given.requests, given.context, given.seed)
    print(
        f"{len(lengths)} requests, mean {sum(x.prompt for x in lengths) / len(lengths):.0f} in and "
        f"{sum(x.output for x in lengths) / len(lengths):.0f} out; {given.budget:,} slots in blocks of "
        f"{given.block_size}; {given.executor}"
    )
    rules = given.rule or list(RULES)
    runs = {rule: one_rule(rule, lengths, given) for rule in rules}
    sums = {rule: run.summary(given.budget) for rule, run in runs.items()}
    model = given.executor == "model"
    rate = "tokens/s" if model else "tokens/step"
    head = ["rule", "running", rate, "budget with tokens", "used or reserved", "of it with tokens", "preempted"]
    shown = []
    for rule, s in sums.items():
        speed = f"{s['tokens_per_second']:.1f}" if model else f"{s['tokens_per_step']:.2f}"
        shares = [f"{100 * s[k]:.1f} %" for k in ("budget_share", "used_share", "filled_share")]
        shown.append([rule, f"{s['running']:.1f}", speed, *shares, str(s["preemptions"])])
    table(head, shown)
    if not given.trace:
        print("the paper (OPT-13B): " + ", ".join(f"{r} {n:.1f} running, {s:.0f} %" for r, (n, s) in PAPER.items()))
    usual = not given.trace and given.context == 2048 and 14_000 <= given.budget <= 18_000 and given.block_size <= 16
    good = judge(sums) if usual else True
    name = f"oversubscribe-{given.executor}{'-' + given.trace.stem if given.trace else ''}"
    draw(name, runs, sums)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}
    save(name, {"settings": settings, "rules": sums})
    return 0 if good else 1


def judge(sums: dict[str, dict[str, Any]]) -> bool:
    """What is promised of a budget of about 16,000 slots and chats' lengths."""
    paged, good = sums.get("paged"), True
    if paged is None:
        return True
    for rule, least in (("max", 4.0), ("oracle", 1.4)):
        if rule in sums:
            good &= verdict(f"running, paged over {rule}", paged["running"] / sums[rule]["running"], least)
    good &= verdict("share of used blocks' slots with tokens", paged["filled_share"], 0.95)
    return good


def draw(name: str, runs: dict[str, Run], sums: dict[str, dict[str, Any]]) -> None:
    steps = {rule: list(enumerate(run.running)) for rule, run in runs.items()}
    plots.lines(OUT / f"{name}-running.svg", "Running sequences", "step", "sequences", steps)
    keys = {"holds tokens": "budget_share", "used or reserved": "used_share"}
    shares = {rule: {what: 100 * s[key] for what, key in keys.items()} for rule, s in sums.items()}
    plots.bars(OUT / f"{name}-shares.svg", "Share of the KV budget", "%", shares)
    tokens = {rule: list(zip(run.seconds, run.generated, strict=True)) for rule, run in runs.items()}
    if "model" in name:  # the seconds of a run that computes nothing say nothing
        plots.lines(OUT / f"{name}-tokens.svg", "Generated tokens", "seconds", "tokens", tokens)


if __name__ == "__main__":
    sys.exit(main())
