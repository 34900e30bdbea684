"""The Triton backend's programs against the NumPy reference, and bit for bit against themselves.

In Triton's interpreter, on the CPU; on a GPU where there is one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from kernel_worlds import Shape, World, decoder, ragged_plan, sequences  # noqa: E402
from test_kernels_attention import close, queries_only, same  # noqa: E402

from interpreted import ArrayBackend  # noqa: E402
from octavo.core.plan import LargestStep  # noqa: E402
from octavo.errors import ConfigError  # noqa: E402
from octavo.kernels.backend import Batch  # noqa: E402
from octavo.kernels.reference import ReferenceBackend  # noqa: E402
from octavo.kernels.triton import attention  # noqa: E402
from octavo.kernels.triton.backend import TritonBackend  # noqa: E402
from octavo.kernels.triton.ladder import rungs, sizes_of  # noqa: E402

SHAPES = {
    "gqa": Shape(),
    "mha, odd blocks": Shape(heads=2, kv_heads=2, block_size=3),
    "mqa of 7, blocks of 1": Shape(heads=7, kv_heads=1, head_dim=8, block_size=1),
    "windows, blocks of 4": Shape(windows=(None, 9), block_size=4, qk_norm=True, activation="gelu_tanh"),
    "window of 1": Shape(windows=(1, None), block_size=16),
    "wide window": Shape(windows=(70, 70), block_size=32, heads=6, kv_heads=2, head_dim=32),
    "softcap, bias, part rotated": Shape(softcap=5.0, bias=True, rotary=0.5, head_dim=24, block_size=48),
    "head_dim 80": Shape(heads=3, kv_heads=1, head_dim=80, hidden=64),
    "head_dim 256": Shape(heads=2, kv_heads=1, head_dim=256, hidden=64, windows=(None,)),
    "more heads than a tile": Shape(heads=70, kv_heads=1, head_dim=8, windows=(None,)),
}


def logits(
    backend: Any, shape: Shape, lengths: list[int], plan: Any, weight_type: str = "F32", seed: int = 0
) -> list[np.ndarray]:
    program = backend.program(decoder(backend, shape, weight_type=weight_type), shape.layout(), shape.heads)
    return World(shape.layout(), sequences(lengths), seed).run(program, plan)


@pytest.mark.parametrize("name", SHAPES)
def test_ragged_batches_equal_the_reference(name: str) -> None:
    """Mixed chunks and single tokens, shuffled tables, NaN in every slot that was never written."""
    lengths = [1, 40, 95, 17]
    plan = ragged_plan(lengths, seed=5)
    right = logits(ReferenceBackend("float64"), SHAPES[name], lengths, plan)
    close(logits(ArrayBackend(), SHAPES[name], lengths, plan), right, 2e-4)


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-2), ("bfloat16", 2e-1)])
def test_smaller_caches_equal_the_reference(dtype: str, tolerance: float) -> None:
    lengths = [33, 80]
    shape = Shape(dtype=dtype, head_dim=32)
    plan = ragged_plan(lengths, seed=6)
    right = logits(ReferenceBackend("float64"), shape, lengths, plan)
    close(logits(ArrayBackend(), shape, lengths, plan), right, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-4), ("float16", 4e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("name", ["gqa", "wide window", "softcap, bias, part rotated", "mqa of 7, blocks of 1"])
def test_attention_over_the_same_blocks_equals_the_reference(dtype: str, tolerance: float, name: str) -> None:
    """What is stored is the same to the byte here; queries and weights are rounded to the cache's type."""
    shape = replace(SHAPES[name], dtype=dtype, windows=(SHAPES[name].windows[0],))
    reference, lengths = ReferenceBackend("float64"), [1, 40, 130, 77]
    world = World(shape.layout(), sequences(lengths), 3)
    world.run(reference.program(decoder(reference, shape), shape.layout(), shape.heads), [list(enumerate(lengths))])
    found = []
    for backend in (ArrayBackend(), reference):
        program = backend.program(queries_only(backend, shape, 1), shape.layout(), shape.heads)
        again = World(shape.layout(), sequences(lengths), 3)
        again.blocks, again.tables = world.blocks, world.tables
        found.append(again.run(program, ragged_plan(lengths, seed=8)))
    close(found[0], found[1], tolerance)


def test_long_contexts_are_joined_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 128 positions: 500 are four; the window begins inside the second."""
    monkeypatch.setattr(attention, "SPLIT", 128)
    shape = Shape(windows=(None, 300), heads=3, kv_heads=1)
    plan = [[(0, 490)], [(0, 1)], [(0, 9)]]
    right = logits(ReferenceBackend("float64"), shape, [500], plan)
    close(logits(ArrayBackend(), shape, [500], plan), right, 2e-4)


@pytest.mark.parametrize("weight_type, dtype", [("F16", "float16"), ("F32", "float32"), ("Q8_0", "bfloat16")])
def test_same_bits_however_it_is_cut(weight_type: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone or in a batch, whole or in chunks, in pieces or not, any block size: not one bit differs."""
    monkeypatch.setattr(attention, "SPLIT", 64)
    lengths = [1, 30, 150, 64, 7]
    shape = Shape(dtype=dtype, windows=(None, 20), heads=6, kv_heads=2, head_dim=32, hidden=64, ffn=96)
    backend = ArrayBackend()
    right = logits(backend, shape, lengths, [[(s, n)] for s, n in enumerate(lengths)], weight_type)
    for i, block_size in enumerate([1, 4, 32]):
        monkeypatch.setattr(attention, "ENOUGH", [0, 1000, 0][i])
        other = replace(shape, block_size=block_size)
        same(logits(backend, other, lengths, ragged_plan(lengths, seed=i, chunk=70), weight_type, seed=i), right)
    same(logits(backend, shape, lengths, [list(enumerate(lengths))], weight_type), right)


@pytest.mark.parametrize("weight_type, dtype", [("F16", "float16"), ("F32", "float32")])
def test_single_tokens_have_the_bits_that_they_have_among_many(weight_type: str, dtype: str) -> None:
    """M = 1 at every position, against 3 sequences at a time and whole prompts: every size of tile is among them."""
    lengths = [40, 90, 140]
    shape = Shape(dtype=dtype, windows=(None,), hidden=80, ffn=112)
    backend = ArrayBackend()
    single = [[(s, 1)] for s, n in enumerate(lengths) for _ in range(n) if s == 0]
    together = [[(0, 40), (1, 90), (2, 140)]]
    apart = [*single, [(1, 50), (2, 1)], *[[(1, 1), (2, 1)]] * 20, [(1, 20), (2, 119)]]
    whole = logits(backend, shape, lengths, together, weight_type)
    same(logits(backend, shape, lengths, apart, weight_type), whole)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_neighbour_of_nan_changes_nothing(dtype: str) -> None:
    """A token whose embedding is NaN spoils its own sequence from there on, and no earlier token and nobody else."""
    shape = Shape(dtype=dtype)
    backend = ArrayBackend()
    lengths = [90, 30]

    class Poisoned:
        """The backend, but row 96 of each matrix with 97 rows, the embedding among them, is NaN."""

        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

        def matrix(self, type: str, data: np.ndarray, rows: int, cols: int) -> Any:
            if rows == 97:
                data = data.copy()
                data.view(np.float32).reshape(rows, cols)[96] = np.nan
            return backend.matrix(type, data, rows, cols)

    program = backend.program(decoder(Poisoned(), shape), shape.layout(), shape.heads)
    world = World(shape.layout(), [s % 96 for s in sequences(lengths)])
    clean = World(shape.layout(), [s % 96 for s in sequences(lengths)])
    world.sequences[0][50] = 96
    found = world.run(program, [[(0, 90), (1, 30)]])
    right = clean.run(backend.program(decoder(backend, shape), shape.layout(), shape.heads), [[(0, 90), (1, 30)]])
    same([found[0][:50, :96], found[1][:, :96]], [right[0][:50, :96], right[1][:, :96]])
    assert np.isnan(found[0][50:]).all()


def test_writes_only_the_slots_of_its_tokens() -> None:
    shape = Shape(dtype="float16", block_size=4, windows=(None,))
    backend = ArrayBackend()
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


@pytest.mark.parametrize("dtype, view", [("float16", np.float16), ("float32", np.float32)])
def test_stored_keys_and_values_are_rounded_to_nearest_even(dtype: str, view: type) -> None:
    """The blocks' bytes equal the reference's, but for rounding of the last bit of the arithmetic before."""
    shape = Shape(dtype=dtype, windows=(None,))
    planes = []
    for backend in (ArrayBackend(), ReferenceBackend("float64")):
        world = World(shape.layout(), sequences([37]))
        world.blocks[:] = 0
        world.run(backend.program(decoder(backend, shape), shape.layout(), shape.heads), [[(0, 37)]])
        planes.append(world.blocks.view(view).astype(np.float64))
    assert np.allclose(planes[0], planes[1], rtol=2e-3 if dtype == "float16" else 1e-4, atol=1e-5)
    if dtype == "float16":
        assert np.mean(planes[0] == planes[1]) > 0.99


def test_attention_over_fp8_equals_the_reference_over_what_its_bits_stand_for() -> None:
    shape = Shape(dtype="fp8", windows=(None,), head_dim=32, heads=6, kv_heads=2)
    backend, lengths = ArrayBackend(), [1, 40, 130]
    world = World(shape.layout(), sequences(lengths), 3)
    world.blocks[:] = 0x7F  # NaN
    world.run(backend.program(decoder(backend, shape), shape.layout(), shape.heads), [list(enumerate(lengths))])
    wide = replace(shape, dtype="float32")
    values = torch.from_numpy(world.blocks).view(torch.float8_e4m3fn).float().numpy()
    found = []
    for one, of, blocks in ((backend, shape, world.blocks), (ReferenceBackend("float64"), wide, values.view(np.uint8))):
        again = World(of.layout(), sequences(lengths), 3)
        again.blocks, again.tables = blocks, world.tables
        program = one.program(queries_only(one, of, 1), of.layout(), of.heads)
        found.append(again.run(program, ragged_plan(lengths, seed=8)))
    close(found[0], found[1], 4e-3)
    assert np.unique(world.blocks).size > 150


def test_an_fp8_cache_is_near_a_float32_one() -> None:
    """A step of e4m3 is a sixteenth: in all, logits are off by a few tenths of their spread, and most by far less."""
    lengths, plan = [60, 20], [[(0, 60), (1, 20)]]
    right = logits(ReferenceBackend("float32"), Shape(head_dim=32), lengths, plan)
    found = logits(ArrayBackend(), Shape(dtype="fp8", head_dim=32), lengths, plan)
    off = np.concatenate([np.abs(a - b).ravel() for a, b in zip(found, right, strict=True)])
    spread = np.std(np.concatenate([r.ravel() for r in right]))
    assert np.median(off) < 0.15 * spread and np.corrcoef(found[0].ravel(), right[0].ravel())[0, 1] > 0.9


def test_values_beyond_float16_spoil_their_own_sequence_from_there_on() -> None:
    """A value that the cache can't hold is NaN to who sees it, and nothing to earlier rows of the same tile."""
    shape = Shape(dtype="float16", windows=(None,))
    rng = np.random.default_rng(0)
    backend = ArrayBackend()
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    table = rng.standard_normal((97, width)).astype(np.float32)
    table[96, -1] = 1e6  # in the values of the last head alone
    packed = backend.matrix("F32", table.reshape(-1).view(np.uint8), 97, width)
    inv_freq = backend.vector(0.1 ** np.arange(8))

    def build(ops: Any) -> None:
        ops.output(ops.pick(ops.attend(ops.rope_write(ops.embed(packed), 0, inv_freq, 1.0), 0, 0.25, None)))

    world = World(shape.layout(), [s % 96 for s in sequences([30, 9])])
    world.sequences[0][12] = 96
    first, second = world.run(backend.program(build, shape.layout(), shape.heads), [[(0, 30), (1, 9)]])
    assert np.isfinite(first[:12]).all() and np.isfinite(second).all()
    spoilt = first[12:].reshape(18, shape.heads, shape.head_dim)
    assert np.isnan(spoilt[:, 2:]).all() and np.isfinite(spoilt[:, :2]).all()


@pytest.mark.parametrize("name", ["windows, blocks of 4"])
def test_steps_on_a_ladder_have_the_bits_of_those_beside_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to the next rung, with pieces to be joined; as recorded graphs on a GPU, and as they are elsewhere."""
    monkeypatch.setattr(attention, "SPLIT", 64)
    lengths = [1, 40, 95, 17]
    plan, shape, backend = ragged_plan(lengths, seed=5), SHAPES[name], ArrayBackend()
    right = logits(backend, shape, lengths, plan)
    program = backend.program(decoder(backend, shape), shape.layout(), shape.heads)
    world = World(shape.layout(), sequences(lengths))
    blocks, told = torch.from_numpy(world.blocks).to(backend.device), []
    program.program.climb(blocks, 40, 96, lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] == len(sizes_of(40, shape.layout(), shape.heads, 96))
    before = world.blocks.copy()
    assert np.array_equal(before, blocks.cpu().numpy()), "recording wrote to blocks"
    ran = []
    fits = program.program.ladder.run
    monkeypatch.setattr(program.program.ladder, "run", lambda *a: ran.append(fits(*a)) or ran[-1])
    same(world.run(Kept(program.program, blocks), plan), right)
    assert sum(x is not None for x in ran) >= 3 and len(ran) == len(plan)


@pytest.mark.parametrize("ladder", [False, True])
def test_tokens_that_stand_for_what_was_drawn(ladder: bool) -> None:
    """The bits are those of the real tokens, on a rung with padding or beside; a draw that failed counts as token 0."""
    shape, backend = Shape(windows=(None, 9)), TritonBackend()
    program = backend.program(decoder(backend, shape), shape.layout(), shape.heads)
    given = sequences([30, 30, 30])
    given[2][10:] = 0
    known, named = (World(shape.layout(), given) for _ in range(2))
    blocks = [torch.from_numpy(world.blocks).to(backend.device) for world in (known, named)]
    if ladder:
        program.climb(blocks[1], 40, 96)
    for step, rows in enumerate([[(0, 10), (1, 10), (2, 10)], [(1, 1), (0, 1), (2, 1)], [(2, 2), (1, 1), (0, 5)]]):
        right, batch = known.batch(rows), named.batch(rows)
        if step:
            last = right.starts[1:] - 1
            drawn = right.tokens[last[::-1]].reshape(-1, 1) * np.array([[1, 0, 0]], np.int32)
            drawn[drawn[:, 0] == 0] = -1
            batch.tokens[last] = [-3, -2, -1]
            backend.drawn.tokens = torch.from_numpy(drawn).to(backend.device)[:, 0]
        found = [
            program.run(b, there).cpu().numpy().copy() for b, there in zip((batch, right), blocks[::-1], strict=True)
        ]
        same(found[:1], found[1:])
    assert not ladder or program.ladder is not None
    batch.tokens[0] = -4
    with pytest.raises(ValueError, match="a token stands for draw 3, and there was none"):
        program.run(batch, blocks[1])


def test_a_gpu_that_answers_no_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is one of a step, unless waiting for the device fails as well."""
    backend, calls = TritonBackend(), []
    backend.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", calls.append)
    assert backend.lost() is None and calls == [backend.device]

    def fails(device: Any) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA.")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert backend.lost() == (
        "the GPU has failed for good (CUDA error: device-side assert triggered): only a new process can use it again"
    )
    backend.device = torch.device("cpu")
    assert backend.lost() is None


class Kept:
    """A program over blocks that stay where they are."""

    def __init__(self, program: Any, blocks: torch.Tensor) -> None:
        self.program, self.blocks = program, blocks

    def run(self, batch: Any, blocks: np.ndarray) -> np.ndarray:
        return self.program.run(batch, self.blocks).cpu().numpy().copy()


def test_a_ladder_stays_when_a_larger_step_comes(caplog: pytest.LogCaptureFixture) -> None:
    """It goes on over the activations that its graphs know; and what was reserved holds all that it should."""
    shape, backend = Shape(windows=(None,)), ArrayBackend()
    program = backend.program(decoder(backend, shape), shape.layout(), shape.heads).program
    world, alone = (World(shape.layout(), sequences([60])) for _ in range(2))
    other = backend.program(decoder(backend, shape), shape.layout(), shape.heads)
    right = alone.run(other, [[(0, 2)], [(0, 50)], [(0, 2)]])
    blocks = torch.from_numpy(world.blocks).to(backend.device)
    program.reserve(LargestStep(20, 8, 8, 60))
    program.climb(blocks, 8, 60)
    taken = [t.data_ptr() for t in program.buffers.tensors]
    ran, fits = [], program.ladder.run
    program.ladder.run = lambda prepared: ran.append(fits(prepared)) or ran[-1]
    found = []
    for count in (2, 50, 2):
        found.append(program.run(world.batch([(0, count)]), blocks).cpu().numpy().copy())
    assert [x is not None for x in ran] == [True, False, True]
    assert ran[0].data_ptr() == ran[2].data_ptr() in taken
    same([np.concatenate(found)], right)
    program.run(world.batch([(0, 6)]), blocks)
    assert caplog.text.count("more memory than was reserved") == 1


def test_a_rung_holds_decodes_at_the_full_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """All numbers of sequences up to the most, at all contexts; room for short contexts is little."""
    from octavo.kernels.triton.inputs import prepare

    shape = Shape(windows=(None, 3000), heads=8, kv_heads=2)
    layout, context = shape.layout(), 40_000
    ladder = sizes_of(48, layout, 8, context)
    for n in (1, 2, 3, 8, 11, 31, 33, 48):
        for position in (0, 900, 5000, context - 1):
            batch = decodes(n, position, layout)
            fitting = next(sizes for sizes in ladder if sizes.hold(prepare(batch, layout, 8).sizes))
            assert fitting.tokens < 2 * n or fitting.tokens == 48
            if position < 4000:
                assert fitting.tokens == next(r for r in rungs(48) if r >= n)
                assert max(fitting.items) <= 4 * fitting.tokens + 16
    assert [s for s in ladder if s.tokens == 1][-1].items == (40, 4)


def decodes(n: int, position: int, layout: Any) -> Batch:
    """A token of each of n sequences, all at one position."""
    each, held = np.arange(n + 1, dtype=np.int32), position // layout.block_size + 1
    table = np.zeros(n * held, np.int32), each * held
    return Batch(each[:-1], each[:-1] * 0 + position, each, [table] * len(layout.groups), each[:-1])


def test_rungs_waste_an_eighth_at_most() -> None:
    steps = rungs(300)
    assert steps[:5] == [1, 2, 4, 8, 16] and steps[-1] == 300 and rungs(1) == [1] and rungs(6) == [1, 2, 4, 6]
    assert all(b - a <= max(8, b / 8) for a, b in zip(steps, steps[1:], strict=False))


def test_caches_of_the_cpu_alone_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"int8 is for the CPU.*fp8"):
        logits(ArrayBackend(), Shape(dtype="int8"), [3], [[(0, 3)]])
