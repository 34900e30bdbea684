"""A failure stays where it is: rows that fail, logits that are no numbers, steps that raise, Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from array import array
from typing import Any

import numpy as np
import pytest

from engines import Pieces, Rig, alone, answer, ids, outputs, solo
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.events import Delta, Finished
from octavo.core.layout import KVLayout, LayerGroup
from octavo.core.plan import Draw, Move, Place, Plan, Row, StepResult
from octavo.engine import llm as llm_module
from octavo.engine.build import Parts
from octavo.errors import EngineError
from octavo.execute.executor import LocalExecutor
from octavo.kernels.backend import Batch
from octavo.kernels.cpu import CpuBackend
from octavo.paging.audit import audit_idle

# ---- rows that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["prompt", "first", "later"])
def test_a_failing_row_ends_only_its_request(when: str) -> None:
    """Its blocks are back at once, nothing of the failed row is published, neighbours and successors are unharmed."""
    position = {"prompt": 5, "first": 19, "later": 23}[when]

    def fail(row: Row) -> str | None:
        return "kernel fault" if row.sequence == 2 and row.start + len(row.tokens) > position else None

    rig = Rig(pool=60, block_size=4, budget=16, fail=fail)
    first, broken, third = (rig.add(ids(20, i), 10) for i in range(3))
    rig.run()
    assert broken.error == "kernel fault" and broken.branches[0].finish_reason == "error"
    assert [type(e) for e in rig.events[broken.id]][-1] is Finished
    assert sum(isinstance(e, Finished) for e in rig.events[broken.id]) == 1
    assert outputs(first) == alone(ids(20, 0), 10) and outputs(third) == alone(ids(20, 2), 10)
    assert outputs(broken)[0] == alone(ids(20, 1), 10)[0][: len(outputs(broken)[0])]
    again = rig.add(ids(20, 1), 10)
    rig.run()
    assert outputs(again) == alone(ids(20, 1), 10)
    assert rig.engine.stats().counters.failed == 1


@pytest.mark.parametrize("branch", range(4))
def test_a_failing_branch_ends_the_others_in_the_same_step(branch: int) -> None:
    """All four branches have rows in the step in which one fails: one final event, no row of the dead is folded."""
    failing: list[int] = []
    rig = Rig(pool=60, block_size=4, budget=64, fail=lambda row: "fault" if row.sequence in failing else None)
    other = rig.add(ids(9, 1), 12)
    request = rig.add(ids(9, 2), 10, n=4, temperature=1.0, seed=1)
    rig.steps(3)
    failing.append(request.branches[branch].number)
    rig.run()
    assert request.error == "fault" and request.finished
    assert [s.finish_reason for s in request.branches] == ["error"] * 4
    assert [len(o) for o in outputs(request)] == [4 if i < branch else 3 for i in range(4)]
    assert sum(isinstance(e, Finished) for e in rig.events[request.id]) == 1
    ends = [e.branch for e in rig.events[request.id] if isinstance(e, Delta) and e.finish_reason == "error"]
    assert sorted(ends) == [0, 1, 2, 3]
    assert outputs(other) == alone(ids(9, 1), 12)


# ---- the executor ---------------------------------------------------------------------------------------------------

VOCAB = 32
NAN, RAISES, INFINITE = 13, 14, 15  # tokens that break the stub model


class Stub:
    """A program whose logits depend on the token alone, and that breaks on some tokens."""

    def __init__(self) -> None:
        self.runs = 0

    def run(self, batch: Batch, blocks: np.ndarray) -> np.ndarray:
        self.runs += 1
        if RAISES in batch.tokens:
            raise FloatingPointError("a kernel gave up")
        wanted = batch.tokens[batch.logits_at]
        logits = np.sin(np.outer(wanted + 1.0, np.arange(VOCAB) + 2.0)).astype(np.float32)
        logits[wanted == NAN, 3] = np.nan
        logits[wanted == INFINITE, 3] = np.inf
        return logits


def stub_executor() -> tuple[LocalExecutor, Stub]:
    program = Stub()
    layout = KVLayout(4, 1, 8, "float32", (LayerGroup(None, (0,)),))
    return LocalExecutor(CpuBackend(threads=1), program, layout, 8), program


def draw(position: int, **values: Any) -> Draw:
    defaults: dict[str, Any] = dict(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition=1.0)
    defaults.update(presence=0.0, frequency=0.0, seed=0, logprobs=1)
    return Draw(0, position, **{**defaults, **values})


def row(sequence: int, tokens: list[int], score: int = -1) -> Row:
    targets = array("i", [*tokens[1:]]) if score >= 0 else array("i")
    return Row(sequence, 0, array("i", tokens), (array("i", [sequence]),), (draw(len(tokens)),), targets, score)


@pytest.mark.parametrize("bad", [NAN, RAISES, INFINITE])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("score", [-1, 2])
def test_bad_logits_are_an_error_of_their_row(bad: int, place: int, score: int) -> None:
    """NaN, infinite logits, or a kernel that raises: that row has an error, the others the results they have alone."""
    rows = [row(i, [4 + i, 5, 6], score) for i in range(3)]
    executor, _ = stub_executor()
    want = [executor.run(Plan(0, (), (r,))).rows[0] for r in rows]
    assert all(w.error is None and len(w.tokens) == 1 for w in want)
    rows[place] = row(place, [4, bad, 6] if bad == RAISES or score >= 0 else [4, 5, bad], score)
    result = executor.run(Plan(1, (), tuple(rows)))
    for i in range(3):
        if i == place:
            assert result.rows[i].error is not None and not result.rows[i].tokens
        else:
            assert result.rows[i] == want[i]


def test_a_step_that_raises_moves_blocks_once() -> None:
    """Rows are run again one by one; the moves before them are not."""
    executor, program = stub_executor()
    executor.blocks[:] = np.arange(8, dtype=np.uint8)[:, None]
    moves = (Move(Place(0, 1), Place(0, 2)), Move(Place(0, 3), Place(0, 1)))
    result = executor.run(Plan(0, moves, (row(4, [1, RAISES]), row(5, [1, 2]))))
    assert executor.blocks[:, 0].tolist() == [0, 3, 1, 3, 4, 5, 6, 7]
    assert result.rows[0].error == "FloatingPointError: a kernel gave up" and result.rows[1].error is None
    assert program.runs == 3


# ---- the offline API around a scripted engine -----------------------------------------------------------------------

LETTERS = [bytes([c]) for c in range(32, 127)]


def offline(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> LLM:
    parts = Parts(rig.engine, rig.intake, rig.engine.tokenizer, None, None, None, EngineConfig())  # type: ignore[arg-type]
    monkeypatch.setattr(llm_module, "build", lambda model, config, told=None: parts)
    return LLM("scripted")


GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture
def rig() -> Rig:
    return Rig(tokenizer=Pieces(LETTERS), vocab=len(LETTERS), pool=30, block_size=4)


def test_r15_results_come_in_the_order_of_the_prompts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """R15: two batch calls on one engine; whatever finishes first, results are in input order both times."""
    llm = offline(rig, monkeypatch)
    prompts = [ids(1 + 5 * (i % 4), i) for i in range(24)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + 7 * i % 13) for i in range(24)]
    for _ in range(2):
        results = llm.generate([[t % 95 for t in p] for p in prompts], params)
        for result, prompt, own in zip(results, prompts, params, strict=True):
            assert result.prompt_token_ids == [t % 95 for t in prompt] and result.finished
            want = solo(result.prompt_token_ids, own.max_tokens, choose=rig.executor._choose)
            assert result.outputs[0].token_ids == outputs(want)[0]
            assert result.outputs[0].text == b"".join(LETTERS[t] for t in outputs(want)[0]).decode()


def test_an_error_of_one_request_is_in_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tokenizer=Pieces(LETTERS), vocab=95, fail=lambda row: "fault" if row.sequence == 2 else None)
    results = offline(rig, monkeypatch).generate([[1, 2], [3, 4], [5, 6]], GREEDY)
    assert [r.error for r in results] == [None, "fault", None]
    assert results[1].outputs[0].finish_reason == "error" and results[1].outputs[0].token_ids == []
    assert [len(r.outputs[0].token_ids) for r in results] == [8, 0, 8]


@pytest.mark.parametrize("step", [0, 1, 5, 30])
def test_ctrl_c_leaves_the_engine_usable(step: int, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT in the middle of a step: the step ends, all blocks are back, the next call works."""
    llm = offline(rig, monkeypatch)
    prompts = [[i, 1, 2] for i in range(20)]
    want = [r.outputs for r in llm.generate(prompts, GREEDY)]
    run, first = rig.executor.run, rig.engine.counters.steps

    def interrupted(plan: Plan) -> StepResult:
        if plan.step == first + step:
            signal.raise_signal(signal.SIGINT)
        return run(plan)

    rig.executor.run = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40))
    audit_idle(rig.kv)
    assert not rig.engine.busy and not rig.engine.requests
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert [r.outputs for r in llm.generate(prompts, GREEDY)] == want


def test_a_step_that_raises_leaves_the_engine_usable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = offline(rig, monkeypatch)
    want = llm.generate([[1, 2]], GREEDY)[0].outputs
    run = rig.executor.run
    rig.executor.run = lambda plan: (_ for _ in ()).throw(MemoryError("none left"))
    with pytest.raises(MemoryError):
        llm.generate([[1, 2], [3]], GREEDY)
    audit_idle(rig.kv)
    rig.executor.run = run
    assert llm.generate([[1, 2]], GREEDY)[0].outputs == want


def test_generate_inside_a_running_loop(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's cell: generate is called while the thread's event loop runs."""
    llm = offline(rig, monkeypatch)

    async def cell() -> list[int]:
        return llm.generate([1, 2, 3], GREEDY)[0].outputs[0].token_ids

    assert len(asyncio.run(cell())) == 8


def test_generate_from_several_threads(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = offline(rig, monkeypatch)
    want = [r.outputs for r in llm.generate([[i] for i in range(6)], GREEDY)]
    got: dict[int, Any] = {}

    def call(i: int) -> None:
        got[i] = llm.generate([i], GREEDY)[0].outputs

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == want
    audit_idle(rig.kv)


def test_a_closed_llm_says_so(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with offline(rig, monkeypatch) as llm:
        llm.generate([1], GREEDY)
    llm.close()
    for use in (lambda: llm.generate([1]), llm.stats, llm.reset_prefix_cache):
        with pytest.raises(EngineError, match="closed"):
            use()


def test_seeds_that_are_not_given_are_drawn_and_reported(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = offline(rig, monkeypatch)
    first, second = llm.generate([[1, 2], [1, 2]], SamplingParams(temperature=1.0, max_tokens=8))
    assert first.seed is not None and second.seed is not None and first.seed != second.seed
    again = llm.generate([1, 2], SamplingParams(temperature=1.0, max_tokens=8, seed=first.seed))[0]
    assert again.outputs == first.outputs and again.seed == first.seed


def test_answers_do_not_depend_on_what_failed_before(rig: Rig) -> None:
    want = answer(solo(ids(20, 2), 8, choose=rig.executor._choose))
    for steps in range(8):
        broken = rig.add(ids(20, 2), 30)
        rig.steps(steps)
        rig.engine.abort(broken)
        request = rig.add(ids(20, 2), 8)
        rig.run()
        assert outputs(request) == want["tokens"]
