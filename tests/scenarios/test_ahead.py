"""A step is submitted while the one before it runs: what may be, what ends meanwhile, and what fails meanwhile.

That no answer depends on it is also in the drawn loads of tests/property, of which many run ahead.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest
from test_failures import INFINITE, RAISES, Stub, row

from engines import Pieces, Rig, alone, answer, ids, outputs, solo
from octavo.core.layout import KVLayout, LayerGroup
from octavo.core.params import SamplingParams
from octavo.core.plan import HOST, Move, Place, Plan, Row, stand_in
from octavo.decode.branching import Rules
from octavo.engine.session import SessionState
from octavo.errors import EngineError
from octavo.execute.executor import LocalExecutor
from octavo.kernels.backend import Batch, Later, SampleBatch
from octavo.kernels.cpu import CpuBackend
from octavo.paging.audit import audit_idle
from octavo.schedule.budget import TokenBudget


def test_a_steady_load_runs_ahead() -> None:
    """Nearly every step, and no token is computed in vain: an end by the limit is foreseen."""
    found = []
    for ahead in (False, True):
        rig = Rig(pool=200, budget=64, ahead=ahead)
        requests = [rig.add(ids(20, i), 40, temperature=i % 2, seed=i) for i in range(6)]
        steps = rig.run()
        found.append((rig.computed(), [answer(r) for r in requests]))
    assert rig.engine.stats().counters.steps_ahead > 0.9 * steps
    assert found[0] == found[1]


def test_prompts_in_chunks_run_ahead() -> None:
    """Their rows draw nothing and come first here: the numbers of what the others draw do not count rows."""
    rig = Rig(pool=200, budget=7, policy="priority", ahead=True)
    requests = [(rig.add(ids(9, i), 30), alone(ids(9, i), 30)) for i in range(2)]
    rig.steps(5)
    before = rig.engine.counters.steps_ahead
    requests.append((rig.add(ids(60), 10, priority=-1), alone(ids(60), 10)))
    rig.steps(10)
    assert rig.engine.counters.steps_ahead >= before + 9 and not requests[2][0].branches[0].output()
    rig.run()
    for request, tokens in requests:
        assert outputs(request) == tokens


def test_decodes_take_turns() -> None:
    """More of them than the budget: who was served in the step that still runs was served last."""
    rig = Rig(pool=200, budget=16, ahead=True)
    requests = [rig.add(ids(2, i), 40) for i in range(5)]
    rig.steps(3)
    rig.engine.budget = TokenBudget(2)
    rig.engine.step()  # submitted before
    before, ahead = [len(outputs(r)[0]) for r in requests[1:]], rig.engine.counters.steps_ahead
    rig.steps(12)
    assert [len(outputs(r)[0]) - n for r, n in zip(requests[1:], before, strict=True)] == [3, 3, 3, 3]
    assert rig.engine.counters.steps_ahead == ahead + 12


@pytest.mark.parametrize("given", [{"repetition_penalty": 1.3}, {"prompt_logprobs": 1}, {"n": 3}])
def test_what_must_know_the_token_before_waits_for_it(given: dict[str, Any]) -> None:
    """A penalty in every step; scores and forks in the one that they are in."""
    rig = Rig(pool=100, budget=64, ahead=True)
    request = rig.add(ids(9), 12, **given)
    steps = rig.run()
    assert answer(request) == answer(solo(ids(9), 12, **given))
    assert rig.engine.counters.steps_ahead == (0 if "repetition_penalty" in given else steps - 2)


def test_bad_words_wait_too() -> None:
    known = alone(ids(9), 8)[0]
    rig = Rig(pool=100, budget=64, ahead=True)
    request = rig.add(ids(9), 8)
    request.rules = Rules(bad=((known[3], known[4]),))
    rig.run()
    assert outputs(request)[0][:4] == known[:4] and outputs(request)[0][4] != known[4]


# ---- ends that nobody foresaw ----------------------------------------------------------------------------------------


def ending(rig: Rig) -> list[Any]:
    """Requests of two users, that end by tokens, early and late, and by their limit."""
    given = [{"stop_token_ids": alone(ids(10, i), 20)[0][k : k + 1]} for i, k in enumerate([3, 0, 7, 12])]
    return [rig.add(ids(10, i), 20, user="ab"[i % 2], **more) for i, more in enumerate([*given, {}])]


def test_a_row_for_nobody_is_not_charged_and_not_told() -> None:
    found = []
    for ahead in (False, True):
        rig = Rig(pool=100, budget=64, policy="fair", ahead=ahead)
        requests = ending(rig)
        rig.run()
        policy: Any = rig.engine.scheduler.policy
        found.append((policy.counters, [answer(r) for r in requests], [rig.events[r.id] for r in requests]))
    assert rig.engine.counters.steps_ahead > 10
    assert found[0][:2] == found[1][:2]
    assert [len(events) for events in found[0][2]] == [len(events) for events in found[1][2]]


def test_stop_strings() -> None:
    pieces = Pieces([bytes([97 + i % 26]) for i in range(97)])
    found = []
    for ahead in (False, True):
        rig = Rig(pool=100, budget=64, tokenizer=pieces, ahead=ahead)
        text = "".join(chr(97 + t % 26) for t in alone(ids(9), 30)[0])
        request = rig.add(ids(9), 30, stop=[text[11:14]])
        rig.run()
        found.append(answer(request))
    assert found[0] == found[1] and found[0]["ends"][0][0] == "stop"


def test_an_abort_gives_blocks_back_while_a_row_still_runs() -> None:
    """The engine is busy until that row is folded in, and who takes the blocks has them to itself."""
    rig = Rig(pool=12, budget=64, ahead=True)
    request = rig.add(ids(8), 30)
    rig.steps(4)
    assert rig.engine.flight is not None
    rig.engine.abort(request)
    audit_idle(rig.kv)
    assert rig.engine.busy
    heir = rig.add(ids(30, 5), 10)
    rig.run()
    assert rig.engine.flight is None and not rig.engine.busy
    assert outputs(heir) == alone(ids(30, 5), 10)
    assert outputs(request)[0] == alone(ids(8), 30)[0][:4]


def test_closing_waits_for_what_runs() -> None:
    rig = Rig(pool=30, budget=64, ahead=True)
    request = rig.add(ids(8), 30)
    rig.steps(3)
    collected, collect = [], rig.executor.collect
    rig.executor.collect = lambda ticket: collected.append(ticket) or collect(ticket)
    pending = rig.engine.flight
    rig.engine.abort(request)
    rig.engine.close()
    assert pending is not None and collected == [pending.ticket] and not rig.executor.slots


@pytest.mark.parametrize("what", ["go on", "rewind", "fork", "append", "close", "wait"])
@pytest.mark.parametrize("size", [1, 4])
def test_a_session_whose_answer_ended_early(what: str, size: int) -> None:
    """The row for nobody wrote behind the session's end, perhaps into a block of its own, which the session gave up."""
    for end in range(1, 6):
        prompt = ids(10)
        known = alone(prompt, 20)[0]
        rig = Rig(pool=200 // size, block_size=size, budget=64, ahead=True)
        state = SessionState(rig.engine, rig.intake, array("i", prompt), b"", "")
        request = state.begin(SamplingParams(temperature=0.0, max_tokens=20, stop_token_ids=[known[end]]))
        neighbour = rig.add(ids(11, 3), 30)
        while not request.finished:
            rig.step()
        assert rig.engine.flight is not None, "there is a row for nobody"
        state.end(request)
        text = prompt + outputs(request)[0]
        assert list(state.tokens) == text
        held = rig.kv.holdings[state.sequence.number].tables[0]
        assert len(held) == -(-state.sequence.computed // size)
        other = [state]
        if what == "rewind":
            state.rewind(len(text) - 2)
        elif what == "append":
            state.append([5, 6])
        elif what == "wait":
            rig.steps(9)
        elif what == "fork":
            other.append(state.fork())
            other[1].append([7])
        if what != "close":
            for session in other:
                before = list(session.tokens)
                again = session.begin(SamplingParams(temperature=0.0, max_tokens=6))
                while not again.finished:
                    rig.step()
                session.end(again)
                assert list(session.tokens) == before + alone(before, 6)[0]
        for session in other:
            session.close()
        rig.run()
        assert outputs(neighbour) == alone(ids(11, 3), 30)


# ---- failures --------------------------------------------------------------------------------------------------------


def test_a_row_that_fails_takes_its_row_ahead_with_it() -> None:
    failing: list[int] = []
    rig = Rig(pool=60, budget=64, fail=lambda row: "fault" if row.sequence in failing else None, ahead=True)
    first, broken, third = (rig.add(ids(12, i), 12) for i in range(3))
    rig.steps(4)
    failing.append(broken.branches[0].number)
    rig.run()
    assert broken.error == "fault" and len(outputs(broken)[0]) in (4, 5)
    assert outputs(first) == alone(ids(12, 0), 12) and outputs(third) == alone(ids(12, 2), 12)


def test_a_step_whose_results_do_not_come_is_run_again_with_the_one_behind_it() -> None:
    """Whatever an executor raises: nothing of either is kept, and nobody's answer suffers."""
    rig = Rig(pool=60, budget=64, ahead=True)
    requests = [rig.add(ids(12, i), 12) for i in range(2)]
    rig.steps(4)
    collect = rig.executor.collect
    rig.executor.collect = lambda ticket: (_ for _ in ()).throw(MemoryError("none left"))
    with pytest.raises(MemoryError):
        rig.engine.step()
    rig.executor.collect = collect
    assert rig.engine.flight is None
    rig.run()
    for i, request in enumerate(requests):
        assert outputs(request) == alone(ids(12, i), 12)


class Recalling(CpuBackend):
    """Keeps what it drew, as a GPU does, and tells it late; now and then something goes wrong on the way."""

    recalls = True

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.kept = np.empty(0, np.int32)
        self.spoil = False
        self.gone: str | None = None

    def draw(self, logits: np.ndarray, batch: SampleBatch) -> Later:
        sampled = self.sample(logits, batch)
        self.kept, spoilt = sampled.token, self.spoil and len(batch.row) > 1  # not a row that is run alone
        if spoilt:
            self.kept = (sampled.token + 1) % 13

        def wait() -> Any:
            if spoilt:
                raise RuntimeError("it did not arrive")
            return sampled

        return wait

    def lost(self) -> str | None:
        return self.gone


class Recalled(Stub):
    def __init__(self, backend: Recalling) -> None:
        super().__init__()
        self.backend = backend

    def run(self, batch: Batch, blocks: np.ndarray) -> np.ndarray:
        stands = batch.tokens < 0
        tokens = batch.tokens.copy()
        tokens[stands] = np.maximum(self.backend.kept[-1 - tokens[stands]], 0)
        return super().run(Batch(tokens, batch.positions, batch.starts, batch.tables, batch.logits_at), blocks)


LAYOUT = KVLayout(4, 1, 8, "float32", (LayerGroup(None, (0,)),))


def executor(recalls: bool) -> LocalExecutor:
    if not recalls:
        return LocalExecutor(CpuBackend(threads=1), Stub(), LAYOUT, 8)
    backend = Recalling()
    return LocalExecutor(backend, Recalled(backend), LAYOUT, 8, host_slots=2)


def next_row(sequence: int, k: int) -> Row:
    return row(sequence, [stand_in(k)])


def chain(made: LocalExecutor, first: list[int], spoilt: tuple[int, ...] = (), steps: int = 5) -> list[Any]:
    """Results of steps submitted one ahead, each row on the token before; the device loses those of ``spoilt``."""
    backend: Any = made.backend
    found, ticket = [], None
    for step in range(steps):
        backend.spoil = step in spoilt
        rows = [row(s, [t]) if step == 0 else next_row(s, s) for s, t in enumerate(first)]
        following = made.submit(Plan(step, (), tuple(rows)))
        backend.spoil = False
        if ticket is not None:
            found.append(made.collect(ticket).rows)
        ticket = following
    found.append(made.collect(ticket).rows)
    return found


def one_by_one(first: list[int], steps: int = 5) -> list[Any]:
    made, found = executor(False), []
    for step in range(steps):
        results = made.run(Plan(step, (), tuple(row(s, [t]) for s, t in enumerate(first)))).rows
        found.append(results)
        first = [0 if r.error else r.tokens[0] for r in results]
    return found


@pytest.mark.parametrize("recalls", [False, True])
@pytest.mark.parametrize("spoilt, again", [((), []), ((1,), [1, 2]), ((0, 1), [0, 1]), ((2, 4), [2, 3, 4])])
def test_rows_on_tokens_of_the_step_before(
    recalls: bool, spoilt: tuple[int, ...], again: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """The same results, where the backend keeps them and where not.  When they do not arrive, no wrong one stays: the
    step behind is run again as well, but no other."""
    assert chain(executor(recalls), [4, 9, 11], spoilt if recalls else ()) == one_by_one([4, 9, 11])
    failed = [r.args[0] for r in caplog.records if isinstance(r.args, tuple) and "one by one" in r.msg]
    assert failed == (again if recalls else [])


@pytest.mark.parametrize("recalls", [False, True])
@pytest.mark.parametrize("bad", [RAISES, INFINITE])
def test_a_row_that_failed_gives_no_token(recalls: bool, bad: int) -> None:
    """Its neighbours' tokens keep their numbers; the row on its token is for nobody, and computes something valid."""
    assert chain(executor(recalls), [4, bad, 11]) == one_by_one([4, bad, 11])


@pytest.mark.parametrize("how", ["in a step", "when moving", "one by one"])
def test_a_device_that_is_lost_ends_the_engine(how: str) -> None:
    """Not each request with an error of its own, as long as the engine lives."""
    made = executor(True)
    backend, program = (made.backend, made.program)
    assert isinstance(backend, Recalling) and isinstance(program, Recalled)
    plan = Plan(0, (), (row(0, [RAISES]), row(1, [4])))
    assert made.run(plan).rows[0].error == "FloatingPointError: a kernel gave up"
    gone = "the GPU has failed for good"
    runs = program.run

    def run(batch: Batch, blocks: np.ndarray) -> np.ndarray:
        if how == "in a step" and len(batch.tokens) > 1:
            backend.gone = gone
            raise RuntimeError("CUDA error: device-side assert triggered")
        if how == "one by one" and len(batch.tokens) == 1:
            backend.gone = gone
        return runs(batch, blocks)

    program.run = run  # type: ignore[method-assign]
    if how == "when moving":
        backend.gone = gone
        plan = Plan(0, (Move(Place(HOST, 99), Place(0, 0)),), ())
    elif how == "in a step":
        plan = Plan(0, (), (row(0, [5]), row(1, [4])))
    with pytest.raises(EngineError, match=r"^the GPU has failed for good$"):
        made.run(plan)
