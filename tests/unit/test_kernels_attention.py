"""The CPU backend's programs against the NumPy reference, and bit for bit against themselves.

Every instruction set that this machine runs is tested.  R67: a row's bits depend on that row alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_worlds import Shape, World, decoder, ragged_plan, sequences

from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.select import runnable_isas

ISAS = runnable_isas()

SHAPES = {
    "gqa": Shape(),
    "mha, odd blocks": Shape(heads=2, kv_heads=2, block_size=3),
    "mqa of 7, blocks of 1": Shape(heads=7, kv_heads=1, head_dim=8, block_size=1),
    "windows, blocks of 4": Shape(windows=(None, 9), block_size=4, qk_norm=True, activation="gelu_tanh"),
    "window of 1": Shape(windows=(1, None), block_size=16),
    "wide window": Shape(windows=(70, 70), block_size=32, heads=6, kv_heads=2, head_dim=32),
    "softcap, bias, part rotated": Shape(softcap=5.0, bias=True, rotary=0.5, head_dim=24, block_size=48),
    "head_dim 80": Shape(heads=3, kv_heads=1, head_dim=80, hidden=64),
    "many heads": Shape(heads=50, kv_heads=1, head_dim=8),
}


def close(found: list[np.ndarray], right: list[np.ndarray], tolerance: float) -> None:
    for f, r in zip(found, right, strict=True):
        assert f.shape == r.shape and f.dtype == np.float32
        assert np.max(np.abs(f - r), initial=0) <= tolerance


def same(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x.view(np.uint32), y.view(np.uint32))


def logits(backend, shape, lengths, plan, weight_type="F32", seed=0, **kwargs) -> list[np.ndarray]:
    program = backend.program(decoder(backend, shape, weight_type=weight_type), shape.layout(), shape.heads, **kwargs)
    return World(shape.layout(), sequences(lengths), seed).run(program, plan)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", SHAPES)
def test_ragged_batches_equal_the_reference(isa: str, name: str) -> None:
    """Mixed chunks and single tokens, shuffled tables, NaN in every slot that was never written."""
    lengths = [1, 40, 95, 17, 130]
    plan = ragged_plan(lengths, seed=5)
    right = logits(ReferenceBackend("float64"), SHAPES[name], lengths, plan)
    close(logits(CpuBackend(2, "exact", isa), SHAPES[name], lengths, plan), right, 2e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-2), ("bfloat16", 2e-1)])
def test_16_bit_caches_equal_the_reference(isa: str, dtype: str, tolerance: float) -> None:
    lengths = [33, 80]
    shape = Shape(dtype=dtype, head_dim=32)
    plan = ragged_plan(lengths, seed=6)
    right = logits(ReferenceBackend("float64"), shape, lengths, plan)
    close(logits(CpuBackend(1, "exact", isa), shape, lengths, plan), right, tolerance)


@pytest.mark.parametrize("isa", ISAS)
def test_long_contexts_are_joined_right(isa: str) -> None:
    """1,300 positions are three partial results; the window begins inside the second."""
    shape = Shape(windows=(None, 700), heads=3, kv_heads=1)
    plan = [[(0, 1290)], [(0, 1)], [(0, 9)]]
    right = logits(ReferenceBackend("float64"), shape, [1300], plan)
    close(logits(CpuBackend(2, "exact", isa), shape, [1300], plan), right, 2e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("compute, weight_type", [("exact", "F16"), ("fast", "Q8_0")])
def test_same_bits_however_it_is_cut(isa: str, dtype: str, compute: str, weight_type: str) -> None:
    """Alone or in a batch, whole or in chunks, one thread or three, any block size, any tile: not one bit differs."""
    lengths = [1, 30, 150, 64, 7]
    shape = Shape(dtype=dtype, windows=(None, 20), heads=6, kv_heads=2, head_dim=32, hidden=64, ffn=96)
    whole = [[(s, n)] for s, n in enumerate(lengths)]
    right = logits(CpuBackend(1, compute, isa), shape, lengths, whole, weight_type)
    for i, block_size in enumerate([1, 3, 4, 16, 32]):
        other = replace(shape, block_size=block_size)
        plan = ragged_plan(lengths, seed=i)
        backend = CpuBackend(1 + i % 3, compute, isa)
        found = logits(backend, other, lengths, plan, weight_type, seed=i, row_tile=[256, 16, 7, 1][i % 4])
        same(found, right)
    together = [list(enumerate(lengths))]
    same(logits(CpuBackend(2, compute, isa), shape, lengths, together, weight_type), right)


@pytest.mark.parametrize("isa", ISAS)
def test_same_bits_when_long_contexts_are_spread_over_threads(isa: str) -> None:
    """Few tokens of long contexts are cut by splits for threads; one thread runs the splits in turn."""
    lengths = [1400, 600]
    shape = Shape(windows=(None, 550), dtype="float16", heads=4, kv_heads=1)
    whole = logits(CpuBackend(1, "exact", isa), shape, lengths, [[(0, 1400), (1, 600)]])
    parts = [[(0, 1390), (1, 590)], *[[(0, 1), (1, 1)]] * 4, [(0, 6), (1, 6)]]
    same(logits(CpuBackend(3, "exact", isa), shape, lengths, parts), whole)


@pytest.mark.parametrize("isa", ISAS)
def test_a_neighbour_of_nan_changes_nothing(isa: str) -> None:
    """A token whose embedding is NaN spoils its own sequence from there on, and no earlier token and nobody else."""
    shape = Shape(dtype="float16")
    backend = CpuBackend(2, "exact", isa)
    lengths = [90, 90]

    class Poisoned:
        """The backend, but row 96 of each matrix with 97 rows, the embedding among them, is NaN."""

        def __getattr__(self, name):
            return getattr(backend, name)

        def matrix(self, type, data, rows, cols):
            if rows == 97:
                data = data.copy()
                data.view(np.float32).reshape(rows, cols)[96] = np.nan
            return backend.matrix(type, data, rows, cols)

    poisoned = Poisoned()
    program = backend.program(decoder(poisoned, shape), shape.layout(), shape.heads)
    world = World(shape.layout(), [s % 96 for s in sequences(lengths)])
    clean = World(shape.layout(), [s % 96 for s in sequences(lengths)])
    world.sequences[0][50] = 96
    found = world.run(program, [[(0, 90), (1, 90)]])
    right = clean.run(backend.program(decoder(backend, shape), shape.layout(), shape.heads), [[(0, 90), (1, 90)]])
    same([found[0][:50, :96], found[1][:, :96]], [right[0][:50, :96], right[1][:, :96]])
    assert np.isnan(found[0][50:]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_writes_only_the_slots_of_its_tokens(isa: str) -> None:
    shape = Shape(dtype="float16", block_size=4, windows=(None,))
    backend = CpuBackend(1, "exact", isa)
    program = backend.program(decoder(backend, shape), shape.layout(), shape.heads)
    world = World(shape.layout(), sequences([10]))
    world.run(program, [[(0, 5)]])
    before = world.blocks.copy()
    world.run(program, [[(0, 2)]])  # positions 5 and 6: slots 1 and 2 of the second block
    changed = before != world.blocks
    second = world.tables[0][0][1]
    assert not np.delete(changed, second, axis=0).any()
    k, v = changed[second].view(bool).reshape(2, -1)
    k = k.reshape(shape.kv_heads, shape.head_dim, 4, 2).any(axis=(0, 1, 3))
    v = v.reshape(shape.kv_heads, 4, shape.head_dim, 2).any(axis=(0, 2, 3))
    assert k.tolist() == v.tolist() == [False, True, True, False]


@pytest.mark.parametrize("isa", ISAS)
def test_stored_keys_and_values_are_rounded_to_nearest_even(isa: str) -> None:
    """The blocks' bytes equal the reference's, but for rounding of the last bit of the arithmetic before."""
    for dtype, view in (("float16", np.float16), ("float32", np.float32)):
        shape = Shape(dtype=dtype, windows=(None,))
        planes = []
        for backend in (CpuBackend(1, "exact", isa), ReferenceBackend("float64")):
            world = World(shape.layout(), sequences([37]))
            world.blocks[:] = 0
            world.run(backend.program(decoder(backend, shape), shape.layout(), shape.heads), [[(0, 37)]])
            planes.append(world.blocks.view(view).astype(np.float64))
        assert np.allclose(planes[0], planes[1], rtol=2e-3 if dtype == "float16" else 1e-4, atol=1e-5)
        if dtype == "float16":
            assert np.mean(planes[0] == planes[1]) > 0.99
