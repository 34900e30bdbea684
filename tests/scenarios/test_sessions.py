"""Sessions: what is shared, what comes back after memory ran short, what closing and dropping give back, bad calls."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

import tiny
from conftest import TinyModels
from engines import Rig, ids
from octavo import LLM, AsyncLLM, SamplingParams
from octavo.core.request import Request
from octavo.engine.session import Session, SessionState
from octavo.errors import EngineError, OctavoError, RequestError
from octavo.paging.audit import audit, audit_idle

FAMILIES = ["llama", "gemma3", "mistral"]


def params(most: int = 8, **given: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": most, "ignore_eos": True, "logprobs": 0, **given})


def opened(path: Path, **given: Any) -> LLM:
    settings = {"kv_blocks": 300, "block_size": 4, "kv_dtype": "float32", "audit": True, "threads": 1, **given}
    return LLM(str(path), **settings)


class Alone:
    """Answers to texts on an engine of their own, with caching off."""

    def __init__(self, path: Path) -> None:
        self.llm = opened(path, prefix_cache=False, audit=False)

    def answer(self, text: list[int], most: int = 8) -> tuple[list[int], float | None]:
        return told(self.llm.generate(list(text), params(most))[0])

    def scores(self, text: list[int], more: list[int]) -> list[float]:
        out = self.llm.generate(text + more, SamplingParams(max_tokens=0, prompt_logprobs=0))[0]
        assert out.prompt_logprobs is not None
        entries = out.prompt_logprobs[len(text) :]
        return [entry[token].logprob for entry, token in zip(entries, more, strict=True) if entry is not None]


def told(output: Any) -> tuple[list[int], float | None]:
    return output.outputs[0].token_ids, output.outputs[0].cumulative_logprob


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tiny_models: TinyModels) -> tuple[Path, Alone]:
    path = tiny_models.folder(request.param)
    return path, Alone(path)


SETTINGS = [
    {},
    {"kv_blocks": 14, "swap_memory": 0, "preempt": "recompute"},
    {"kv_blocks": 14, "swap_memory": "16MiB", "preempt": "swap"},
    {"kv_blocks": 14, "swap_memory": 9000, "preempt": "swap"},
    {"kv_blocks": 300, "prefix_cache": False},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_session_is_its_text(settings: dict[str, Any], pair: tuple[Path, Alone]) -> None:
    """Append, continue, fork, rewind, score: always what the text alone would give, in pools of any size."""
    path, alone = pair
    rng = random.Random(str(settings))
    given = dict(settings)
    if "gemma3" in path.name and given.get("kv_blocks") == 14:
        given["kv_blocks"] = 100
    with opened(path, **given) as llm:
        sessions = [llm.session(tiny.prompt(17, 1))]
        for _ in range(25):
            session = rng.choice(sessions)
            text, what = session.token_ids, rng.random()
            if what < 0.4 and 0 < len(text) < 36:
                assert told(session.generate(params(5))) == alone.answer(text, 5)
                assert len(session) == len(text) + 5
            elif what < 0.6 and len(text) < 36:
                more = tiny.prompt(rng.randint(1, 6), 7 * rng.randrange(9))
                assert session.append(more) == len(more) and session.token_ids == text + more
            elif what < 0.7 and len(sessions) < 4:
                sessions += session.fork()
                assert sessions[-1].token_ids == text
            elif what < 0.85:
                to = rng.randint(1, len(text))
                session.rewind(to)
                assert session.token_ids == text[:to]
            elif len(text) < 36:
                texts = [tiny.prompt(n, n) for n in (1, 3)]
                for found, more in zip(session.score(texts), texts, strict=True):
                    assert found.token_ids == more and found.logprobs == alone.scores(text, more)
                    assert found.total == sum(found.logprobs)
                assert session.token_ids == text
            audit(llm.parts.engine.kv)
        for session in sessions:
            session.close()
        audit_idle(llm.parts.engine.kv)


@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_idle_sessions_lose_their_blocks_first(preempt: str, tiny_models: TinyModels) -> None:
    """Requests take the memory of an idle session; when it is used again it goes on where it was."""
    path = tiny_models.folder("llama")
    alone = Alone(path)
    with opened(path, kv_blocks=20, preempt=preempt, swap_memory="16MiB") as llm:
        engine = llm.parts.engine
        session = llm.session(tiny.prompt(30, 1))
        session.generate(params(4))
        text = session.token_ids
        prompts = [tiny.prompt(25, 100 * i) for i in range(4)]
        outs = llm.generate(prompts, params(10))
        assert [told(o) for o in outs] == [alone.answer(p, 10) for p in prompts]
        assert engine.scheduler.preemptions > 0 and all(o.preemptions <= 2 for o in outs)
        assert session._state.sequence.number not in engine.kv.holdings
        assert told(session.generate(params(6))) == alone.answer(text, 6)
        session.close()
        audit_idle(engine.kv)


def test_forks_are_free_until_written(tiny_models: TinyModels) -> None:
    with opened(tiny_models.folder("llama"), kv_blocks=100) as llm:
        session = llm.session(tiny.prompt(38, 1))
        session.generate(params(4))
        before = llm.stats()
        forks = session.fork(10)
        after = llm.stats()
        assert after.blocks_used == before.blocks_used and after.blocks_shared == after.blocks_used
        assert after.counters.copies == before.counters.copies
        forks[0].generate(params(1))
        assert llm.stats().blocks_used <= before.blocks_used + 1
        del forks
        session.close()
        gc.collect()
        llm.parts.engine.reap()
        audit_idle(llm.parts.engine.kv)


def test_closing_and_dropping_give_all_back(tiny_models: TinyModels) -> None:
    with opened(tiny_models.folder("llama"), swap_memory="1MiB", preempt="swap") as llm:
        engine = llm.parts.engine
        for end in ("close", "twice", "drop", "with", "swapped", "mid-score"):
            session = llm.session(tiny.prompt(21, 3))
            session.generate(params(3))
            forks = session.fork(2)
            if end == "swapped":
                for sequence in list(engine.scheduler.running):
                    engine.scheduler.preempt(sequence)
            if end == "with":
                with session, forks[0], forks[1]:
                    pass
            if end in ("close", "twice", "swapped"):
                for one in (session, *forks):
                    one.close()
                    if end == "twice":
                        one.close()
            if end == "mid-score":
                with pytest.raises(RequestError):
                    session.score([[1], [10**9]])
                assert not engine.requests, "a text was to be scored though another one was refused"
                session.append([1])
                assert len(session.score([1, 2])) == 1
            del session, forks
            gc.collect()
            engine.reap()
            assert not engine.scheduler.running and not engine.scheduler.waiting, end
            audit_idle(engine.kv)


def test_bad_calls(tiny_models: TinyModels) -> None:
    with opened(tiny_models.folder("llama"), kv_blocks=20) as llm:
        session = llm.session(tiny.prompt(9, 1))
        for to in (-1, 10, 2.0, True, None, "3"):
            with pytest.raises(RequestError, match=r"to must be in \[0, 9\]"):
                session.rewind(to)  # type: ignore[arg-type]
        for n in (0, -1, 10_001, 1.0, True, "2"):
            with pytest.raises(RequestError, match="n must be an integer"):
                session.fork(n)  # type: ignore[arg-type]
        for text in ("", [10**9], [-1], [1.5], b"x", None, 7):
            with pytest.raises(RequestError):
                session.append(text)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="exceed the 80 tokens that a session can have"):
            session.append([1] * 72)
        with pytest.raises(RequestError, match="fork it for more"):
            session.generate(params(n=2))
        with pytest.raises(RequestError, match="exceed"):
            session.generate(params(100))
        with pytest.raises(RequestError, match="texts is empty"):
            session.score([])
        for texts in (None, 7, True, {"a": 1}):
            with pytest.raises(RequestError, match="texts must be text"):
                session.score(texts)  # type: ignore[arg-type]
        assert len(session) == 9, "a refused call changes nothing"
        session.rewind(0)
        with pytest.raises(RequestError, match="prompt is empty"):
            session.generate(params())
        with pytest.raises(RequestError, match="empty session"):
            session.score([[1]])
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.session("")
        session.close()
        for call in (
            lambda: session.fork(),
            lambda: session.append([1]),
            lambda: session.generate(params()),
            lambda: session.rewind(0),
            lambda: session.score([[1]]),
        ):
            with pytest.raises(RequestError, match="session is closed"):
                call()
        audit_idle(llm.parts.engine.kv)
        assert llm.generate([[1, 2]], params(2))[0].finished


def test_a_failed_score_is_an_error() -> None:
    """Not a short list of what had been scored before; the session is as it was."""
    broken = [True]
    rig = Rig(budget=2, fail=lambda row: "it broke" if broken and len(row.tokens) + row.start > 12 else None)

    def run(requests: list[Request]) -> None:
        while not all(r.finished for r in requests):
            rig.step()

    session = Session(SessionState(rig.engine, rig.intake, array("i", ids(10)), b"", ""), run, threading.Lock())
    with pytest.raises(EngineError, match="it broke"):
        session.score([[1], [2, 3, 4, 5]])
    broken.clear()
    assert len(session) == 10 and len(session.score([2, 3, 4, 5])[0].logprobs) == 4
    session.close()
    audit_idle(rig.kv)


def test_salted_sessions_share_nothing(tiny_models: TinyModels) -> None:
    with opened(tiny_models.folder("llama")) as llm:
        for salt, cached in ((None, 0), ("a", 0), ("b", 0), ("a", 36), (None, 36)):
            with llm.session(tiny.prompt(40, 1), cache_salt=salt) as session:
                assert session.generate(params(2)).num_cached_tokens == cached, salt


# ---- the same for asyncio -------------------------------------------------------------------------------------------


def test_async_sessions(tiny_models: TinyModels) -> None:
    """Concurrent forks, a second call while one runs, a cancelled stream, scores; all as their texts alone."""
    path = tiny_models.folder("llama")
    alone = Alone(path)

    async def play() -> None:
        with AsyncLLM(str(path), kv_blocks=40, block_size=4, kv_dtype="float32", audit=True, threads=1) as llm:
            session = await llm.session(tiny.prompt(20, 1))
            assert told(await session.generate(params(5))) == alone.answer(tiny.prompt(20, 1), 5)
            forks = await session.fork(3)
            for i, fork in enumerate(forks):
                await fork.append(tiny.prompt(3, 50 * i))
            texts = [fork.token_ids for fork in forks]
            outs = await asyncio.gather(*(fork.generate(params(6)) for fork in forks))
            assert [told(o) for o in outs] == [alone.answer(t, 6) for t in texts]
            both = await asyncio.gather(session.generate(params(9)), session.append([1]), return_exceptions=True)
            errors = [e for e in both if isinstance(e, BaseException)]
            assert len(errors) <= 1 and all("running another call" in str(e) for e in errors)
            length = len(forks[0])
            stream = forks[0].stream(params(60))
            async for _ in stream:
                break
            await stream.aclose()
            for _ in range(200):
                if not forks[0]._state.busy:
                    break
                await asyncio.sleep(0.01)
            text = forks[0].token_ids
            assert len(text) == length, "a stream that was left is taken back"
            late = forks[0].stream(params(3))
            await anext(late)
            while llm.parts.engine.busy:
                await asyncio.sleep(0.01)
            await late.aclose()
            await forks[0].append([1])
            assert forks[0].token_ids == [*text, 1], "also when the answer was whole by then, but its end not heard"
            await forks[0].rewind(length)
            assert told(await forks[0].generate(params(4))) == alone.answer(text, 4)
            found = await forks[1].score([[1, 2], [5]])
            assert [s.logprobs for s in found] == [alone.scores(forks[1].token_ids, t) for t in ([1, 2], [5])]
            with pytest.raises(RequestError, match="n must be"):
                await session.fork(0)
            await session.close()
            with pytest.raises(OctavoError, match="closed"):
                await session.fork()
            for fork in forks:
                await fork.close()
            stats = llm.stats()
            assert (stats.blocks_used, stats.running, stats.waiting) == (0, 0, 0)

    asyncio.run(play())
