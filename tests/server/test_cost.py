"""What a streamed token costs the event loop, counted in calls: the loop's time is taken from the kernels."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.engine import mailbox
from serving import scripted, served

CALLS = 40  # Python's functions that a token may call in the loop, of ours, Starlette's and uvicorn's: it is about 25


def test_a_streamed_token_is_a_few_calls_and_a_step_one_waking(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, tokens = 16, 120
    body = {"prompt": "<long>", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    calls = 0
    batches: list[int] = []
    deliver = mailbox._deliver

    def hear(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    def delivered(batch: list[Any]) -> None:
        batches.append(len(batch))
        deliver(batch)

    with scripted({"long": "x" * 4000}, monkeypatch, audited=False) as (llm, _, steps), served(llm) as server:
        server.post("/v1/completions", {**body, "max_tokens": 1})  # makes the mailbox
        (loop,) = llm.service._mailboxes
        monkeypatch.setattr(mailbox, "_deliver", delivered)
        steps.delay = 0.004  # so that each step is one for the readers, too
        loop.call_soon_threadsafe(sys.setprofile, hear)
        before = steps.done
        with ThreadPoolExecutor(streams) as pool:
            answers = list(pool.map(lambda _: server.post("/v1/completions", body).text, range(streams)))
        ended = threading.Event()
        loop.call_soon_threadsafe(lambda: (sys.setprofile(None), ended.set()))
        assert ended.wait(10)
        for answer in answers:  # where the machine is busy, a piece may be of several steps
            said = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
            assert "".join(choice["text"] for chunk in said for choice in chunk["choices"]) == "x" * tokens
        # Beginning and end of a request are in it as well; they are a few hundred calls each.
        assert calls / (streams * tokens) < CALLS
        assert len(batches) <= steps.done - before + streams + 1
        assert max(batches) >= streams // 2
