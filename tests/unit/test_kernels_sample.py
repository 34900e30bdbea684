"""Sampling and scoring of the CPU backend against the NumPy reference, for every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_worlds import ragged, samples

from octavo.kernels.backend import Sampled
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.reference_sample import uniform
from octavo.kernels.select import load_kernels, runnable_isas

ISAS = runnable_isas()
REFERENCE = ReferenceBackend("float64")


@pytest.fixture(params=ISAS)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(2, isa=request.param)


def rows(n: int, vocab: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, vocab)) * spread).astype(np.float32)


def equal(found: Sampled, right: Sampled) -> None:
    assert found.token.tolist() == right.token.tolist()
    assert found.rank.tolist() == right.rank.tolist()
    assert found.top_ids.tolist() == right.top_ids.tolist()
    assert np.allclose(found.logprob, right.logprob, atol=2e-6, rtol=1e-6)
    assert np.allclose(found.top_logprobs, right.top_logprobs, atol=2e-6, rtol=1e-6)


FILTERS = {
    "none": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.2},
    "top_k": {"top_k": 5},
    "top_k of one": {"top_k": 1},
    "top_k beyond the vocabulary": {"top_k": 10**6},
    "top_p": {"top_p": 0.8},
    "top_p tiny": {"top_p": 1e-9},
    "top_p almost all": {"top_p": 0.9999, "temperature": 3.0},
    "min_p": {"min_p": 0.05},
    "min_p of one": {"min_p": 1.0},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.3},
}


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 5003])
def test_draws_what_the_reference_draws(backend: CpuBackend, name: str, vocab: int) -> None:
    logits = rows(6, vocab)
    batch = samples(60, 6, **FILTERS[name])
    found, right = backend.sample(logits, batch), REFERENCE.sample(logits, batch)
    assert found.token.tolist() == right.token.tolist()


def test_the_draw_follows_the_distribution(backend: CpuBackend) -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], dtype=np.float32))
    found = backend.sample(logits, samples(20000, 1)).token
    assert np.allclose(np.bincount(found, minlength=4) / 20000, [0.5, 0.25, 0.15, 0.1], atol=0.015)


def test_uniform_is_philox() -> None:
    """The reference's own test pins it to published vectors."""
    for isa in ISAS:
        kernels = load_kernels(isa)
        for seed, branch, position in [(0, 0, 0), (2**64 - 1, 3, 77), (0x0123456789ABCDEF, 2**31 - 1, 2**31 - 1)]:
            assert kernels.uniform(seed, branch, position) == uniform(seed, branch, position)


def test_a_draw_does_not_depend_on_its_neighbours(backend: CpuBackend) -> None:
    """R67, and R18: branches of one row and seed differ, and are the same again."""
    logits = rows(8, 1000)
    batch = samples(8, 8, seed=11, branch=np.arange(8), row=0, position=3, temperature=2)
    found = backend.sample(logits, batch).token
    assert len(set(found.tolist())) > 4
    for s in range(8):
        alone = samples(1, 8, seed=[11], branch=[s], row=[0], position=[3], temperature=2)
        assert backend.sample(logits, alone).token[0] == found[s]


def test_greedy_takes_the_lowest_of_equals(backend: CpuBackend) -> None:
    logits = np.zeros((3, 100), dtype=np.float32)
    logits[0, [40, 90]] = 5
    logits[1] = -1
    logits[2, :] = -np.inf
    logits[2, 99] = -300
    assert backend.sample(logits, samples(3, 3, temperature=0)).token.tolist() == [40, 0, 99]


@pytest.mark.parametrize("temperature", [0.0, 1e-8, 1e-4])
def test_a_tiny_temperature_is_greedy(backend: CpuBackend, temperature: float) -> None:
    """R25."""
    logits = rows(4, 3000, spread=50)
    found = backend.sample(logits, samples(4, 4, temperature=temperature)).token
    assert found.tolist() == np.argmax(logits, axis=1).tolist()


def test_broken_rows_give_no_token_and_spoil_no_other(backend: CpuBackend) -> None:
    """R25: NaN, +inf, nothing left."""
    logits = rows(5, 500)
    logits[0, 499] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    bias = ragged([{}, {}, {}, {i: -np.inf for i in range(500)}, {7: -np.inf}], np.float32)
    for temperature in (0.0, 1.0):
        batch = samples(5, 5, temperature=temperature, bias=bias, logprobs=2)
        found, right = backend.sample(logits, batch), REFERENCE.sample(logits, batch)
        assert found.token[:4].tolist() == [-1] * 4 and found.token[4] >= 0
        equal(found, right)


def test_penalties_bans_and_bias_in_their_order(backend: CpuBackend) -> None:
    """R28: repetition sees prompt and output, presence and frequency the output alone (count 0: prompt only)."""
    rng = np.random.default_rng(4)
    logits = rows(20, 300)
    values = dict(zip(rng.permutation(300)[:9].tolist(), [-np.inf, 100.0, -100.0] * 3, strict=True))
    bias = ragged([values] * 20, np.float32)
    history = ragged([{int(i): int(i) % 4 for i in rng.permutation(300)[:60]} for _ in range(20)], np.int32)
    for temperature in (0.0, 1.0):
        batch = samples(
            20,
            20,
            temperature=temperature,
            repetition=1.3,
            presence=0.7,
            frequency=0.4,
            bias=bias,
            history=history,
            logprobs=3,
        )
        equal(backend.sample(logits, batch), REFERENCE.sample(logits, batch))
    logits = np.zeros((1, 10), dtype=np.float32)
    logits[0, 5] = 1
    prompt_only, said_once = ragged([{5: 0}], np.int32), ragged([{5: 1}], np.int32)
    for expected, values in [
        (5, {"presence": 2.0, "frequency": 2.0, "history": prompt_only}),
        (5, {"repetition": 1e6, "history": prompt_only}),
        (0, {"presence": 2.0, "history": said_once}),
        (0, {"frequency": 2.0, "history": said_once}),
    ]:
        assert backend.sample(logits, samples(1, 1, temperature=0, **values)).token[0] == expected


@pytest.mark.parametrize("top", [0, 1, 5, 300])
def test_logprobs_and_ranks(backend: CpuBackend, top: int) -> None:
    logits = np.round(rows(9, 200) * 2) / 2  # many ties
    batch = samples(9, 9, logprobs=np.array([-1, 0, top] * 3), temperature=1.5)
    equal(backend.sample(logits, batch), REFERENCE.sample(logits, batch))
    targets = np.arange(9, dtype=np.int32) * 20
    equal(backend.score(logits, targets, top), REFERENCE.score(logits, targets, top))


def test_scores_of_wide_rows(backend: CpuBackend) -> None:
    logits = rows(3, 60000, spread=2)
    logits[1, 100] = np.nan
    targets = np.array([0, 5, 59999], dtype=np.int32)
    equal(backend.score(logits, targets, 20), REFERENCE.score(logits, targets, 20))


def test_minus_zero_and_zero_are_equal(backend: CpuBackend) -> None:
    logits = np.full((1, 40), -1, dtype=np.float32)
    logits[0, 3], logits[0, 30] = -0.0, 0.0
    assert backend.score(logits, np.array([30], dtype=np.int32), 2).top_ids.tolist() == [[3, 30]]
    assert backend.sample(logits, samples(1, 1, temperature=0)).token[0] == 3


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"row": 3}, "row"),
        ({"row": -1}, "row"),
        ({"temperature": np.nan}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": np.nan}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition": 0.0}, "repetition"),
        ({"bias": ragged([{100: 1.0}], np.float32)}, "100"),
        ({"history": ragged([{-1: 1}], np.int32)}, "-1"),
        ({"history": (np.array([0, 5], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))}, "offsets"),
    ],
)
def test_bad_samples_are_refused(backend: CpuBackend, values: dict, complaint: str) -> None:
    """R26: ids outside the vocabulary never reach another row."""
    with pytest.raises(ValueError, match=complaint):
        backend.sample(rows(3, 100), samples(1, 3, **values))


# ---- masks ---------------------------------------------------------------------------------------------------------


def packed(allowed: np.ndarray) -> np.ndarray:
    """uint32 [K, W] of booleans [K, V]; bits past the vocabulary are set, as nobody may look at them."""
    lines, vocab = allowed.shape
    bits = np.ones((lines, (vocab + 31) // 32 * 32 + 32), dtype=bool)
    bits[:, :vocab] = allowed
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 5003])
def test_masks_as_the_reference_has_them(backend: CpuBackend, name: str, vocab: int) -> None:
    """Full, sparse and single-token masks beside samples without one, with biases and penalties on top."""
    rng = np.random.default_rng(vocab)
    allowed = rng.random((5, vocab)) < np.array([1.0, 0.5, 0.01, 0.0, 0.9])[:, None]
    allowed[np.arange(5), rng.integers(0, vocab, 5)] = True
    mask = np.arange(60) % 6 - 1
    bias = ragged([{int(i): 2.5 for i in rng.integers(0, vocab, 3)} for _ in range(60)], np.float32)
    history = ragged([{int(i): 1 for i in rng.integers(0, vocab, 3)} for _ in range(60)], np.int32)
    more = {"bias": bias, "history": history, "repetition": 1.3, "frequency": 0.5}
    batch = samples(60, 6, **{**FILTERS[name], **more, "mask": mask, "masks": packed(allowed)})
    logits = rows(6, vocab)
    found = backend.sample(logits, batch).token
    assert found.tolist() == REFERENCE.sample(logits, batch).token.tolist()
    for s in np.flatnonzero(mask >= 0):
        assert allowed[mask[s], found[s]]


def test_a_mask_of_everything_changes_nothing(backend: CpuBackend) -> None:
    logits = rows(6, 777)
    full = packed(np.ones((1, 777), dtype=bool))
    bare = backend.sample(logits, samples(40, 6, logprobs=3, top_p=0.9))
    same = backend.sample(logits, samples(40, 6, logprobs=3, top_p=0.9, mask=np.zeros(40, np.int32), masks=full))
    assert bare.token.tolist() == same.token.tolist()
    assert bare.logprob.tobytes() == same.logprob.tobytes()


def test_logprobs_are_those_of_the_raw_logits_under_a_mask(backend: CpuBackend) -> None:
    """R40: a mask that leaves one token makes no log-probability infinite."""
    logits = rows(1, 100)
    allowed = np.zeros((1, 100), dtype=bool)
    allowed[0, 42] = True
    masked = {"mask": np.zeros(1, np.int32), "masks": packed(allowed)}
    for temperature in (0.0, 1.0):
        batch = samples(1, 1, temperature=temperature, logprobs=5, **masked)
        found = backend.sample(logits, batch)
        equal(found, REFERENCE.sample(logits, batch))
        assert (
            found.token.tolist() == [42] and np.isfinite(found.top_logprobs).all() and np.isfinite(found.logprob).all()
        )


def test_an_empty_mask_draws_nothing(backend: CpuBackend) -> None:
    masked = {"mask": np.array([0, -1], np.int32), "masks": packed(np.zeros((1, 100), dtype=bool))}
    found = backend.sample(rows(2, 100), samples(2, 2, **masked)).token
    assert found[0] == -1 and found[1] >= 0


@pytest.mark.parametrize(
    "values",
    [
        {"mask": np.array([1], np.int32), "masks": np.zeros((1, 4), np.uint32)},
        {"mask": np.array([-2], np.int32), "masks": np.zeros((1, 4), np.uint32)},
        {"mask": np.array([0], np.int32), "masks": np.zeros((1, 3), np.uint32)},
        {"mask": np.array([0, 0], np.int32), "masks": np.zeros((1, 4), np.uint32)},
    ],
)
def test_bad_masks_are_refused(backend: CpuBackend, values: dict) -> None:
    with pytest.raises(ValueError, match="mask|item for each"):
        backend.sample(rows(1, 100), samples(1, 1, **values))


def test_bad_targets_are_refused(backend: CpuBackend) -> None:
    for target in (-1, 100):
        with pytest.raises(ValueError, match="target"):
            backend.score(rows(1, 100), np.array([target], dtype=np.int32), 0)


def test_nothing_to_sample(backend: CpuBackend) -> None:
    assert len(backend.sample(np.zeros((0, 50), dtype=np.float32), samples(0, 0)).token) == 0
    assert len(backend.score(np.zeros((0, 50), dtype=np.float32), np.zeros(0, dtype=np.int32), 3).token) == 0
