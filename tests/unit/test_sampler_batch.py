"""From plans to arrays and from samples to results: ragged biases and histories, banned rows, scored rows."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from octavo.core.plan import Draw, Row
from octavo.execute.inputs import batch
from octavo.execute.sampler import draw_batch, results
from octavo.kernels.backend import Backend, SampleBatch
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.reference_sample import log_softmax, sample

VOCAB = 41


def draw(branch: int = 0, position: int = 1, **values: Any) -> Draw:
    neutral: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0}
    neutral |= {"presence": 0.0, "frequency": 0.0, "seed": 0, "logprobs": -1}
    return Draw(branch, position, **(neutral | values))


def row(sequence: int, start: int, length: int, draws: tuple[Draw, ...] = (), targets: int = 0, score: int = -1) -> Row:
    tokens = array("i", [(sequence * 7 + start + i) % VOCAB for i in range(length)])
    tables = (array("i", [sequence, sequence + 1]), array("i", [sequence + 2]))
    return Row(sequence, start, tokens, tables, draws, array("i", range(targets)), score)


def test_rows_become_arrays() -> None:
    rows = [row(1, 5, 3), row(2, 0, 4, (draw(),)), row(3, 8, 1, (draw(), draw(1)), 0), row(4, 2, 3, (draw(),), 2, 1)]
    made = batch(rows, 2)
    assert made.tokens.tolist() == [t for r in rows for t in r.tokens]
    assert made.positions.tolist() == [5, 6, 7, 0, 1, 2, 3, 8, 2, 3, 4]
    assert made.starts.tolist() == [0, 3, 7, 8, 11]
    assert made.logits_at.tolist() == [6, 7, 8, 9, 10], "the last of rows that draw, and the scored ones"
    (ids, offsets), (ids2, offsets2) = made.tables
    assert ids.tolist() == [1, 2, 2, 3, 3, 4, 4, 5] and offsets.tolist() == [0, 2, 4, 6, 8]
    assert ids2.tolist() == [3, 4, 5, 6] and offsets2.tolist() == [0, 1, 2, 3, 4]
    arrays = (made.tokens, made.positions, made.starts, made.logits_at, ids, offsets)
    assert all(a.dtype == np.int32 for a in arrays)


def test_a_scored_row_to_its_last_token_has_no_second_logits_row() -> None:
    """A chunk in the middle of a scored prompt has a target for each token."""
    made = batch([row(1, 0, 3, (), 3, 0), row(2, 0, 2, (draw(),), 1, 0)], 2)
    assert made.logits_at.tolist() == [0, 1, 2, 3, 4]


def test_nothing_to_do() -> None:
    made = batch([], 1)
    assert made.tokens.size == made.logits_at.size == 0 and made.starts.tolist() == [0]


def test_ragged_biases_and_histories() -> None:
    draws = [
        (0, draw(bias=((3, 1.5), (5, float("-inf"))), history=((1, 2),))),
        (0, draw(1)),
        (2, draw(bias=((7, -2.0),), history=((4, 0), (5, 6)), seed=2**64 - 1, temperature=0.5, top_k=9)),
    ]
    made = draw_batch(draws, np.array([39, 40], np.int32))
    assert made.row.tolist() == [0, 0, 2] and made.branch.tolist() == [0, 1, 0]
    assert made.seed.tolist() == [0, 0, 2**64 - 1] and made.top_k.tolist() == [0, 0, 9]
    offsets, ids, values = made.bias
    assert offsets.tolist() == [0, 4, 6, 9]
    cuts = offsets[1:-1]
    pairs = [
        dict(zip(i.tolist(), v.tolist(), strict=True))
        for i, v in zip(np.split(ids, cuts), np.split(values, cuts), strict=True)
    ]
    ban = float("-inf")
    assert pairs == [{3: 1.5, 5: ban, 39: ban, 40: ban}, {39: ban, 40: ban}, {7: -2.0, 39: ban, 40: ban}]
    offsets, ids, counts = made.history
    assert offsets.tolist() == [0, 1, 1, 3] and ids.tolist() == [1, 4, 5] and counts.tolist() == [2, 0, 6]
    bare = draw_batch(draws, np.empty(0, np.int32))
    assert bare.bias[0].tolist() == [0, 2, 2, 3]


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return ReferenceBackend() if request.param == "reference" else CpuBackend(threads=1)


def test_banned_rows_are_never_drawn(backend: Backend) -> None:
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(1, VOCAB)).astype(np.float32)
    logits[0, 38:] += 20
    banned = np.arange(38, VOCAB, dtype=np.int32)
    draws = tuple(draw(b, 1, temperature=t, seed=b) for b in range(200) for t in (0.0, 3.0))
    result = results(backend, [row(0, 0, 1, draws)], logits, banned)[0]
    assert len(result.tokens) == 400 and max(result.tokens) < 38
    free = results(backend, [row(0, 0, 1, draws)], logits, banned[:0])[0]
    assert min(free.tokens) < 38 <= max(free.tokens)


@pytest.mark.parametrize("seed", range(6))
def test_results_are_dealt_to_their_rows(backend: Backend, seed: int) -> None:
    """Scored and drawing rows of all kinds in one batch: each gets just what it gets alone, and what NumPy says."""
    rng = random.Random(seed)
    rows, parts = [], []
    noise = np.random.default_rng(seed)
    for sequence in range(12):
        length = rng.randint(1, 5)
        scored = rng.random() < 0.5
        last = rng.random() < 0.7
        targets = (length if not last else length - 1) if scored else 0
        draws = ()
        if last:
            draws = tuple(
                draw(b, 9, temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(9), logprobs=rng.choice([-1, 0, 3]))
                for b in range(rng.choice([1, 1, 3]))
            )
        rows.append(row(sequence, 4, length, draws, targets, 2 if targets else -1))
        wanted = targets + (1 if draws and targets < length else 0)
        parts.append(noise.normal(size=(wanted, VOCAB)).astype(np.float32))
    none = np.empty(0, np.int32)
    together = results(backend, rows, np.concatenate(parts), none)
    for r, part, got in zip(rows, parts, together, strict=True):
        assert results(backend, [r], part, none)[0] == got
        assert len(got.tokens) == len(got.logprobs) == len(r.draws) and len(got.scores) == len(r.targets)
        for score, target, line in zip(got.scores, r.targets, part, strict=False):
            want = log_softmax(line)
            assert score.token == target and abs(score.logprob - want[target]) < 1e-5
            assert [t for t, _ in score.best] == np.argsort(-line, kind="stable")[:2].tolist()
        for d, token, logprobs in zip(r.draws, got.tokens, got.logprobs, strict=True):
            assert token == sample(part[-1:], draw_batch([(0, d)], none)).token[0]
            assert (logprobs is None) == (d.logprobs < 0)
            if logprobs is not None:
                assert len(logprobs.best) == d.logprobs and logprobs.token == token
                assert abs(logprobs.logprob - log_softmax(part[-1])[token]) < 1e-5


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_no_numbers(backend: Backend, bad: float) -> None:
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    rows = [row(0, 0, 1, (draw(),)), row(1, 0, 2, (draw(),), 1, 1), row(2, 0, 1, (draw(), draw(1)))]
    for line, victim in ((0, 0), (1, 1), (2, 1), (3, 2)):
        broken = logits.copy()
        broken[line, 5] = bad
        errors = [r.error for r in results(backend, rows, broken, np.empty(0, np.int32))]
        assert [e is not None for e in errors] == [i == victim for i in range(3)]


def test_a_batch_of_samples_is_what_the_kernels_ask_for() -> None:
    made = draw_batch([(0, draw())], np.empty(0, np.int32))
    assert isinstance(made, SampleBatch)
    kinds = {"temperature": np.float32, "seed": np.uint64, "top_k": np.int32, "position": np.int32}
    assert all(getattr(made, name).dtype == kind for name, kind in kinds.items())
    assert made.bias[0].tolist() == [0, 0] and made.history[0].tolist() == [0, 0]
