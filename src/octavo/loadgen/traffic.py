"""Which requests there are and when they come: drawn from a seed, or read from a trace."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

TRACE_BLOCK = 512  # prompt tokens that one entry of a trace's hash_ids stands for


@dataclass(frozen=True)
class Planned:
    """One request before its text exists.

    ``at``: seconds after the start, or None: as soon as a place is free.  ``prefix``: tokens of which common prefix
    stand ahead of the ``prompt`` tokens.  ``blocks``: the prompt is cut from these blocks, equal ids for equal text.
    """

    number: int
    at: float | None
    prompt: int
    output: int
    prefix: int | None = None
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Token counts of prompts and answers: all alike, or log-normal around the same means with this ``spread``."""

    prompt: int
    output: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._one(rng, self.prompt), self._one(rng, self.output)

    def _one(self, rng: random.Random, mean: int) -> int:
        if self.spread == 0:
            return mean
        return max(1, round(rng.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)))


@dataclass(frozen=True)
class Prefixes:
    """``share`` of the requests begin with one of ``count`` common prefixes."""

    count: int = 0
    share: float = 1.0


def drawn(seed: int, lengths: Lengths, prefixes: Prefixes, rate: float | None) -> Iterator[Planned]:
    """Without end.  ``rate``: requests a second on average, in a Poisson process; None: one when another ends."""
    rng = random.Random(f"traffic {seed}")
    at = 0.0
    number = 0
    while True:
        prompt, output = lengths.draw(rng)
        prefix = rng.randrange(prefixes.count) if prefixes.count and rng.random() < prefixes.share else None
        yield Planned(number, None if rate is None else at, prompt, output, prefix)
        number += 1
        if rate is not None:
            at += rng.expovariate(rate)


def traced(path: Path, speed: float = 1.0, scale: float = 1.0) -> Iterator[Planned]:
    """The requests of a trace, in its order; ``speed`` shortens times between them, ``scale`` their lengths.

    A CSV has the columns TIMESTAMP, ContextTokens and GeneratedTokens; a line of a JSONL file has timestamp (in
    milliseconds), input_length, output_length and, if it knows which prompts begin alike, hash_ids.
    """
    read = _json_lines if path.suffix in (".jsonl", ".json") else _csv_rows
    first: float | None = None
    try:
        for number, (seconds, prompt, output, blocks) in enumerate(read(path)):
            first = seconds if first is None else first
            at = max(0.0, (seconds - first) / speed)
            yield Planned(number, at, max(1, round(prompt * scale)), max(1, round(output * scale)), None, blocks)
    except OSError as error:
        raise ConfigError(f"the trace {path} can't be read: {error.strerror}", "trace") from None
    except UnicodeDecodeError:
        raise ConfigError(f"the trace {path} is no text in UTF-8", "trace") from None
    if first is None:
        raise ConfigError(f"the trace {path} has no requests", "trace")


Row = tuple[float, int, int, tuple[int, ...]]


def _csv_rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), 2):
            try:
                # Seven digits of a second's fraction, as traces have them, are more than fromisoformat takes.
                moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
                found = moment, int(row["ContextTokens"]), int(row["GeneratedTokens"]), ()
            except (KeyError, TypeError, AttributeError, ValueError):
                raise ConfigError(
                    f"{path}, line {number}: TIMESTAMP, ContextTokens and GeneratedTokens are needed", "trace"
                ) from None
            yield found


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row: dict[str, Any] = json.loads(line)
                blocks = tuple(int(b) for b in row.get("hash_ids") or ())
                found = float(row["timestamp"]) / 1000, int(row["input_length"]), int(row["output_length"]), blocks
            except (KeyError, TypeError, AttributeError, ValueError):
                raise ConfigError(
                    f"{path}, line {number}: timestamp, input_length and output_length are needed", "trace"
                ) from None
            yield found


def limited(requests: Iterator[Planned], count: int | None, context: int | None) -> Iterator[Planned]:
    """At most ``count`` of them; prompts and answers are cut so that both together fit into ``context`` tokens."""
    for planned in islice(requests, count):
        if context is not None:
            prompt = min(planned.prompt, context - 1)
            planned = replace(planned, prompt=prompt, output=min(planned.output, context - prompt))
        yield planned
