"""Sampling and scoring with Triton's kernels against the NumPy reference; in the interpreter where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_worlds import ragged, samples  # noqa: E402
from test_kernels_sample import FILTERS, equal, packed, rows  # noqa: E402

from compiled import compiled  # noqa: E402
from octavo.kernels.backend import SampleBatch, Sampled  # noqa: E402
from octavo.kernels.reference import ReferenceBackend  # noqa: E402
from octavo.kernels.triton import sample as triton_sample  # noqa: E402

REFERENCE = ReferenceBackend("float64")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def sample(logits: np.ndarray, batch: SampleBatch) -> Sampled:
    return triton_sample.sample(torch.from_numpy(logits).to(DEVICE), batch)


def score(logits: np.ndarray, targets: np.ndarray, top: int) -> Sampled:
    return triton_sample.score(torch.from_numpy(logits).to(DEVICE), targets, top)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("vocab", [1, 7, 5003])
def test_draws_what_the_reference_draws(name: str, vocab: int) -> None:
    logits = rows(6, vocab)
    batch = samples(9, 6, **FILTERS[name])
    assert sample(logits, batch).token.tolist() == REFERENCE.sample(logits, batch).token.tolist()


@pytest.mark.parametrize("tile", [256, 1024])
def test_many_tiles_ties_and_all_filters_at_once(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several tiles with logits in steps of a half: bars lie amid ties, and the lower ids win."""
    monkeypatch.setattr(triton_sample, "LARGEST_TILE", tile)
    rng = np.random.default_rng(5)
    logits = np.round(rows(4, 1500, seed=2) * 2) / 2
    n = 14
    batch = samples(
        n,
        4,
        top_k=rng.choice([0, 1, 3, 40, 200, 1400, 5000], n),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.01], n),
        min_p=rng.choice([0.0, 0.01, 0.3], n),
        temperature=rng.choice([0.0, 0.3, 1.0, 4.0], n),
        logprobs=rng.choice([-1, 0, 5, 40], n),
    )
    equal(sample(logits, batch), REFERENCE.sample(logits, batch))


def test_masks_bias_and_penalties_in_their_order() -> None:
    rng = np.random.default_rng(4)
    logits = rows(6, 300)
    values = dict(zip(rng.permutation(300)[:9].tolist(), [-np.inf, 100.0, -100.0] * 3, strict=True))
    bias = ragged([values if i % 2 else {} for i in range(12)], np.float32)
    history = ragged([{int(i): int(i) % 4 for i in rng.permutation(300)[: 70 * (i % 3)]} for i in range(12)], np.int32)
    allowed = rng.random((2, 300)) < np.array([0.9, 0.05])[:, None]
    more = {"repetition": 1.3, "presence": 0.7, "frequency": 0.4, "bias": bias, "history": history, "logprobs": 3}
    for temperature in (0.0, 1.0):
        batch = samples(12, 6, temperature=temperature, mask=np.arange(12) % 3 - 1, masks=packed(allowed), **more)
        equal(sample(logits, batch), REFERENCE.sample(logits, batch))


def test_a_bias_may_name_an_id_twice() -> None:
    """A user's bias and the ban of rows that no token has come one after the other."""
    logits = rows(2, 200)
    ids = np.array([3, 5, 3, 5, 3, *range(70), 3], np.int32)
    values = np.linspace(-2, 3, len(ids)).astype(np.float32)
    values[1] = -np.inf
    bias = (np.array([0, len(ids), len(ids)], np.int32), ids, values)
    for temperature in (0.0, 0.7):
        batch = samples(2, 2, temperature=temperature, bias=bias)
        assert sample(logits, batch).token.tolist() == REFERENCE.sample(logits, batch).token.tolist()


def test_broken_rows_give_no_token_and_spoil_no_other() -> None:
    """NaN, +inf, nothing left; an empty mask."""
    logits = rows(6, 500)
    logits[0, 499] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    bias = ragged([{}, {1: 1.0}, {}, {i: -np.inf for i in range(500)}, {7: -np.inf}, {}], np.float32)
    masked = {"mask": np.array([-1, -1, -1, -1, -1, 0], np.int32), "masks": packed(np.zeros((1, 500), dtype=bool))}
    for temperature in (0.0, 1.0):
        batch = samples(6, 6, temperature=temperature, bias=bias, logprobs=2, **masked)
        found, right = sample(logits, batch), REFERENCE.sample(logits, batch)
        assert found.token[[0, 1, 2, 3, 5]].tolist() == [-1] * 5 and found.token[4] >= 0
        equal(found, right)
    equal(score(logits, np.arange(6, dtype=np.int32), 2), REFERENCE.score(logits, np.arange(6, dtype=np.int32), 2))


@pytest.mark.parametrize("top", [0, 1, 100, 300])
def test_logprobs_and_ranks(top: int) -> None:
    logits = np.round(rows(6, 200) * 2) / 2  # many ties
    batch = samples(6, 6, logprobs=np.array([-1, 0, top] * 2), temperature=1.5)
    equal(sample(logits, batch), REFERENCE.sample(logits, batch))
    targets = np.arange(6, dtype=np.int32) * 20
    equal(score(logits, targets, top), REFERENCE.score(logits, targets, top))


def test_scores_of_wide_rows() -> None:
    logits = rows(3, 20011, spread=2)
    logits[1, 100] = np.nan
    targets = np.array([0, 5, 20010], dtype=np.int32)
    equal(score(logits, targets, 20), REFERENCE.score(logits, targets, 20))


def test_minus_zero_and_zero_are_equal() -> None:
    logits = np.full((1, 40), -1, dtype=np.float32)
    logits[0, 3], logits[0, 30] = -0.0, 0.0
    assert score(logits, np.array([30], dtype=np.int32), 2).top_ids.tolist() == [[3, 30]]
    assert sample(logits, samples(1, 1, temperature=0)).token[0] == 3
    assert sample(logits, samples(1, 1, top_k=1)).token[0] == 3


def test_a_sample_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, among others, and when a large batch runs in parts: the same bits."""
    logits = rows(5, 900)
    bias = ragged([{i: 1.5, 2: -np.inf} if i % 2 else {} for i in range(10)], np.float32)
    masked = {"mask": np.array([-1, 0] * 5, np.int32), "masks": packed(np.random.default_rng(0).random((1, 900)) < 0.5)}
    batch = samples(10, 5, top_p=0.9, logprobs=3, bias=bias, **masked)
    whole = sample(logits, batch)
    monkeypatch.setattr(triton_sample, "WORKSPACE", 3 * 8 * 900)
    parts = sample(logits, batch)
    assert triton_sample.begin(torch.from_numpy(logits).to(DEVICE), batch)[1].tolist() == whole.token.tolist()
    for name in vars(whole):
        assert getattr(whole, name).tobytes() == getattr(parts, name).tobytes(), name
    for s in (1, 4):
        alone = sample(logits, triton_sample._part(batch, s, s + 1))
        assert alone.token[0] == whole.token[s]
        assert alone.logprob.tobytes() == whole.logprob[s : s + 1].tobytes()
        assert alone.top_logprobs.tobytes() == whole.top_logprobs[s : s + 1].tobytes()


@pytest.mark.parametrize(
    "values, complaint",
    [
        ({"row": 3}, "row"),
        ({"temperature": np.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition": 0.0}, "repetition"),
        ({"bias": ragged([{100: 1.0}], np.float32)}, "100"),
        ({"history": ragged([{-1: 1}], np.int32)}, "-1"),
        ({"history": (np.array([0, 5], np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))}, "offsets"),
        ({"mask": np.array([1], np.int32), "masks": np.zeros((1, 4), np.uint32)}, "mask"),
        ({"mask": np.array([0], np.int32), "masks": np.zeros((1, 3), np.uint32)}, "mask"),
    ],
)
def test_bad_samples_are_refused(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sample(rows(3, 100), samples(1, 3, **values))


def test_bad_targets_are_refused() -> None:
    for target in (-1, 100):
        with pytest.raises(ValueError, match="target"):
            score(rows(1, 100), np.array([target], dtype=np.int32), 0)


def test_nothing_to_sample() -> None:
    assert len(sample(np.zeros((0, 50), dtype=np.float32), samples(0, 0)).token) == 0
    assert len(score(np.zeros((0, 50), dtype=np.float32), np.zeros(0, dtype=np.int32), 3).token) == 0


@pytest.mark.parametrize("architecture", [80, 90])
def test_the_kernels_compile_for_a_gpu(architecture: int) -> None:
    """To machine code, without a GPU; none spills registers."""
    numbers = "changed biases bias_ids bias_values histories history_ids history_counts masks mask_words width V K"
    types = {
        **dict.fromkeys(numbers.split(), "i32"),
        **dict.fromkeys(("words", "lists", "out", "kept"), "*i32"),
        **{"logits": "*fp32", "copies": "*fp32", "stride": "i64"},
    }
    changes, module = (f"octavo.kernels.triton.sample_{name}" for name in ("changes", "kernels"))
    kernels = []
    for tile in (128, 4096):
        options = {"num_warps": triton_sample.warps_of(tile)}
        kernels += [(changes, "prepare", {**types, "BLOCK": tile}, options)]
        kernels += [(module, "draw", {**types, "BLOCK": tile}, options)]
        kernels.append((module, "report", {**types, "BLOCK": tile, "SIDE": triton_sample.SIDE}, options))
    for kernel, found in zip(kernels, compiled(kernels, architecture), strict=True):
        assert found["local"] == 0 and found["stack"] <= 64, (kernel, found)
