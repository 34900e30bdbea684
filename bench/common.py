"""What the measuring commands share: where figures go, the paper's lengths, tables of them."""

from __future__ import annotations

import csv
import json
import math
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import octavo
from octavo.cli.console import columns
from octavo.core.plan import Move, Plan, RowResult, StepResult

OUT = Path(__file__).parent / "out"


class Counting:
    """An executor that computes nothing: every draw is the same token."""

    def run(self, plan: Plan) -> StepResult:
        rows = tuple(RowResult((1,) * len(row.draws), (None,) * len(row.draws)) for row in plan.rows)
        return StepResult(plan.step, rows)

    def flush(self, moves: Sequence[Move]) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Length:
    prompt: int
    output: int

    @property
    def total(self) -> int:
        return self.prompt + self.output


def shared_chats(count: int, context: int, seed: int, prompt: float = 161, output: float = 338) -> list[Length]:
    """Log-normal lengths, sigma 1.0, with the means that the PagedAttention paper gives for ShareGPT."""
    rng = random.Random(f"lengths {seed}")

    def draw(mean: float) -> int:
        return max(1, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0)))

    return [clipped(draw(prompt), draw(output), context) for _ in range(count)]


def traced(path: Path, count: int, context: int) -> list[Length]:
    """The first ``count`` requests of a CSV with the columns TIMESTAMP, ContextTokens, GeneratedTokens."""
    found: list[Length] = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if len(found) == count:
                break
            try:
                lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            except (KeyError, TypeError, ValueError):
                raise SystemExit(
                    f"error: {path}, row {len(found) + 1}: ContextTokens and GeneratedTokens are needed"
                ) from None
            found.append(clipped(*lengths, context))
    if not found:
        raise SystemExit(f"error: {path} has no rows")
    return found


def clipped(prompt: int, output: int, context: int) -> Length:
    """At least a token each; the prompt leaves room for one token, the output takes at most what is left."""
    prompt = max(1, min(prompt, context - 1))
    return Length(prompt, max(1, min(output, context - prompt)))


def save(name: str, report: dict[str, Any]) -> Path:
    """Keep a report, with what ran it, as bench/out/NAME-TIME.json."""
    OUT.mkdir(exist_ok=True)
    path = OUT / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    report = {"octavo": octavo.__version__, "machine": platform.platform(), **report}
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"\nall figures: {path}")
    return path


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    columns([head, *lines])


def verdict(what: str, value: float, bound: float, at_least: bool = True) -> bool:
    """Print a figure against what it is expected to be; whether it is."""
    good = value >= bound if at_least else value <= bound
    side = "at least" if at_least else "at most"
    print(f"{what}: {value:.3g} (expected: {side} {bound:g}) {'ok' if good else 'MISSED'}", flush=True)
    return good
