"""Matrix products over every weight type, through programs of one linear layer, on every instruction set.

The oracle for what a weight's bits mean is the gguf package.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from octavo.core.layout import KVLayout, LayerGroup
from octavo.kernels.backend import Batch
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.select import runnable_isas
from octavo.loading.tensor import TYPES

ISAS = runnable_isas()
FLOATS = ("F32", "F16", "BF16")
QUANTISED = tuple(t for t in TYPES if t not in FLOATS)
LAYOUT = KVLayout(16, 1, 1, "float32", (LayerGroup(None, (0,)),))
Array = np.ndarray


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


@dataclass
class Matrix:
    """A weight in its file's bytes, and the float32 values that they mean."""

    type: str
    raw: Array
    values: Array

    def pack(self, backend: CpuBackend) -> Any:
        return backend.matrix(self.type, self.raw, *self.values.shape)


def float_matrix(type: str, values: Array) -> Matrix:
    values = np.ascontiguousarray(values, dtype=np.float32)
    if type == "F32":
        return Matrix(type, values.reshape(-1).view(np.uint8), values)
    if type == "F16":
        half = values.astype(np.float16)
        return Matrix(type, half.reshape(-1).view(np.uint8), half.astype(np.float32))
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return Matrix(type, bits.reshape(-1).view(np.uint8), (bits.astype(np.uint32) << 16).view(np.float32))


def from_blocks(type: str, blocks: Array, rows: int) -> Matrix:
    with np.errstate(invalid="ignore", over="ignore"):
        values = dequantize(blocks.reshape(rows, -1), GGMLQuantizationType[type]).reshape(rows, -1)
    return Matrix(type, blocks.reshape(-1), values)


def scale_places(type: str) -> tuple[int, ...]:
    """Where the float16 scales of a block are."""
    if type == "Q6_K":
        return (208,)
    return (0, 2) if type in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)


def random_blocks(type: str, rows: int, cols: int, rng: np.random.Generator) -> Array:
    """Any quants, and scales that keep the weights near 1."""
    per, size = TYPES[type]
    blocks = rng.integers(0, 256, (rows * cols // per, size), dtype=np.uint8)
    top = {"Q8_0": 127, "Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q4_K": 500, "Q5_K": 1000, "Q6_K": 4000}[type]
    for place, size in zip(scale_places(type), (1 / top, 0.5 if type.endswith("_1") else 1 / 60), strict=False):
        scales = (size * rng.standard_normal(len(blocks))).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def random_matrix(type: str, rows: int, cols: int, seed: int = 0) -> Matrix:
    rng = np.random.default_rng([seed, rows, cols, list(TYPES).index(type)])
    if type in FLOATS:
        return float_matrix(type, rng.standard_normal((rows, cols)))
    return from_blocks(type, random_blocks(type, rows, cols, rng), rows)


def shapes(type: str) -> list[tuple[int, int]]:
    """(rows, cols): whole and broken panels of 16 rows, one row, odd and even numbers of groups and blocks."""
    if type in FLOATS:
        return [(48, 64), (33, 37), (1, 1), (100, 3)]
    if type.endswith("_K"):
        return [(48, 256), (33, 768), (1, 512)]
    return [(48, 64), (33, 96), (1, 32), (100, 288)]


def linear(
    backend: CpuBackend,
    x: Array,
    weights: list[Any],
    bias: Array | None = None,
    residual: Array | None = None,
    row_tile: int = 256,
) -> Array:
    """[M, sum N]: x . concat(W)^T + bias + residual by a program whose token i is row i of x."""
    x = np.ascontiguousarray(x, dtype=np.float32)
    M, K = x.shape
    table = backend.matrix("F32", x, M, K)
    added = None if residual is None else backend.matrix("F32", np.ascontiguousarray(residual), *residual.shape)

    def build(ops: Any) -> None:
        into = None if added is None else ops.embed(added)
        y = ops.linear(ops.embed(table), weights, None if bias is None else backend.vector(bias), into)
        ops.output(ops.pick(y))

    steps = np.arange(M, dtype=np.int32)
    blocks = np.zeros((M // 16 + 1, LAYOUT.block_bytes), dtype=np.uint8)
    ids = np.arange(len(blocks), dtype=np.int32)
    batch = Batch(steps, steps, np.array([0, M], np.int32), [(ids, np.array([0, len(ids)], np.int32))], steps)
    result: Array = backend.program(build, LAYOUT, 1, row_tile).run(batch, blocks)
    return result.copy()


def embedded(backend: CpuBackend, weight: Any, ids: list[int], scale: float = 1.0) -> Array:
    tokens = np.array(ids, dtype=np.int32)
    steps = np.arange(len(ids), dtype=np.int32)
    blocks = np.zeros((len(ids) // 16 + 1, LAYOUT.block_bytes), dtype=np.uint8)
    table = (np.arange(len(blocks), dtype=np.int32), np.array([0, len(blocks)], np.int32))
    batch = Batch(tokens, steps, np.array([0, len(ids)], np.int32), [table], steps)
    program = backend.program(lambda ops: ops.output(ops.pick(ops.embed(weight, scale))), LAYOUT, 1)
    return program.run(batch, blocks).copy()


def rounded(x: Array) -> Array:
    """x as the fast path sees it: 8 bits a row and group of 32, over the range that the group has."""
    groups = x.reshape(len(x), -1, 32)
    most = np.float32(0.5) * groups.max(axis=-1, keepdims=True)
    least = np.float32(0.5) * groups.min(axis=-1, keepdims=True)
    middle, half = most + least, most - least
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(half > 0, np.rint((groups - middle) * (np.float32(127) / half)), 0)
    return (q.astype(np.float64) * (half / np.float32(127)) + middle).reshape(x.shape)


def same_bits(a: Array, b: Array) -> bool:
    return np.array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


def close(y: Array, x: Array, w: Array, tolerance: float) -> None:
    """y = x . w^T to within a part of the sum of the terms' sizes."""
    right = x.astype(np.float64) @ w.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(w).astype(np.float64).T
    assert np.max(np.abs(y - right) - tolerance * size) <= 1e-30


# ---- what weights mean ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", TYPES)
def test_embedding_rows_are_the_formats_values_bit_for_bit(isa: str, type: str) -> None:
    backend = CpuBackend(2, "fast", isa)
    for rows, cols in shapes(type):
        m = random_matrix(type, rows, cols)
        ids = [0, rows - 1, rows // 2, rows // 3, 0]
        assert same_bits(embedded(backend, m.pack(backend), ids), m.values[ids])
        assert same_bits(embedded(backend, m.pack(backend), ids, 0.3), m.values[ids] * np.float32(0.3))


@pytest.mark.parametrize("type", TYPES)
def test_the_exact_path_multiplies_by_the_formats_values_bit_for_bit(isa: str, type: str) -> None:
    """Rows of the unit matrix pick single weights: 1 * w and 0 * w add up without rounding."""
    backend = CpuBackend(1, "exact", isa)
    rows, cols = shapes(type)[1]
    m = random_matrix(type, rows, cols)
    y = linear(backend, np.eye(cols, dtype=np.float32), [m.pack(backend)])
    assert np.array_equal(y, m.values.T)


@pytest.mark.parametrize("type", QUANTISED)
def test_blocks_of_any_bits_disturb_only_their_own_column(isa: str, type: str) -> None:
    """Files may hold infinite and NaN scales."""
    rng = np.random.default_rng(3)
    rows, cols = 40, 512
    blocks = random_blocks(type, rows, cols, rng).reshape(rows, -1)
    good = from_blocks(type, blocks.copy(), rows)
    blocks[[3, 20]] = rng.integers(0, 256, (2, blocks.shape[1]), dtype=np.uint8)
    for place in scale_places(type):
        blocks[3, place : place + 2] = (0x00, 0x7E)  # NaN
        blocks[20, place : place + 2] = (0x00, 0x7C)  # infinity
    bad = from_blocks(type, blocks, rows)
    x = rng.standard_normal((5, cols)).astype(np.float32)
    fine = np.delete(np.arange(rows), [3, 20])
    for compute in ("exact", "fast"):
        backend = CpuBackend(1, compute, isa)
        y, z = linear(backend, x, [good.pack(backend)]), linear(backend, x, [bad.pack(backend)])
        assert same_bits(y[:, fine], z[:, fine])
        assert not np.isfinite(z[:, [3, 20]]).any()


@pytest.mark.parametrize("type", TYPES)
def test_packing_keeps_the_size_of_the_file(type: str) -> None:
    backend = CpuBackend(1, "fast")
    m = random_matrix(type, 512, 1536)
    assert m.pack(backend).nbytes <= 1.035 * len(m.raw)


# ---- products -------------------------------------------------------------------------------------------------------


def memory_in_use() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells of memory as Linux does")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer keeps what is freed")
def test_weights_take_their_size_and_give_it_back() -> None:
    rng = np.random.default_rng(5)
    matrices = [float_matrix("F32", rng.standard_normal((512, 512))) for _ in range(100)]
    backend = CpuBackend(threads=1)
    before = memory_in_use()
    packed = [matrix.pack(backend) for matrix in matrices]
    size = sum(weight.nbytes for weight in packed)
    taken = memory_in_use() - before
    assert size <= taken + (1 << 20) and taken < size + (6 << 20)  # the last huge page, and what Python needs itself
    first = matrices[0].values
    alone = linear(backend, first[:3], packed[:1])
    del packed[1:]
    assert same_bits(linear(backend, first[:3], packed), alone), "a weight outlives those beside it"
    del packed, backend
    assert memory_in_use() - before < size // 4


@pytest.mark.parametrize("type", TYPES)
def test_exact_products_are_right(isa: str, type: str) -> None:
    backend = CpuBackend(2, "exact", isa)
    for rows, cols in shapes(type):
        m = random_matrix(type, rows, cols)
        weight = m.pack(backend)
        for M in (1, 2, 7, 9, 17):
            x = np.random.default_rng(M).standard_normal((M, cols)).astype(np.float32)
            close(linear(backend, x, [weight]), x, m.values, 2e-6)


@pytest.mark.parametrize("type", QUANTISED)
def test_fast_products_are_right_for_rounded_activations(isa: str, type: str) -> None:
    backend = CpuBackend(2, "fast", isa)
    for rows, cols in shapes(type):
        m = random_matrix(type, rows, cols)
        weight = m.pack(backend)
        for M in (1, 2, 5, 6, 7, 13):
            x = np.random.default_rng(M).standard_normal((M, cols)).astype(np.float32)
            y = linear(backend, x, [weight])
            close(y, rounded(x), m.values, 2e-6)
            error = y - x.astype(np.float64) @ m.values.astype(np.float64).T
            spread = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(m.values, axis=1)[None]
            assert np.max(np.abs(error) / spread) < 0.03


@pytest.mark.parametrize("type", FLOATS)
def test_float_weights_take_the_exact_path_always(isa: str, type: str) -> None:
    m = random_matrix(type, 40, 96)
    x = np.random.default_rng(1).standard_normal((9, 96)).astype(np.float32)
    exact, fast = CpuBackend(1, "exact", isa), CpuBackend(1, "fast", isa)
    assert same_bits(linear(exact, x, [m.pack(exact)]), linear(fast, x, [m.pack(fast)]))


@pytest.mark.parametrize("type", QUANTISED)
def test_the_largest_integers_do_not_overflow(isa: str, type: str) -> None:
    """All quants and all activations at either end: pairs of byte products overflow 16 bits if added carelessly."""
    rows, cols = 16, 512
    per, size = TYPES[type]
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        blocks = np.full((rows * cols // per, size), byte, dtype=np.uint8)
        for place in scale_places(type):
            blocks[:, place : place + 2] = np.array([0.01], np.float16).view(np.uint8)
        m = from_blocks(type, blocks, rows)
        x = np.repeat(np.array([[1.0], [-1.0]], np.float32), cols, axis=1)
        x = np.concatenate([x, x * np.where(np.arange(cols) % 2, 1, -1).astype(np.float32)])
        backend = CpuBackend(1, "fast", isa)
        close(linear(backend, x, [m.pack(backend)]), rounded(x), m.values, 2e-6)


def test_bias_and_residual_are_added_in_that_order(isa: str) -> None:
    rng = np.random.default_rng(5)
    m = random_matrix("Q4_1", 37, 64)
    x, residual = rng.standard_normal((7, 64)).astype(np.float32), rng.standard_normal((7, 37)).astype(np.float32)
    bias = rng.standard_normal(37).astype(np.float32)
    for compute in ("exact", "fast"):
        backend = CpuBackend(2, compute, isa)
        weight = m.pack(backend)
        y = linear(backend, x, [weight])
        assert same_bits(linear(backend, x, [weight], bias), y + bias)
        assert same_bits(linear(backend, x, [weight], None, residual), y + residual)
        assert same_bits(linear(backend, x, [weight], bias, residual), (y + bias) + residual)


def test_parts_are_successive_columns_whatever_their_types(isa: str) -> None:
    parts = [random_matrix(t, n, 256) for t, n in (("Q4_K", 20), ("Q6_K", 16), ("F16", 5), ("Q8_0", 33), ("Q5_0", 1))]
    rng = np.random.default_rng(6)
    bias = rng.standard_normal(75).astype(np.float32)
    for compute in ("exact", "fast"):
        backend = CpuBackend(2, compute, isa)
        for M in (1, 3, 11):
            x = rng.standard_normal((M, 256)).astype(np.float32)
            together = linear(backend, x, [p.pack(backend) for p in parts], bias)
            at = 0
            for p in parts:
                n = len(p.values)
                alone = linear(backend, x, [p.pack(backend)], bias[at : at + n])
                assert same_bits(together[:, at : at + n], alone)
                at += n


# ---- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("compute", ["exact", "fast"])
def test_a_row_depends_on_that_row_alone(isa: str, compute: str, type: str) -> None:
    """R67: any number of rows, any neighbours, any threads, any tile: the same bits."""
    rng = np.random.default_rng(7)
    rows, cols = (90, 512) if type in QUANTISED else (90, 75)
    m = random_matrix(type, rows, cols)
    backends = [CpuBackend(threads, compute, isa) for threads in (1, 2, 3)]
    weights = [m.pack(b) for b in backends]
    x = rng.standard_normal((70, cols)).astype(np.float32)
    right = linear(backends[0], x, [weights[0]])
    for M in (1, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 31, 64, 70):
        chosen = rng.permutation(70)[:M]
        i, tile = rng.integers(3), int(rng.choice([1, 5, 64, 256]))
        assert same_bits(linear(backends[i], x[chosen], [weights[i]], row_tile=tile), right[chosen])


@pytest.mark.parametrize("type", ["F16", "Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize("compute", ["exact", "fast"])
def test_a_row_that_is_not_finite_is_seen_and_spoils_no_other(isa: str, compute: str, type: str) -> None:
    m = random_matrix(type, 33, 256)
    backend = CpuBackend(2, compute, isa)
    weight = m.pack(backend)
    x = np.random.default_rng(8).standard_normal((8, 256)).astype(np.float32)
    right = linear(backend, x, [weight])
    x[2, 77], x[5, 200] = np.nan, np.inf
    y = linear(backend, x, [weight])
    fine = [0, 1, 3, 4, 6, 7]
    assert same_bits(y[fine], right[fine])
    assert not np.isfinite(y[[2, 5]]).any()


@pytest.mark.parametrize("type", ["F32", "Q4_1", "Q8_0", "Q6_K"])
def test_zero_and_tiny_rows(isa: str, type: str) -> None:
    m = random_matrix(type, 20, 256)
    for compute in ("exact", "fast"):
        backend = CpuBackend(1, compute, isa)
        y = linear(backend, np.zeros((3, 256), np.float32), [m.pack(backend)])
        assert not y.any()
        for size in (1e-20, 1e-38, 1e-45):
            y = linear(backend, np.full((3, 256), size, np.float32), [m.pack(backend)])
            assert np.all(np.abs(y) <= 1000 * size)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("type", QUANTISED)
def test_rows_that_blocks_do_not_divide_are_refused(isa: str, type: str) -> None:
    backend = CpuBackend(1, "fast", isa)
    per, size = TYPES[type]
    for cols in (1, per - 1, per + 16, 3 * per // 2):
        with pytest.raises(ValueError, match=f"{type}.*multiple of {per}.*{cols}"):
            backend.matrix(type, np.zeros(4 * size, np.uint8), 2, cols)


def test_unknown_types_and_wrong_sizes_are_refused(isa: str) -> None:
    backend = CpuBackend(1, "fast", isa)
    with pytest.raises(ValueError, match="IQ2_XS"):
        backend.matrix("IQ2_XS", np.zeros(64, np.uint8), 1, 32)
    for rows, cols in ((0, 32), (1, 0), (-1, 32)):
        with pytest.raises(ValueError):
            backend.matrix("Q8_0", np.zeros(0, np.uint8), rows, cols)
    for nbytes in (0, 33, 35, 68):
        with pytest.raises(ValueError):
            backend.matrix("Q8_0", np.zeros(nbytes, np.uint8), 1, 32)


def test_weights_of_different_width_are_refused(isa: str) -> None:
    backend = CpuBackend(1, "fast", isa)
    parts = [random_matrix("Q8_0", 16, cols).pack(backend) for cols in (64, 96)]
    with pytest.raises(ValueError):
        linear(backend, np.zeros((1, 64), np.float32), parts)
