"""What guides cost: time to compute a mask, time a step waits for it, and whether neighbours are slowed.

    python bench/guides.py [MODEL ...]

Two loads in turn, of equally many sequences and tokens: eight plain requests beside eight more plain ones, and the same
eight beside eight that follow a JSON schema.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from octavo import Guide, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.build import Parts, build
from octavo.text import guides as module

SCHEMA = {
    "type": "array",
    "minItems": 50,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}
TOKENS, PAIRS = 64, 6


class Watch:
    """Owns: how long each mask took, and how long the step waited for it."""

    def __init__(self) -> None:
        self.masks: list[float] = []
        self.waits: list[float] = []
        compute, bits = module.Matcher._compute, module.Pending.bits

        def timed_compute(matcher: Any) -> bytes:
            began = time.perf_counter()
            mask = compute(matcher)
            self.masks.append(time.perf_counter() - began)
            return mask

        def timed_bits(pending: Any) -> bytes:
            began = time.perf_counter()
            mask = bits(pending)
            self.waits.append(time.perf_counter() - began)
            return mask

        module.Matcher._compute, module.Pending.bits = timed_compute, timed_bits  # type: ignore[method-assign]


def load(parts: Parts, guide: Guide | None) -> tuple[float, list[list[int]]]:
    """Seconds a step of decoding, and the tokens of the eight plain requests."""
    requests = []
    for i in range(16):
        params = SamplingParams(
            max_tokens=TOKENS,
            temperature=0.8,
            seed=i,
            ignore_eos=True,
            guide=guide if i % 2 else None,
        )
        requests.append(parts.intake.request(f"Person number {i}:", params))
        parts.engine.add(requests[-1])
    times = []
    while parts.engine.busy:
        began = time.perf_counter()
        parts.engine.step()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:-2]), [list(r.branches[0].output()) for r in requests[::2]]


def middle_and_tail(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    return f"median {1e6 * statistics.median(ordered):.0f} us, p99 {1e6 * ordered[len(ordered) * 99 // 100]:.0f} us"


def measure(name: str, watch: Watch) -> None:
    parts = build(name, EngineConfig.of(kv_blocks=400, prefix_cache=False))
    guide = Guide.json(SCHEMA)
    began = time.perf_counter()
    parts.intake.request("x", SamplingParams(guide=Guide.regex("a"), max_tokens=1))
    ready = time.perf_counter()
    parts.intake.request("x", SamplingParams(guide=guide, max_tokens=1))
    compiled = time.perf_counter()
    print(f"{name}: vocabulary made ready once, {ready - began:.2f} s; a schema, {1e3 * (compiled - ready):.1f} ms")
    for warm in (None, guide):
        load(parts, warm)
    watch.masks.clear()
    watch.waits.clear()
    plain, guided = [], []
    for _ in range(PAIRS):
        seconds, tokens = load(parts, None)
        plain.append(seconds)
        seconds, same = load(parts, guide)
        guided.append(seconds)
        if same != tokens:
            raise SystemExit("a neighbour's tokens changed")
    ratios = [g / p for p, g in zip(plain, guided, strict=True)]
    print(
        f"  a step of 16 decodes: {1e3 * statistics.median(plain):.2f} ms plain, "
        f"{1e3 * statistics.median(guided):.2f} ms with 8 guided; ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f} in {PAIRS} pairs)"
    )
    print(f"  a mask: {middle_and_tail(watch.masks)}; the step waits for it: {middle_and_tail(watch.waits)}")
    parts.engine.close()


if __name__ == "__main__":
    watching = Watch()
    for model in sys.argv[1:] or ["smollm2-135m"]:
        measure(model, watching)
