"""Figures in Prometheus form: ``octavo:`` names, and ``vllm:`` ones where they mean the same, for dashboards."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import octavo
from octavo.core.request import Request as EngineRequest
from octavo.engine.service import AsyncLLM
from octavo.engine.stats import Stats
from octavo.paging.pool import BlockPool
from octavo.schedule.policies import FairShare
from octavo.server.admission import Admission

FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
MOST_USERS = 100  # that are shown apart

router = APIRouter()


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    return Response(request.app.state.octavo.metrics.text(), media_type=CONTENT_TYPE_LATEST)


class Histogram:
    """Owns: how often values fell below each bound.  Promises: observing is one search and two additions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus has them."""
        total, out = 0, []
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return out


class Metrics(Collector):
    """Owns: what the server itself measures.

    Promises: counters never fall; gauges of blocks tell apart what is held, what is free but can be hit, and what is
    empty.  Everything else is read from the engine's own counters when somebody asks.
    """

    def __init__(self, llm: AsyncLLM, admission: Admission, model: str) -> None:
        self._llm = llm
        self._admission = admission
        self._model = model
        self.first_token = Histogram(SLOW)
        self.inter_token = Histogram(FAST)
        self.end_to_end = Histogram(SLOW)
        self.prompt_sizes = Histogram(TOKENS)
        self.answer_sizes = Histogram(TOKENS)
        self.reasons: Counter[str] = Counter()
        self.http: Counter[tuple[str, int]] = Counter()  # (path, status)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def ended(self, request: EngineRequest, seconds: float) -> None:
        """A request of the engine's is over."""
        self.end_to_end.observe(seconds)
        self.prompt_sizes.observe(len(request.prompt))
        self.answer_sizes.observe(sum(len(s.tokens) - s.prompt_length for s in request.branches))
        reason = request.branches[0].finish_reason if request.branches and not request.error else None
        self.reasons["error" if request.error else reason or "stop"] += 1

    def text(self) -> bytes:
        return generate_latest(self.registry)

    # ---- what is told ----------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        stats = self._llm.stats()
        yield InfoMetricFamily(
            "octavo:build", "version and model", {"version": octavo.__version__, "model": self._model}
        )
        for name, help, value in _gauges(stats, self._admission):
            yield self._gauge(name, help, value)
        for name, help, value in _counters(stats):
            yield self._counter(name, help, value)
        yield self._counter(
            "octavo:requests_refused", "requests that the queue had no place for", self._admission.refused
        )
        yield from self._tiers()
        yield from self._tables()
        for name, help, histogram in (
            ("time_to_first_token_seconds", "from arrival to the first token", self.first_token),
            ("inter_token_latency_seconds", "from one token of an answer to the next", self.inter_token),
            ("e2e_request_latency_seconds", "from arrival to the end", self.end_to_end),
            ("request_prompt_tokens", "prompt tokens of a request", self.prompt_sizes),
            ("request_generation_tokens", "tokens that a request generated", self.answer_sizes),
        ):
            for prefix in ("octavo:", "vllm:"):
                family = HistogramMetricFamily(prefix + name, help, labels=["model_name"])
                family.add_metric([self._model], histogram.buckets(), histogram.sum)
                yield family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _tiers(self) -> Iterator[Metric]:
        """Blocks by tier: used (held by a sequence), cached (free, can be hit), free (empty)."""
        kv = self._llm.parts.engine.kv
        tiers: list[tuple[str, BlockPool | None]] = [
            ("device", kv.pool),
            ("host", kv.host.pool if kv.host is not None else None),
            ("disk", kv.disk.pool if kv.disk is not None else None),
        ]
        family = GaugeMetricFamily("octavo:kv_blocks", "blocks by tier and what they hold", labels=["tier", "state"])
        for tier, pool in tiers:
            if pool is not None:
                family.add_metric([tier, "used"], pool.size - pool.free)
                family.add_metric([tier, "cached"], pool.cached)
                family.add_metric([tier, "free"], pool.free - pool.cached)
        yield family

    def _tables(self) -> Iterator[Metric]:
        for name in ("octavo:request_success", "vllm:request_success"):
            family = CounterMetricFamily(name, "requests by how they ended", labels=["finished_reason", "model_name"])
            for reason, count in sorted(self.reasons.items()):
                family.add_metric([reason, self._model], count)
            yield family
        family = CounterMetricFamily("octavo:http_requests", "HTTP requests", labels=["path", "status"])
        for (path, status), count in sorted(self.http.items()):
            family.add_metric([path, str(status)], count)
        yield family
        policy = self._llm.parts.engine.scheduler.policy
        if isinstance(policy, FairShare):
            served = GaugeMetricFamily("octavo:fair_share", "cost served to a user over its weight", labels=["user"])
            for user, cost in sorted(dict(policy.counters).items(), key=lambda item: -item[1])[:MOST_USERS]:
                served.add_metric([user], cost)
            yield served


def _gauges(stats: Stats, admission: Admission) -> Iterator[tuple[str, str, float]]:
    usage = stats.blocks_used / stats.blocks
    for prefix in ("octavo:", "vllm:"):
        yield prefix + "num_requests_running", "sequences that hold blocks", stats.running
        yield prefix + "num_requests_waiting", "sequences that wait", stats.waiting
        yield prefix + "kv_cache_usage_perc", "share of blocks that sequences hold, 1 is all", usage
    yield "octavo:queue_sequences", "sequences that were let in", admission.sequences
    yield "octavo:queue_tokens", "prompt tokens that wait", admission.tokens
    yield "octavo:kv_blocks_shared", "blocks that several sequences hold", stats.blocks_shared
    yield "octavo:kv_blocks_peak", "most blocks held at a time", stats.blocks_peak
    yield "octavo:token_budget", "tokens that a step computes at most", stats.token_budget


def _counters(stats: Stats) -> Iterator[tuple[str, str, float]]:
    c = stats.counters
    for prefix in ("octavo:", "vllm:"):
        yield prefix + "num_preemptions", "sequences that lost their blocks for a while", c.preemptions
        yield prefix + "prompt_tokens", "prompt tokens of admitted requests", c.prompt_tokens
        yield prefix + "generation_tokens", "tokens generated", c.generated_tokens
        yield prefix + "prefix_cache_queries", "prompt tokens that were looked up in the prefix cache", c.prompt_tokens
        yield prefix + "prefix_cache_hits", "prompt tokens that came from it", c.cached_tokens
    yield "octavo:steps", "steps of the engine", c.steps
    yield "octavo:steps_ahead", "steps that were submitted while the one before them ran", c.steps_ahead
    yield "octavo:step_seconds", "time spent in steps", c.step_seconds
    yield "octavo:computed_tokens", "tokens that went through the model, recomputed ones included", c.computed_tokens
    yield "octavo:swaps", "preemptions whose blocks went to the host tier", c.swaps
    yield "octavo:recomputes", "preemptions whose tokens are computed again", c.recomputes
    yield "octavo:kv_copies", "blocks copied on write", c.copies
    yield "octavo:kv_evictions", "cached blocks whose content was given up", c.evictions
    yield "octavo:kv_demotions", "cached blocks that went to the host tier", c.demoted
    yield "octavo:kv_disk_writes", "blocks written to disk", c.disk_written
    yield "octavo:kv_disk_reads", "blocks read from disk", c.disk_read
    yield "octavo:kv_disk_failures", "blocks that disk lost or refused", c.disk_failed
    yield "octavo:requests_finished", "requests that ended with their answer", c.finished
    yield "octavo:requests_aborted", "requests that were taken back", c.aborted
    yield "octavo:requests_failed", "requests that the engine could not compute", c.failed
