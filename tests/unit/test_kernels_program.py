"""Programs of the CPU backend: what they refuse, what they keep, how they share memory; and moves."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from kernel_worlds import VOCAB, Shape, World, decoder, sequences

from octavo.kernels.backend import Batch
from octavo.kernels.cpu import CpuBackend, Recorder, place_values
from octavo.kernels.select import load_kernels, runnable_isas, self_check

SHAPE = Shape(block_size=4, windows=(None, 8))


@pytest.fixture(params=runnable_isas())
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return CpuBackend(2, "exact", request.param)


def program_and_world(backend: CpuBackend, length: int = 30):
    program = backend.program(decoder(backend, SHAPE), SHAPE.layout(), SHAPE.heads)
    return program, World(SHAPE.layout(), sequences([length]))


def changed(batch: Batch, **values) -> Batch:
    return replace(batch, **{k: np.asarray(v, dtype=np.int32) if k != "tables" else v for k, v in values.items()})


BAD = {
    "token beyond the vocabulary": lambda b: changed(b, tokens=[VOCAB] * 10),
    "negative token": lambda b: changed(b, tokens=[-1] * 10),
    "positions with a gap": lambda b: changed(b, positions=[*range(9), 20]),
    "negative position": lambda b: changed(b, positions=range(-1, 9)),
    "position near 2^31": lambda b: changed(b, positions=np.arange(2**31 - 10, 2**31)),
    "positions beyond the table": lambda b: changed(b, positions=range(100, 110)),
    "too few positions": lambda b: changed(b, positions=range(9)),
    "starts beyond the tokens": lambda b: changed(b, starts=[0, 11]),
    "starts not from 0": lambda b: changed(b, starts=[1, 10]),
    "no starts": lambda b: changed(b, starts=[]),
    "falling starts": lambda b: changed(
        b, starts=[0, 12, 5, 10], tables=[(t[0], np.array([0, 3, 3, 3])) for t in b.tables]
    ),
    "logits of no token": lambda b: changed(b, logits_at=[10]),
    "logits of a negative token": lambda b: changed(b, logits_at=[-1]),
    "a missing table": lambda b: changed(b, tables=b.tables[:1]),
    "a block beyond the pool": lambda b: changed(b, tables=[(b.tables[0][0] + 1000, b.tables[0][1]), b.tables[1]]),
    "a freed block that is read": lambda b: changed(b, tables=[(b.tables[0][0] * 0 - 1, b.tables[0][1]), b.tables[1]]),
    "a short table": lambda b: changed(b, tables=[(b.tables[0][0], np.array([0, 2])), b.tables[1]]),
    "offsets beyond the ids": lambda b: changed(b, tables=[(b.tables[0][0], np.array([0, 99])), b.tables[1]]),
    "offsets of another length": lambda b: changed(b, tables=[(b.tables[0][0], np.array([0])), b.tables[1]]),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_step_raises_and_writes_nothing(backend: CpuBackend, name: str) -> None:
    program, world = program_and_world(backend)
    before = world.blocks.copy()
    with pytest.raises(ValueError):
        program.run(BAD[name](world.batch([(0, 10)])), world.blocks)
    assert np.array_equal(before, world.blocks)
    world.done = [0]
    assert np.isfinite(program.run(world.batch([(0, 10)]), world.blocks)).all()


def test_bad_blocks_are_refused(backend: CpuBackend) -> None:
    program, world = program_and_world(backend)
    batch = world.batch([(0, 10)])
    good = world.blocks
    for blocks in (good[:, :-1].copy(), good.view(np.int8), good[::2], good.reshape(-1)):
        with pytest.raises((ValueError, TypeError)):
            program.run(batch, blocks)
    frozen = world.blocks.copy()
    frozen.flags.writeable = False
    with pytest.raises((ValueError, TypeError)):
        program.run(batch, frozen)


def test_freed_head_blocks_of_a_window_are_not_read(backend: CpuBackend) -> None:
    """The window's group holds -1 for blocks that slid out, though the full group keeps its own."""
    program, world = program_and_world(backend)
    world.run(program, [[(0, 20)]])
    batch = world.batch([(0, 1)])
    assert -1 in batch.tables[1][0] and -1 not in batch.tables[0][0]
    assert np.isfinite(program.run(batch, world.blocks)).all()


def test_empty_rows_and_empty_steps(backend: CpuBackend) -> None:
    program, world = program_and_world(backend)
    right = np.array(program.run(world.batch([(0, 10)]), world.blocks))
    world.done = [0]
    batch = world.batch([(0, 0), (0, 10), (0, 0)])
    assert np.array_equal(np.array(program.run(batch, world.blocks)), right)
    nothing = world.batch([(0, 0)])
    assert program.run(nothing, world.blocks).shape == (0, VOCAB)
    world.done = [0]
    silent = replace(world.batch([(0, 10)]), logits_at=np.zeros(0, dtype=np.int32))
    assert program.run(silent, world.blocks).shape == (0, VOCAB)


def test_logits_of_some_tokens(backend: CpuBackend) -> None:
    program, world = program_and_world(backend)
    right = np.array(program.run(world.batch([(0, 10)]), world.blocks))
    world.done = [0]
    batch = replace(world.batch([(0, 10)]), logits_at=np.array([2, 9], dtype=np.int32))
    assert np.array_equal(program.run(batch, world.blocks), right[[2, 9]])


def test_a_result_outlives_a_larger_run_and_its_program(backend: CpuBackend) -> None:
    program, world = program_and_world(backend)
    kept = program.run(world.batch([(0, 2)]), world.blocks)
    copy = kept.copy()
    program.run(world.batch([(0, 20)]), world.blocks)
    del program
    assert np.array_equal(kept, copy)


def test_two_python_threads_take_turns(backend: CpuBackend) -> None:
    program, world = program_and_world(backend)
    right = np.array(program.run(world.batch([(0, 30)]), world.blocks))
    found = []

    def work() -> None:
        mine = backend.program(decoder(backend, SHAPE), SHAPE.layout(), SHAPE.heads)
        for _ in range(5):
            world = World(SHAPE.layout(), sequences([30]))
            found.append(np.array(mine.run(world.batch([(0, 30)]), world.blocks)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 15 and all(np.array_equal(f, right) for f in found)


def test_values_share_memory_only_when_their_uses_do_not_overlap() -> None:
    class Table:
        rows, cols = 50, 32

    recorder = Recorder(SHAPE.layout(), SHAPE.heads)
    x = recorder.embed(Table())
    norm = np.ones(32, dtype=np.float32)
    for _ in range(4):
        x = recorder.norm(recorder.norm(x, norm, 1e-5), norm, 1e-5, residual=x)
    recorder.output(recorder.pick(x))
    made: list[tuple[int, str]] = []

    def make(width: int, extent: str) -> int:
        made.append((width, extent))
        return len(made) - 1

    place_values(recorder.calls, make)
    assert sorted(made) == sorted([(32, "tile")] * 3 + [(32, "tokens"), (32, "logits")])
    alive: dict[int, int] = {}  # buffer -> last use of the value in it
    for at, call in enumerate(recorder.calls):
        for value in call.inputs:
            assert value is None or alive[value.buffer] >= at
        if call.output is not None:
            assert alive.get(call.output.buffer, -1) < at
            alive[call.output.buffer] = call.output.last_use


def test_shapes_that_do_not_fit_are_refused_at_load(backend: CpuBackend) -> None:
    wrong = backend.matrix("F32", np.zeros(10 * 12 * 4, dtype=np.uint8), 10, 12)

    def build(ops) -> None:
        table = backend.matrix("F32", np.zeros(50 * 16 * 4, dtype=np.uint8), 50, 16)
        ops.output(ops.linear(ops.pick(ops.embed(table)), [wrong]))

    with pytest.raises(ValueError, match="linear"):
        backend.program(build, SHAPE.layout(), SHAPE.heads)
    with pytest.raises(ValueError, match="query heads"):
        backend.program(decoder(backend, SHAPE), SHAPE.layout(), 3)
    with pytest.raises(ValueError):
        backend.matrix("F32", np.zeros(100, dtype=np.uint8), 10, 12)


def test_moves_are_as_if_in_order(backend: CpuBackend) -> None:
    rng = np.random.default_rng(0)
    for trial in range(20):
        pool = rng.integers(0, 256, (40, 96)).astype(np.uint8)
        other = rng.integers(0, 256, (30, 96)).astype(np.uint8)
        pairs = rng.integers(0, 30, (12, 2))
        target = [pool, other][trial % 2]
        right_pool, right_target = pool.copy(), target.copy()
        for a, b in pairs:
            (right_pool if target is pool else right_target)[b] = right_pool[a]
        backend.move(pool, target, pairs)
        assert np.array_equal(target, right_pool if target is pool else right_target)


def test_bad_moves_are_refused(backend: CpuBackend) -> None:
    pool = np.zeros((4, 8), dtype=np.uint8)
    for pairs in ([[0, 4]], [[4, 0]], [[-1, 0]], [[0, -1]]):
        with pytest.raises(IndexError):
            backend.move(pool, pool, np.array(pairs))
    with pytest.raises(ValueError):
        backend.move(pool, np.zeros((4, 9), dtype=np.uint8), np.array([[0, 0]]))
    memory = np.zeros(48, dtype=np.uint8)
    with pytest.raises(ValueError, match="overlap"):
        backend.move(memory[:32].reshape(4, 8), memory[16:].reshape(4, 8), np.array([[0, 0]]))
    backend.move(pool, pool, np.zeros((0, 2), dtype=np.int64))


def test_choice_of_instruction_set() -> None:
    """R63: what the machine doesn't run is refused by name; a build that computes wrongly is passed over."""
    isas = runnable_isas()
    assert isas[-1] == "scalar"
    assert load_kernels().isa == isas[0]
    with pytest.raises(ValueError, match="sparc"):
        load_kernels("sparc")
    scalar = load_kernels("scalar")
    for isa in isas:
        assert self_check(load_kernels(isa), scalar) == ""


def test_a_wrong_build_is_passed_over_with_a_warning(monkeypatch, caplog) -> None:
    from octavo.kernels import select

    class Broken:
        isa = "scalar"
        Cpu = staticmethod(load_kernels("scalar").Cpu)

        class Program:
            def __init__(self, *args) -> None:
                self.native = load_kernels("scalar").Program(*args)

            def __getattr__(self, name):
                return getattr(self.native, name)

            def run(self, *args):
                return np.array(self.native.run(*args)) * 1.01

    load_kernels.cache_clear()
    real = select._module
    monkeypatch.setattr(select, "runnable_isas", lambda: ["broken", "scalar"])
    monkeypatch.setattr(select, "_module", lambda isa: Broken if isa == "broken" else real(isa))
    try:
        assert load_kernels() is real("scalar")
        assert "broken" in caplog.text and "self-check" in caplog.text
    finally:
        load_kernels.cache_clear()
