"""The CPU backend's programs against the NumPy reference, and bit for bit against themselves.

Every instruction set that this machine runs is tested.  R67: a row's bits depend on that row alone.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_worlds import Shape, World, decoder, ragged_plan, sequences

from octavo.errors import ConfigError
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.select import load_kernels, runnable_isas

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
@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-2), ("bfloat16", 2e-1), ("int8", 2e-1)])
def test_smaller_caches_equal_the_reference(isa: str, dtype: str, tolerance: float) -> None:
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
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
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


def queries_only(backend, shape, layers: int):
    """A recipe that writes nothing: queries attend to what the blocks hold, and their outputs are the result."""
    rng = np.random.default_rng(4)
    width = shape.heads * shape.head_dim
    table = rng.standard_normal((97, width)).astype(np.float32)
    packed = backend.matrix("F32", table.reshape(-1).view(np.uint8), 97, width)

    def build(ops) -> None:
        for layer in range(layers):
            out = ops.attend(ops.embed(packed), layer, shape.head_dim**-0.5, shape.windows[layer], shape.softcap)
        ops.output(ops.pick(out))

    return build


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_over_the_same_blocks_equals_the_reference(isa: str, dtype: str, name: str) -> None:
    """What is stored is the same to the byte here, so the arithmetic alone is compared: tightly, for any type.

    Over int8 the kernels round queries to 16 bits.
    """
    shape = replace(SHAPES[name], dtype=dtype, windows=(SHAPES[name].windows[0],))
    reference, lengths = ReferenceBackend("float64"), [1, 40, 130, 77]
    world = World(shape.layout(), sequences(lengths), 3)
    world.run(reference.program(decoder(reference, shape), shape.layout(), shape.heads), [list(enumerate(lengths))])
    found = []
    for backend in (CpuBackend(2, "exact", isa), reference):
        program = backend.program(queries_only(backend, shape, 1), shape.layout(), shape.heads)
        again = World(shape.layout(), sequences(lengths), 3)
        again.blocks, again.tables = world.blocks, world.tables
        found.append(again.run(program, ragged_plan(lengths, seed=8)))
    close(found[0], found[1], 1e-3 if dtype == "int8" else 2e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim, block_size", [(32, 16), (80, 3), (24, 1), (256, 16)])
def test_int8_keys_and_values_are_stored_as_the_reference_stores_them(isa: str, head_dim: int, block_size: int) -> None:
    """A last bit of the arithmetic before may tip a rounding: then a step apart, or a scale by its last bit."""
    shape = Shape(dtype="int8", windows=(None,), head_dim=head_dim, block_size=block_size)
    layout, lengths, found = shape.layout(), [37], []
    for backend in (CpuBackend(1, "exact", isa), ReferenceBackend("float32")):
        world = World(layout, sequences(lengths), 3)
        world.run(backend.program(decoder(backend, shape), layout, shape.heads), [[(0, 37)]])
        found.append(world.blocks)
    quants = [b[:, : 2 * layout.plane_bytes].view(np.int8).astype(int) for b in found]
    scales = [b[:, 2 * layout.plane_bytes :].reshape(-1).view(np.uint16).astype(int) for b in found]
    assert np.abs(quants[0] - quants[1]).max() <= 2 and np.abs(scales[0] - scales[1]).max() <= 1
    assert np.mean(quants[0] == quants[1]) > 0.99 and np.mean(scales[0] == scales[1]) > 0.99
    assert np.abs(quants[0]).max() == 127


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_same_bits_when_long_contexts_are_spread_over_threads(isa: str, dtype: str) -> None:
    """Few tokens of long contexts are cut by splits for threads; one thread runs the splits in turn."""
    lengths = [1400, 600]
    shape = Shape(windows=(None, 550), dtype=dtype, heads=4, kv_heads=1)
    whole = logits(CpuBackend(1, "exact", isa), shape, lengths, [[(0, 1400), (1, 600)]])
    parts = [[(0, 1390), (1, 590)], *[[(0, 1), (1, 1)]] * 4, [(0, 6), (1, 6)]]
    same(logits(CpuBackend(3, "exact", isa), shape, lengths, parts), whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_neighbour_of_nan_changes_nothing(isa: str, dtype: str) -> None:
    """A token whose embedding is NaN spoils its own sequence from there on, and no earlier token and nobody else."""
    shape = Shape(dtype=dtype)
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
def test_int8_writes_only_the_slots_and_scales_of_its_tokens(isa: str) -> None:
    shape = Shape(dtype="int8", block_size=4, windows=(None,), head_dim=40)
    layout, backend = shape.layout(), CpuBackend(1, "exact", isa)
    program = backend.program(decoder(backend, shape), layout, shape.heads)
    world = World(layout, sequences([10]))
    world.run(program, [[(0, 5)]])
    before = world.blocks.copy()
    world.run(program, [[(0, 2)]])
    changed = before != world.blocks
    second = world.tables[0][0][1]
    assert not np.delete(changed, second, axis=0).any()
    k, v, scales = np.split(changed[second], [layout.plane_bytes, 2 * layout.plane_bytes])
    k = k.reshape(shape.kv_heads, shape.head_dim // 2, 4, 2).any(axis=(0, 1, 3))
    v = v.reshape(shape.kv_heads, 4, shape.head_dim).any(axis=(0, 2))
    assert k.tolist() == v.tolist() == [False, True, True, False]
    slots = scales.reshape(shape.kv_heads * 3, 4, 2).any(axis=2)  # two groups of K, and V
    assert slots[:, 1:3].all() and not slots[:, [0, 3]].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 21])
def test_int8_recycled_blocks_may_hold_anything(isa: str, window: int | None) -> None:
    """NaN scales and -128 in the slots that are not the sequence's own, behind it and before its window."""
    shape = Shape(dtype="int8", windows=(window, window), head_dim=32)
    backend, lengths = CpuBackend(2, "exact", isa), [150, 90]
    plan = ragged_plan(lengths, seed=2)
    found = []
    for garbage in (0x00, 0xFF, 0x80):
        world = World(shape.layout(), sequences(lengths), 1)
        world.blocks[:] = garbage
        found.append(world.run(backend.program(decoder(backend, shape), shape.layout(), shape.heads), plan))
    same(found[1], found[0])
    same(found[2], found[0])
    assert all(np.isfinite(x).all() for x in found[0])


def test_int8_needs_pairs_of_dimensions() -> None:
    with pytest.raises(ConfigError, match=r"int8.*even head_dim.*15"):
        Shape(dtype="int8", head_dim=15).layout()
    with pytest.raises(ValueError, match="even head_dim"):
        load_kernels().Program(CpuBackend(1).native, 16, 2, 15, 1, "int8", 1, 4, 8)


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
