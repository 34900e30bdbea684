"""Engines around tiny models and the real CPU kernels, stepped by hand so that requests can come and go meanwhile."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.engine.build import Parts, build
from octavo.paging.audit import audit_idle
from octavo.sim.executors import mixed

DEFAULTS: dict[str, Any] = {
    "kv_blocks": 256,
    "threads": 1,
    "max_batched_tokens": 64,
    "kv_dtype": "float32",
    "audit": True,
}


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[Parts]:
    """A built engine; at the end it must be idle with every block accounted for."""
    parts = build(str(model), EngineConfig.of(**{**DEFAULTS, **settings}))
    yield parts
    if not parts.engine.busy:
        audit_idle(parts.engine.kv)
    parts.engine.executor.close()


def add(parts: Parts, prompt: Any, most: int | None = 12, **given: Any) -> Request:
    """Submits a request that is greedy, reports log-probabilities and runs past end tokens, unless told otherwise."""
    outer = {k: given.pop(k) for k in ("priority", "cache_salt") if k in given}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": most, "logprobs": 2, "ignore_eos": True, **given})
    request = parts.intake.request(prompt, params, **outer)
    parts.engine.add(request)
    return request


def finish(parts: Parts) -> None:
    while parts.engine.busy:
        parts.engine.step()


class Recalled:
    """A drafter that knows answers: it drafts what goes on as one of ``texts``, now right, now wrong from somewhere."""

    def __init__(self, texts: list[list[int]], most: int) -> None:
        self.texts = texts
        self.most = most

    def drafts(self, sequence: Sequence, most: int, rows: int) -> array[int]:
        tokens = sequence.tokens.tolist()
        known = [text[len(tokens) :] for text in self.texts if text[: len(tokens)] == tokens]
        mix = mixed((sequence.number, len(tokens)))
        drafts = array("i", known[mix % len(known)][: min(most, self.most)] if known else [])
        if drafts and mix >> 20 & 1:
            drafts[(mix >> 30) % len(drafts)] ^= 1
        return drafts

    def forget(self, number: int) -> None:
        pass


class Solo:
    """Owns: the answers of requests run alone, in one chunk, in blocks of 16, on one thread, with caching off."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self._model = model
        self._settings = {"prefix_cache": False, "max_batched_tokens": 2048, **settings}
        self._known: dict[str, dict[str, Any]] = {}

    def answer(self, prompt: list[int], most: int, **given: Any) -> dict[str, Any]:
        from engines import answer

        key = repr((prompt, most, sorted(given.items())))
        if key not in self._known:
            with engine(self._model, **self._settings) as parts:
                request = add(parts, prompt, most, **given)
                finish(parts)
                self._known[key] = answer(request)
        return self._known[key]
