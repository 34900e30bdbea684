"""AsyncLLM and the engine's thread, around a scripted engine: streams, cancel, abort, failures, closing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engines import Pieces, Rig
from octavo import AsyncLLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.events import Delta, Finished
from octavo.core.plan import Plan, StepResult
from octavo.core.request import Request
from octavo.engine import service
from octavo.engine.async_session import AsyncSession
from octavo.engine.build import Parts
from octavo.engine.outputs import RequestOutput
from octavo.engine.service import Service
from octavo.errors import EngineError, RequestError
from octavo.paging.audit import audit_idle
from octavo.sim.executors import script

LETTERS = [bytes([c]) for c in b"abcdefghijklmnopqrstuvwxyz ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,;:"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=400)


def saying(answers: dict[tuple[int, ...], list[int]], **settings: Any) -> Rig:
    return Rig(tokenizer=Pieces(LETTERS), vocab=len(LETTERS), choose=script(answers, end=1), **settings)


@contextmanager
def serving(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLM]:
    """An AsyncLLM around the rig's engine; idle and accounted for at the end."""
    parts = Parts(rig.engine, rig.intake, rig.engine.tokenizer, None, None, None, EngineConfig())  # type: ignore[arg-type]
    monkeypatch.setattr(service, "build", lambda model, config, progress: parts)
    with AsyncLLM("scripted") as llm:
        yield llm
    audit_idle(rig.kv)
    assert not [t for t in threading.enumerate() if t.name == "octavo-engine"]


async def settled(llm: AsyncLLM) -> set[int]:
    """Which sequences hold blocks, once all orders given so far are carried out."""
    engine = llm._parts.engine
    held: set[int] = await asyncio.to_thread(llm._service.call, lambda: set(engine.kv.holdings))
    return held


def test_r15_concurrent_streams_hold_their_own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """R15: 32 concurrent streams, each with its own scripted answer; twice on the same engine."""
    answers = {(i, 3, i): [(i + 7 * j) % 60 + 2 for j in range(12)] for i in range(32)}
    rig = saying(answers, pool=40, block_size=4)

    async def read(llm: AsyncLLM, prompt: tuple[int, ...]) -> tuple[list[int], str, list[str | None]]:
        tokens: list[int] = []
        text, reasons = "", []
        async for delta in llm.stream(list(prompt), PARAMS):
            tokens += delta.tokens
            text += delta.text
            reasons.append(delta.finish_reason)
            if delta.tokens[0] % 3 == 0:
                await asyncio.sleep(0)
        return tokens, text, reasons

    async def main(llm: AsyncLLM) -> None:
        for _ in range(2):
            got = await asyncio.gather(*(read(llm, prompt) for prompt in answers))
            for answer, (tokens, text, reasons) in zip(answers.values(), got, strict=True):
                assert tokens == answer and text == b"".join(LETTERS[t] for t in answer).decode()
                assert reasons == [None] * 11 + ["length"]

    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))
        asyncio.run(main(llm))  # another loop, the same engine
        assert llm.stats().counters.finished == 128


def test_generate_grows_to_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = saying({(1,): list(range(2, 14))})

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        params = SamplingParams(n=2, temperature=0.0, max_tokens=5, logprobs=1)
        return [output async for output in llm.generate([1], params, request_id="mine")]

    with serving(rig, monkeypatch) as llm:
        outputs = asyncio.run(main(llm))
    assert [o.finished for o in outputs] == [False] * 10 + [True]
    last, before = outputs[-1], outputs[-2]
    assert last.request_id == "mine" and last.prompt_token_ids == [1] and len(last.outputs) == 2
    assert last.outputs == before.outputs
    for output in last.outputs:
        assert output.token_ids == [2, 3, 4, 5, 6] and output.text == "cdefg" and output.finish_reason == "length"
        assert output.logprobs is not None and [len(entry) for entry in output.logprobs] == [1] * 5
        chosen = [entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs, strict=True)]
        assert output.cumulative_logprob == pytest.approx(sum(chosen)) != 0
    for shorter, longer in zip(outputs, outputs[1:], strict=False):
        for a, b in zip(shorter.outputs, longer.outputs, strict=False):
            assert b.text.startswith(a.text)


@pytest.mark.parametrize("how", ["cancel", "break", "abort"])
def test_leaving_frees_the_blocks_within_a_step(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is cancelled, that stops reading, or whose request is aborted by id; another one goes on."""
    rig = saying({(1,): [5] * 400, (2,): [6] * 400}, pool=250, block_size=4)

    async def read(llm: AsyncLLM, prompt: list[int], started: asyncio.Event, leave: bool) -> list[Delta]:
        got = []
        stream = llm.stream(prompt, LONG, request_id=f"r{prompt[0]}")
        async for delta in stream:
            got.append(delta)
            if len(got) == 3:
                if leave:
                    await stream.aclose()
                started.set()
                if leave:
                    break
        return got

    async def main(llm: AsyncLLM) -> None:
        begun, beside = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(read(llm, [1], begun, how == "break"))
        other = asyncio.create_task(read(llm, [2], beside, False))
        await begun.wait()
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "abort":
            llm.abort("r1")
            llm.abort("nobody")
        resume.set()
        got = None if how == "cancel" else await task
        held = await settled(llm)
        assert 1 not in held, "blocks are held for a reader that has left"
        if how == "abort" and got is not None:
            assert got[-1].finish_reason == "abort" and len(got) < 400
        assert len([t for delta in await other for t in delta.tokens]) == 400
        assert llm.stats().counters.aborted == 1 and llm.stats().counters.finished == 1

    # The engine stops at step 50 until the reader has left, so that the request cannot be over before.
    resume = threading.Event()
    run = rig.executor.run

    def gated(plan: Plan) -> StepResult:
        assert plan.step < 50 or resume.wait(60)
        return run(plan)

    rig.executor.run = gated
    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))


@pytest.mark.parametrize(
    "what, step",
    [("generate", -1), ("generate", 0), ("score", -1), ("score", 0), ("score", 1), ("stream", 2)],
)
def test_a_session_is_free_when_a_call_has_been_left(what: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled before it began anything (-1) or in some step of it: nothing runs on, nothing changed."""
    rig = saying({(1, 2, 3): [5] * 400, (9,): [6] * 400}, pool=250, block_size=4)
    entered, resume, run = threading.Event(), threading.Event(), rig.executor.run

    def gated(plan: Plan) -> StepResult:
        if plan.step == max(step, 0):
            entered.set()
            assert resume.wait(60)
        return run(plan)

    async def call(session: AsyncSession) -> None:
        if what == "score":
            await session.score([[7], [8, 9]])
        elif what == "generate":
            await session.generate(LONG)
        else:
            async for _ in session.stream(LONG):
                pass

    async def main(llm: AsyncLLM) -> None:
        session = await llm.session([1, 2, 3])
        other = llm.stream([9], LONG)
        if step < 0:  # keeps the engine in a step, so that the call has to wait
            begun = asyncio.create_task(anext(other))
            await asyncio.to_thread(entered.wait)
        task = asyncio.create_task(call(session))
        while step < 0 and not llm._service._orders:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(entered.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        resume.set()
        if step < 0:
            await begun
        await other.aclose()
        assert await session.append([4]) == 1 and session.token_ids == [1, 2, 3, 4]
        for _ in range(3):
            length = len(session)
            await session.generate(SamplingParams(temperature=0.0, max_tokens=2))
            assert len(session) == length + 2, "the answer was not there when the call returned"
        assert [len(s.logprobs) for s in await session.score([[7], [8, 9]])] == [1, 2]
        await session.close()
        assert not await settled(llm) and not rig.engine.requests

    rig.executor.run = gated
    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))


def test_a_failing_row_ends_only_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = saying({(1,): [5] * 12, (2,): [6] * 12}, fail=lambda row: "it broke" if row.tokens[-1] == 5 else None)

    async def text(llm: AsyncLLM, prompt: list[int]) -> str:
        return "".join([delta.text async for delta in llm.stream(prompt, PARAMS)])

    async def main(llm: AsyncLLM) -> None:
        broken, good = await asyncio.gather(text(llm, [1]), text(llm, [2]), return_exceptions=True)
        assert isinstance(broken, EngineError) and "it broke" in str(broken)
        assert good == "g" * 12
        assert await text(llm, [2]) == "g" * 12

    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))
        assert llm.stats().counters.failed == 1


def test_a_failing_step_loop_ends_everybody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Every stream gets an error, later requests are refused, nobody waits for ever."""
    rig = saying({(i,): [5] * 400 for i in range(8)}, pool=800, block_size=4)
    run, steps = rig.executor.run, []

    def breaks(plan: Plan) -> StepResult:
        steps.append(plan)
        if len(steps) == 20:
            raise MemoryError("out of memory")
        return run(plan)

    rig.executor.run = breaks

    async def read(llm: AsyncLLM, i: int) -> int:
        count = 0
        async for _ in llm.stream([i], LONG):
            count += 1
        return count

    async def main(llm: AsyncLLM) -> None:
        results = await asyncio.wait_for(asyncio.gather(*(read(llm, i) for i in range(8)), return_exceptions=True), 30)
        assert all(isinstance(r, EngineError) and "out of memory" in str(r) for r in results), results
        with pytest.raises(EngineError, match="the engine failed: out of memory"):
            await read(llm, 1)

    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))
        with pytest.raises(EngineError, match="out of memory"):
            llm._service.call(lambda: None)


def test_a_request_that_the_engine_fails_to_add_hears_of_it(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    served = Service(rig.engine)
    heard: list[Any] = []
    request = rig.intake.request([1, 2], PARAMS, sink=heard.append)
    broken = rig.engine.rest(request.prompt[:], b"", "")
    rig.engine.scheduler.waiting.clear()  # a session's sequence that cannot be taken back

    def add() -> None:
        rig.engine.orphans.append(broken)
        rig.engine.add(request)

    served.order(add)
    served._thread.join()
    assert heard == [Finished(request.id, f"the engine failed: {served.error}")]


def test_a_sink_that_fails_with_the_loop() -> None:
    """When even ending a request fails, its reader still gets one final event."""
    rig = Rig()
    heard: list[Any] = []
    request = rig.intake.request([1, 2], PARAMS, sink=heard.append)
    rig.executor.run = lambda plan: (_ for _ in ()).throw(ValueError("broken"))
    rig.engine.scheduler.remove = lambda sequence: (_ for _ in ()).throw(RuntimeError("worse"))  # type: ignore[method-assign]
    served = Service(rig.engine)
    served.submit(request)
    served._thread.join(10)
    assert [type(e).__name__ for e in heard] == ["Finished"] and "broken" in heard[0].error
    with pytest.raises(EngineError):
        served.submit(request)
    served.close()


def test_closing_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = saying({(1,): [5] * 400}, pool=250, block_size=4)

    async def main(llm: AsyncLLM) -> None:
        reasons = []
        async for delta in llm.stream([1], LONG):
            reasons.append(delta.finish_reason)
            if len(reasons) == 2:
                await asyncio.to_thread(llm.close)
        assert reasons[-1] == "abort" or len(reasons) == 400
        with pytest.raises(EngineError, match="closed"):
            async for _ in llm.stream([1], LONG):
                pass

    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))


def test_bad_requests_raise_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = saying({})

    async def main(llm: AsyncLLM) -> None:
        for prompt in ([], [999], [1] * 600):
            with pytest.raises(RequestError):
                async for _ in llm.stream(prompt, PARAMS):
                    pass
        assert not await settled(llm)

    with serving(rig, monkeypatch) as llm:
        asyncio.run(main(llm))
        assert llm.stats().counters.steps == 0


def test_orders_keep_their_order_and_return_results() -> None:
    rig = Rig()
    served = Service(rig.engine)
    done: list[int] = []
    threads = [threading.Thread(target=served.call, args=(lambda i=i: done.append(i),)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == list(range(20))
    assert served.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        served.call(lambda: 1 // 0)
    heard: list[Any] = []
    requests: list[Request] = [rig.intake.request([1, i], PARAMS, sink=heard.append) for i in range(5)]
    for request in requests:
        served.submit(request)
    while not all(r.finished for r in requests):
        served.call(lambda: None)
    served.close()
    served.close()
    assert sum(type(e).__name__ == "Finished" for e in heard) == 5
