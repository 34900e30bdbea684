"""What swapping a sequence out and back costs on this machine, and what computing it again costs.

Swap: the moves of a sequence's blocks to the host tier and back, through the executor, blocks scattered as they are
in a busy pool; median of several.  Recompute: a prefill of as many tokens through the engine.  Beside them what
SwapChoice, as the engine set it up, takes the two for, and the one it would choose.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from common import OUT, save, table, verdict

from octavo import LLM, SamplingParams
from octavo.core.plan import DEVICE, HOST, Move, Place, Plan
from octavo.loadgen import plots
from octavo.schedule.preempt import SwapChoice


def swap_seconds(llm: LLM, blocks: int, repeats: int, rng: random.Random) -> float:
    """Median seconds to move ``blocks`` blocks out and back."""
    executor = llm.parts.engine.executor
    pool = llm.parts.memory.blocks
    slots = min(pool, len(executor.host))  # type: ignore[attr-defined]
    taken = []
    for _ in range(repeats + 1):
        ours, theirs = rng.sample(range(pool), blocks), rng.sample(range(slots), blocks)
        out = tuple(Move(Place(DEVICE, b), Place(HOST, s)) for b, s in zip(ours, theirs, strict=True))
        back = tuple(Move(Place(HOST, s), Place(DEVICE, b)) for b, s in zip(ours, theirs, strict=True))
        began = time.perf_counter()
        executor.run(Plan(0, out, ()))
        executor.run(Plan(0, back, ()))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])  # the first may touch memory


def recompute_seconds(llm: LLM, tokens: int, repeats: int, rng: random.Random) -> float:
    """Median seconds to prefill ``tokens`` random tokens in the engine's chunks, and draw one."""
    taken = []
    for _ in range(repeats):
        prompt = [rng.randrange(llm.tokenizer.vocab_size) for _ in range(tokens)]
        began = time.perf_counter()
        llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def one_size(size: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """All lengths at one block size."""
    rng = random.Random(f"{given.seed} {size}")
    blocks = 2 * (-(-max(given.lengths) // size)) + 2
    settings: dict[str, Any] = {"kv_blocks": blocks, "block_size": size, "prefix_cache": False, "preempt": "auto"}
    found = []
    with LLM(given.model, swap_memory="1GiB", threads=given.threads, **settings) as llm:
        recompute_seconds(llm, 256, 2, rng)  # touch memory, settle the step size, measure a rate
        executor = llm.parts.engine.executor
        executor.blocks[:] = executor.host[:blocks] = 1  # type: ignore[attr-defined]
        for length in given.lengths:
            count = -(-length // size)
            swap = swap_seconds(llm, count, given.repeats, rng)
            recompute = recompute_seconds(llm, length, given.rounds, rng)
            choice = llm.parts.engine.scheduler.swap_pays
            assert isinstance(choice, SwapChoice)
            thought_swap, thought_recompute = choice.costs(length, count)
            chosen = swap if thought_swap <= thought_recompute else recompute
            found.append(
                {
                    "block_size": size,
                    "length": length,
                    "swap_s": swap,
                    "recompute_s": recompute,
                    "swap_estimate_s": thought_swap,
                    "recompute_estimate_s": thought_recompute,
                    "chosen": "swap" if thought_swap <= thought_recompute else "recompute",
                    "over_better": chosen / min(swap, recompute) - 1,
                }
            )
    return found


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/preempt.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a .gguf file (default: %(default)s)")
    p.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64], help="block sizes (default: 8 16 32 64)")
    p.add_argument(
        "--lengths", type=int, nargs="+", default=[128, 256, 512, 1024, 2048], help="tokens (default: 128 .. 2048)"
    )
    p.add_argument("--repeats", type=int, default=9, help="swaps each (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=1, help="prefills each (default: %(default)s)")
    p.add_argument("--threads", type=int, help="threads of the model")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    given = p.parse_args()
    if min([*given.sizes, *given.lengths, given.repeats, given.rounds]) < 1:
        p.error("--sizes, --lengths, --repeats and --rounds must be at least 1")
    return given


def main() -> int:
    given = arguments()
    found = [cell for size in given.sizes for cell in one_size(size, given)]
    ms = "{:,.2f}".format
    head = ["block", "tokens", "swap ms", "(estimate)", "recompute ms", "(estimate)", "ratio", "auto takes"]
    lines = []
    for c in found:
        times = [ms(1000 * c[k]) for k in ("swap_s", "swap_estimate_s", "recompute_s", "recompute_estimate_s")]
        ratio = f"{c['recompute_s'] / c['swap_s']:,.0f}"
        lines.append([str(c["block_size"]), f"{c['length']:,}", *times, ratio, c["chosen"]])
    table(head, lines)
    worst = 100 * max(c["over_better"] for c in found)
    good = verdict("the automatic choice over the better one, worst case in %", worst, 10, at_least=False)
    series = {}
    for key, name in (("swap_s", "swap"), ("recompute_s", "recompute")):
        for size in given.sizes:
            points = [(float(c["length"]), 1000 * c[key]) for c in found if c["block_size"] == size]
            series[f"{name}, blocks of {size}"] = points
    plots.lines(OUT / "preempt.svg", "Getting a sequence back", "tokens", "milliseconds", series, log="xy")
    save("preempt", {"settings": vars(given), "cells": found})
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
