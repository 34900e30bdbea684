"""From the logits of a step to its tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.plan import Draw, Row, RowResult, TokenLogprobs
from octavo.kernels.backend import Backend, Later, Logits, SampleBatch, Sampled

NOT_A_NUMBER = "the model's logits for this request are not finite numbers, or every token is banned"


def draw_batch(draws: Sequence[tuple[int, Draw]], banned: np.ndarray) -> SampleBatch:
    """(logits row, draw) pairs as arrays; ``banned`` ids (rows of the head that no token has) are banned for all."""
    all = [d for _, d in draws]
    # A call of NumPy costs more than a row: columns of one type are made together.
    temperature, top_p, min_p, repetition, presence, frequency = np.array(
        [
            [d.temperature for d in all],
            [d.top_p for d in all],
            [d.min_p for d in all],
            [d.repetition for d in all],
            [d.presence for d in all],
            [d.frequency for d in all],
        ],
        np.float32,
    )
    row, top_k, branch, position, logprobs = np.array(
        [
            [r for r, _ in draws],
            [d.top_k for d in all],
            [d.branch for d in all],
            [d.position for d in all],
            [d.logprobs for d in all],
        ],
        np.int32,
    )
    return SampleBatch(
        row=row,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        seed=np.array([d.seed for d in all], np.uint64),
        branch=branch,
        position=position,
        logprobs=logprobs,
        bias=_bias(all, banned),
        history=_ragged([d.history for d in all], np.int32),
    )


def masks(draws: Sequence[tuple[int, Draw]], vocabulary: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Which mask holds for each draw, and the masks, each waited for; (None, None) where there is none."""
    distinct = list({id(d.mask): d.mask for _, d in draws if d.mask is not None}.values())
    if not distinct:
        return None, None
    place = {id(mask): k for k, mask in enumerate(distinct)}
    words = np.zeros((len(distinct), (vocabulary + 31) // 32), "<u4")
    for line, mask in zip(words.view(np.uint8), distinct, strict=True):
        bits = np.frombuffer(mask.bits(), np.uint8)[: len(line)]
        line[: len(bits)] = bits
    return np.array([place.get(id(d.mask), -1) for _, d in draws], np.int32), words


def _ragged(items: Sequence[Sequence[tuple[int, float]]], dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    offsets = np.zeros(len(items) + 1, np.int32)
    if not any(items):
        return offsets, np.empty(0, np.int32), np.empty(0, dtype)
    np.cumsum([len(i) for i in items], out=offsets[1:])
    total = int(offsets[-1])
    ids = np.fromiter((k for i in items for k, _ in i), np.int32, total)
    values: np.ndarray = np.fromiter((v for i in items for _, v in i), dtype, total)
    return offsets, ids, values


def _bias(draws: Sequence[Draw], banned: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    own = _ragged([d.bias for d in draws], np.float32)
    if not len(banned):
        return own
    offsets, ids, values = own
    at: np.ndarray = np.repeat(offsets[1:], len(banned))
    return (
        offsets + np.arange(len(draws) + 1, dtype=np.int32) * len(banned),
        np.insert(ids, at, np.tile(banned, len(draws))),
        np.insert(values, at, np.float32("-inf")),
    )


Scores = tuple[TokenLogprobs, ...] | None  # None: they are not numbers


@dataclass(frozen=True)
class Drawing:
    """What the rows of a step yield, on its way: ``scores`` by row, and the tokens when they are waited for."""

    rows: Sequence[Row]
    scores: dict[int, Scores]
    sampled: Later | None

    def results(self) -> tuple[RowResult, ...]:
        """Waits."""
        sampled = self.sampled() if self.sampled else None
        out, first = [], 0
        for r, row in enumerate(self.rows):
            stop = first + len(row.draws)
            out.append(_row_result(row, sampled, first, stop, self.scores.get(r, ())))
            first = stop
        return tuple(out)


def results(backend: Backend, rows: Sequence[Row], logits: Logits, banned: np.ndarray) -> tuple[RowResult, ...]:
    """``logits`` [R, V] in the order of :func:`octavo.execute.inputs.batch`."""
    return begin(backend, rows, logits, banned).results()


def begin(backend: Backend, rows: Sequence[Row], logits: Logits, banned: np.ndarray) -> Drawing:
    """The same without waiting for the tokens; where rows are scored, the device is waited for."""
    draws: list[tuple[int, Draw]] = []
    scored: list[tuple[int, int]] = []  # (row, first logits row)
    at = 0
    for r, row in enumerate(rows):
        if row.targets:
            scored.append((r, at))
            at += len(row.targets)
        if row.draws:
            if len(row.targets) < len(row.tokens):
                at += 1 + row.drafts
            draws += [(at - 1 - row.drafts + i if row.drafts else at - 1, draw) for i, draw in enumerate(row.draws)]
    scores: dict[int, Scores] = {r: _score(backend, rows[r], logits, a) for r, a in scored}
    sampled = None
    if draws:
        batch = draw_batch(draws, banned)
        batch.mask, batch.masks = masks(draws, logits.shape[1])
        sampled = backend.draw(logits, batch)
    return Drawing(rows, scores, sampled)


def _score(backend: Backend, row: Row, logits: Logits, at: int) -> Scores:
    n = len(row.targets)
    scored = backend.score(logits[at : at + n], np.frombuffer(row.targets, np.int32), row.score)
    if (scored.token < 0).any():
        return None
    return tuple(_entry(scored, i, token, row.score) for i, token in enumerate(row.targets))


def _entry(sampled: Sampled, i: int, token: int, k: int) -> TokenLogprobs:
    best = tuple(zip(sampled.top_ids[i, :k].tolist(), sampled.top_logprobs[i, :k].tolist(), strict=True)) if k else ()
    return TokenLogprobs(token, float(sampled.logprob[i]), int(sampled.rank[i]), best)


def _row_result(row: Row, sampled: Sampled | None, first: int, stop: int, scores: Scores) -> RowResult:
    if scores is None:
        return RowResult(error=NOT_A_NUMBER)
    if sampled is None or not row.draws:
        return RowResult(scores=scores)
    tokens = tuple(sampled.token[first:stop].tolist())
    if min(tokens) < 0:
        # A draft that is wrong may lead anywhere: only what follows right ones counts.
        tokens = tokens[: next(i for i, token in enumerate(tokens) if token < 0)] if row.drafts else ()
        if not tokens:
            return RowResult(error=NOT_A_NUMBER)
    logprobs = tuple(
        _entry(sampled, first + j, tokens[j], draw.logprobs) if draw.logprobs >= 0 else None
        for j, draw in enumerate(row.draws[: len(tokens)])
    )
    return RowResult(tokens, logprobs, scores)
