"""What a run's records come to: percentiles, rates, goodput."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.loadgen import plots
from octavo.loadgen.asking import STOPPED, Record
from octavo.loadgen.drive import Drive

REFUSED = ("HTTP 429", "HTTP 503")  # a server under load may say so


@dataclass(frozen=True)
class Spread:
    """Of a sample, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        """None of an empty sample."""
        values = sorted(1000 * s for s in seconds)
        if not values:
            return None
        return cls(
            len(values),
            math.fsum(values) / len(values),
            percentile(values, 50),
            percentile(values, 90),
            percentile(values, 99),
            values[-1],
        )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Between two values of the sample in proportion, as NumPy does by default."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Goals:
    """Limits that a request has to keep to count as good, in milliseconds; ``itl`` is a request's mean."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def of(cls, text: str) -> Goals:
        """From ``ttft:500,itl:50``."""
        given: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = 0.0
            if name not in ("ttft", "itl", "e2e") or not 0 < limit < math.inf or name in given:
                raise ConfigError(f"goodput takes ttft, itl and e2e in milliseconds, as ttft:500,itl:50, not {text!r}")
            given[name] = limit
        return cls(**given)

    def kept(self, record: Record) -> bool:
        pairs = ((self.ttft, record.to_first), (self.itl, record.per_token), (self.e2e, record.in_all))
        return record.whole and all(limit is None or value is None or 1000 * value <= limit for limit, value in pairs)

    def __str__(self) -> str:
        return ", ".join(f"{name} {limit:g} ms" for name, limit in asdict(self).items() if limit is not None)


@dataclass(frozen=True)
class Figures:
    """All figures of one run; those of tokens and times count whole answers only.

    ``failures``: how many requests failed in which way, and what the first of them was told.
    """

    seconds: float
    done: int
    failures: dict[str, int]
    reasons: dict[str, str]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Spread | None
    itl: Spread | None
    per_token: Spread | None
    e2e: Spread | None
    lag: Spread | None
    mean_running: float
    most_running: int
    goals: Goals | None = None
    good: int | None = None

    @classmethod
    def of(cls, drive: Drive, goals: Goals | None = None) -> Figures:
        records = drive.records
        whole = [r for r in records if r.whole]
        failed = [r for r in records if r.failure is not None]
        reasons: dict[str, str] = {}
        for record in failed:
            reasons.setdefault(record.failure or "", record.error or "")
        seconds = max(drive.seconds, 1e-9)
        levels = running(records)
        return cls(
            seconds=seconds,
            done=len(whole),
            failures=dict(Counter(r.failure or "" for r in failed)),
            reasons=reasons,
            prompt_tokens=sum(r.prompt_tokens for r in whole),
            cached_tokens=sum(r.cached_tokens for r in whole),
            output_tokens=sum(r.output_tokens for r in whole),
            ttft=Spread.of(r.to_first for r in whole if r.to_first is not None),
            itl=Spread.of(gap for r in whole for gap in r.gaps),
            per_token=Spread.of(r.per_token for r in whole if r.per_token is not None),
            e2e=Spread.of(r.in_all for r in whole if r.in_all is not None),
            lag=Spread.of(drive.lag),
            mean_running=math.fsum(r.in_all or 0.0 for r in records) / seconds,
            most_running=max((level for _, level in levels), default=0),
            goals=goals,
            good=None if goals is None else sum(goals.kept(r) for r in whole),
        )

    @property
    def faults(self) -> int:
        """Requests that failed without having been refused for the load or stopped by who measures."""
        return sum(n for kind, n in self.failures.items() if kind not in REFUSED and kind != STOPPED)

    def rate(self, count: float) -> float:
        return count / self.seconds

    def rows(self) -> list[tuple[str, str]]:
        """As a person reads them."""
        told = [("requests", f"{self.done:,} answered in {self.seconds:,.1f} s, {self.rate(self.done):,.2f} a second")]
        for kind, count in self.failures.items():
            said = self.reasons[kind]
            told.append(("", f"{count:,} {kind}" + (f" ({said})" if said not in ("", kind) else "")))
        told.append(("running", f"{self.mean_running:,.1f} on average, {self.most_running:,} at most"))
        told.append(("output", f"{self.output_tokens:,} tokens, {self.rate(self.output_tokens):,.1f} a second"))
        cached = f", {100 * self.cached_tokens / self.prompt_tokens:.1f} % of them cached" if self.prompt_tokens else ""
        told.append(
            ("prompts", f"{self.prompt_tokens:,} tokens, {self.rate(self.prompt_tokens):,.1f} a second{cached}")
        )
        if self.goals is not None and self.good is not None:
            share = f", {100 * self.good / self.done:.1f} % of the answers" if self.done else ""
            told.append(("goodput", f"{self.rate(self.good):,.2f} requests a second within {self.goals}{share}"))
        return told

    def table(self) -> list[tuple[str, ...]]:
        """The times: a head and a line for each."""
        lines: list[tuple[str, ...]] = [("milliseconds", "mean", "p50", "p90", "p99", "most")]
        for name, spread in (
            ("to the first token", self.ttft),
            ("between tokens", self.itl),
            ("a token, by request", self.per_token),
            ("whole answer", self.e2e),
            ("sent too late by", self.lag),
        ):
            if spread is not None:
                values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
                lines.append((name, *(f"{v:,.1f}" for v in values)))
        return lines

    def report(self, records: Sequence[Record], began: float) -> dict[str, Any]:
        """For JSON: these figures, and a line for each request (times in seconds after the start)."""
        rates = {
            "requests_per_second": self.rate(self.done),
            "output_tokens_per_second": self.rate(self.output_tokens),
            "total_tokens_per_second": self.rate(self.output_tokens + self.prompt_tokens),
            "goodput": None if self.good is None else self.rate(self.good),
        }
        return {**asdict(self), **rates, "requests": [_line(r, began) for r in records]}


def _line(record: Record, began: float) -> dict[str, Any]:
    kept = ("number", "prompt_tokens", "cached_tokens", "output_tokens", "finish_reason", "failure", "error")
    line = {name: getattr(record, name) for name in kept}
    line |= {name: None if (t := getattr(record, name)) is None else t - began for name in ("planned", "sent", "first")}
    line |= {"ended": None if record.ended is None else record.ended - began}
    return line | {"worst_gap": max(record.gaps, default=None)}


def running(records: Iterable[Record]) -> list[tuple[float, int]]:
    """(moment, how many requests were in flight from then on), on the records' clock."""
    changes = [(r.sent, 1) for r in records] + [(r.ended, -1) for r in records if r.ended is not None]
    levels, level = [], 0
    for moment, change in sorted(changes):  # at the same moment one ends before another begins
        level += change
        levels.append((moment, level))
    return levels


def draw(folder: Path, figures: Figures, records: Sequence[Record], began: float) -> list[Path]:
    """Plots as SVG: how the times are spread, and how the run went."""
    whole = [r for r in records if r.whole]
    samples = {
        "first token": [1000 * r.to_first for r in whole if r.to_first],
        "between tokens": [1000 * gap for r in whole for gap in r.gaps if gap > 0],
        "whole answer": [1000 * r.in_all for r in whole if r.in_all],
    }
    drawn = []
    shares = {name: _shares(sample) for name, sample in samples.items() if sample}
    if shares:
        title = "Share that took at most so long"
        drawn.append(plots.lines(folder / "times.svg", title, "milliseconds", "%", shares, log="x"))
    levels = [(moment - began, float(level)) for moment, level in running(records)]
    if levels:
        rates = _rates(records, began, figures.seconds)
        for name, title, points in (("running", "Requests in flight", levels), ("tokens", "Tokens a second", rates)):
            drawn.append(plots.lines(folder / f"{name}.svg", title, "seconds", "", {"": points}))
    return drawn


def _shares(sample: Sequence[float], most: int = 200) -> list[tuple[float, float]]:
    ordered = sorted(sample)
    if len(ordered) > most:
        return [(percentile(ordered, 100 * i / most), 100 * i / most) for i in range(most + 1)]
    return [(value, 100 * (i + 1) / len(ordered)) for i, value in enumerate(ordered)]


def _rates(records: Iterable[Record], began: float, seconds: float) -> list[tuple[float, float]]:
    """Tokens that came in each of a hundred equal spans of the run, a second."""
    span = max(seconds / 100, 1e-3)
    counts: Counter[int] = Counter()
    for record in records:
        if record.first is None:
            continue
        moment = record.first - began
        counts[int(moment / span)] += 1
        for gap in record.gaps:
            moment += gap
            counts[int(moment / span)] += 1
    return [((i + 0.5) * span, counts[i] / span) for i in range(int(seconds / span) + 1)]
