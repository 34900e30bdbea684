"""Overload and life: who is let in, who leaves, what happens when the engine dies, gets stuck or is told to stop."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from octavo.core.plan import Plan, StepResult
from octavo.server.settings import ServerSettings
from serving import Served, scripted, served, until, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LONG = {"long": "x" * 3000, "short": "yes"}


def settings(**given: Any) -> ServerSettings:
    return ServerSettings(**{"port": 0, "access_log": "off", **given})


def connect(server: Served, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """A request sent by hand, so that its connection can be dropped."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_r14_a_client_that_leaves_frees_its_blocks(when: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R14: within two steps the request is gone, its blocks are back, and the next one runs."""
    with scripted(LONG, monkeypatch, budget=32) as (llm, rig, steps), served(llm) as server:
        steps.hold()
        text = "z" * 1500 if when == "prefill" else "long"
        connection = connect(server, {"messages": user(text), "stream": stream})
        before = 5 if when == "prefill" else 30
        until(lambda: llm.parts.engine.requests)
        steps.allow(before)
        until(lambda: steps.done == before)
        assert rig.kv.pool.free < rig.kv.pool.size
        generation = next(iter(server.state.generations))
        connection.close()
        until(lambda: generation._error is not None)
        steps.allow(2)
        until(lambda: not rig.kv.holdings and not server.state.admission.sequences)
        assert steps.done <= before + 2 and llm.stats().counters.aborted == 1
        assert server.metric("octavo:num_requests_running") == server.metric("octavo:queue_tokens") == 0
        steps.free.set()
        assert server.ask(CHAT, messages=user("short"))["choices"][0]["message"]["content"] == "yes"


def test_r70_what_goes_beyond_the_queue_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """R70: 2 running + 3 waiting, 50 at once: 45 are told to come back, quickly; the others finish."""
    caplog.set_level(logging.INFO, "octavo.access")
    limits = settings(max_waiting=3, access_log="json")
    with scripted(LONG, monkeypatch, max_running=2) as (llm, _, steps), served(llm, limits) as server:
        steps.hold()
        with ThreadPoolExecutor(50) as pool:

            def ask() -> tuple[httpx.Response, float]:
                began = time.monotonic()
                return server.post(CHAT, {"messages": user("short")}), time.monotonic() - began

            asked: list[Future[Any]] = [pool.submit(ask) for _ in range(50)]
            until(lambda: sum(f.done() for f in asked) == 45)
            began = time.monotonic()
            assert server.http.get("/health").status_code == 200
            assert server.metric("octavo:queue_sequences") == 5
            assert time.monotonic() - began < 1
            steps.free.set()
            answers = [f.result() for f in asked]
        refused = [(a, seconds) for a, seconds in answers if a.status_code == 429]
        assert len(refused) == 45 and sorted(s for _, s in refused)[22] < 1  # 50 threads start on a busy machine
        lines = [json.loads(r.message) for r in caplog.records if r.name == "octavo.access"]
        told = sorted(line["seconds"] for line in lines if line["status"] == 429)
        assert len(told) == 45 and told[-1] < 0.1, "the server's own time for a refusal"
        for answer, _ in refused:
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert [a.json()["choices"][0]["message"]["content"] for a, _ in answers if a.status_code == 200] == ["yes"] * 5
        assert server.metric("octavo:requests_refused_total") == 45
        # n counts: 4 + 2 sequences do not fit, 4 + 1 do, and a single large request does when nobody is there
        steps.hold()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.post, CHAT, {"messages": user("short"), "n": 4})
            until(lambda: server.state.admission.sequences == 4)
            assert server.error(CHAT, {"messages": user("short"), "n": 2}, 429)["code"] == "overloaded"
            second = pool.submit(server.post, CHAT, {"messages": user("short")})
            until(lambda: server.state.admission.sequences == 5)
            steps.free.set()
            assert first.result().status_code == second.result().status_code == 200
        server.settled()
        assert len(server.ask(CHAT, messages=user("short"), n=9)["choices"]) == 9


def test_waiting_prompt_tokens_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = settings(max_waiting_tokens=100)
    with scripted(LONG, monkeypatch) as (llm, _, steps), served(llm, limits) as server:
        steps.hold()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.post, TEXT, {"prompt": "x" * 300})
            until(lambda: server.state.admission.tokens == 300)
            server.error(TEXT, {"prompt": "x"}, 429)
            steps.free.set()
            assert first.result().status_code == 200
        assert server.post(TEXT, {"prompt": "x"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_limit_ends_a_request(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(LONG, monkeypatch) as (llm, rig, steps), served(llm) as server:
        steps.delay = 0.01
        answer = server.post(CHAT, {"messages": user("long"), "timeout": 0.2, "stream": stream})
        if stream:
            lines = [line for line in answer.text.split("\n\n") if line]
            error = json.loads(lines[-2].removeprefix("data: "))["error"]
            assert lines[-1] == "data: [DONE]" and len(lines) > 4
        else:
            assert answer.status_code == 504 and answer.headers["x-should-retry"] == "false"
            error = answer.json()["error"]
        assert error["code"] == "request_timeout" and "0.2 s" in error["message"]
        until(lambda: not rig.kv.holdings)
    assert "timeout" == _field({"timeout": -1}, monkeypatch)


def _field(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    with scripted(LONG, monkeypatch) as (llm, _, _), served(llm) as server:
        return server.error(CHAT, {"messages": user("long"), **body})["param"]


def test_r50_a_dead_engine_fails_who_waits_and_turns_health_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """R50: the step loop raises: the waiting get an error, streamed or not, later ones too; health is not 200."""
    with scripted(LONG, monkeypatch) as (llm, rig, steps), served(llm) as server:
        assert server.http.get("/health").json()["status"] == "ok"
        run = rig.executor.run

        def breaks(plan: Plan) -> StepResult:
            if steps.done == 20:
                raise MemoryError("out of memory")
            result: StepResult = run(plan)
            return result

        rig.executor.run = breaks
        with ThreadPoolExecutor(2) as pool:
            plain = pool.submit(server.post, CHAT, {"messages": user("long")})
            streamed = pool.submit(server.post, CHAT, {"messages": user("long"), "stream": True})
            assert plain.result(10).status_code == 500 and "out of memory" in plain.result().text
            assert '"error"' in streamed.result(10).text
        until(lambda: server.http.get("/health").status_code == 503, 2)
        assert "out of memory" in server.http.get("/health").json()["status"]
        assert server.post(CHAT, {"messages": user("short")}).status_code == 500
        assert server.http.get("/metrics").status_code == 200


def test_r50_a_stuck_engine_turns_health_red_and_a_slow_prefill_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = settings(stall_limit=0.6)
    with scripted(LONG, monkeypatch, budget=16) as (llm, _, steps), served(llm, limits) as server:
        steps.delay = 0.05  # 20 steps of a prompt, longer than the limit in all
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(server.post, TEXT, {"prompt": "x" * 320, "max_tokens": 1})
            while not slow.done():
                assert server.http.get("/health").status_code == 200
                time.sleep(0.05)
            assert slow.result().status_code == 200
            time.sleep(0.7)  # without work there is no progress, and nothing is wrong
            assert server.http.get("/health").status_code == 200
            steps.hold()
            stuck = pool.submit(server.post, TEXT, {"prompt": "x"})
            until(lambda: server.http.get("/health").status_code == 503, 5)
            assert "stuck" in server.http.get("/health").json()["status"]
            steps.free.set()
            assert stuck.result().status_code == 200
        assert server.http.get("/health").status_code == 200


def test_a_slow_reader_holds_up_nobody_and_gets_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops reading; the engine ends its request all the same, others go on, and what it reads later is whole."""
    body = {"messages": user("long"), "stream": True, "n": 20, "max_tokens": 1500, "ignore_eos": True}
    with scripted({}, monkeypatch, pool=4000, blind=True, audited=False) as (llm, _, _), served(llm) as server:
        connection = connect(server, body)
        connection.settimeout(30)
        start = connection.recv(100)
        until(lambda: llm.stats().counters.finished == 1, 60)
        until(lambda: not server.state.admission.sequences)
        assert server.ask(CHAT, messages=user("short"), max_tokens=9)["usage"]["completion_tokens"] == 9
        data = bytearray(start)
        while b"data: [DONE]" not in data:
            data += connection.recv(1 << 20)
        connection.close()
        contents = 0
        for line in bytes(data).split(b"data: ")[1:-1]:
            chunk = json.loads(line[: line.rindex(b"}") + 1])
            contents += sum(len(c["delta"].get("content", "")) for c in chunk["choices"])
        assert contents == 20 * 1500


def test_draining_ends_what_runs_and_refuses_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(LONG, monkeypatch) as (llm, _, steps), served(llm) as server:
        steps.hold()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, CHAT, {"messages": user("short")})
            until(lambda: server.state.generations)
            server.state.drain()
            assert server.error(CHAT, {"messages": user("short")}, 503)["code"] == "shutting_down"
            assert server.http.get("/health").status_code == 503
            steps.free.set()
            assert running.result().json()["choices"][0]["message"]["content"] == "yes"


def test_stopping_at_once_ends_what_runs_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(LONG, monkeypatch) as (llm, _, steps), served(llm) as server:
        steps.delay = 0.01
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, CHAT, {"messages": user("long")})
            until(lambda: steps.done > 5)
            server.http.portal = None  # type: ignore[attr-defined]
            loop_done = threading.Event()
            for generation in list(server.state.generations):
                generation._watch.get_loop().call_soon_threadsafe(lambda: (server.state.stop(), loop_done.set()))  # type: ignore[union-attr]
            assert loop_done.wait(5)
            assert running.result().status_code == 503


def test_r72_a_share_for_each_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """R72: A's many requests wait for B's one under the policy fair; users are told by key, or by the user field."""
    keys = {"key-of-alice": "alice", "key-of-bob": "bob"}
    for given in ({}, keys):
        with scripted(LONG, monkeypatch, policy="fair", max_running=2, budget=64) as (llm, _, steps):
            with served(llm, settings(), given) as server:
                steps.hold()

                def ask(name: str, question: str) -> float:
                    headers = {"Authorization": f"Bearer key-of-{name}"}
                    body = {"messages": user(question), "user": name, "max_tokens": 200}
                    answer = server.post(CHAT, body, headers=headers)
                    assert answer.status_code == 200
                    return time.monotonic()

                with ThreadPoolExecutor(20) as pool:
                    heavy = [pool.submit(ask, "alice", "long") for _ in range(16)]
                    until(lambda: server.state.admission.sequences == 16)
                    light = pool.submit(ask, "bob", "short")
                    until(lambda: server.state.admission.sequences == 17)
                    steps.free.set()
                    ended = [f.result() for f in heavy]
                    assert sum(end < light.result() for end in ended) <= 4
                metrics = server.http.get("/metrics", headers={"Authorization": "Bearer key-of-bob"}).text
                assert 'octavo:fair_share{user="alice"}' in metrics and 'user="bob"' in metrics
