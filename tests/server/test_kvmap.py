"""The live map's routes: what they tell, and to whom."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from frames import unfold
from octavo.server.settings import ServerSettings
from serving import Served, Steps, scripted, served, until, user

ANSWERS = {"sea": "The sea is wide and deep, and salt. " * 8}
KEYS = {"a-key-of-eight": "ann"}
KEYED = {"Authorization": "Bearer a-key-of-eight"}


def slowed(steps: Steps, seconds: float) -> None:
    """Each step takes a while, as with a model."""
    run = steps._run

    def slow(plan: Any) -> Any:
        time.sleep(seconds)
        return run(plan)

    steps._run = slow


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with scripted(ANSWERS, monkeypatch, swap=8) as (llm, _, steps), served(llm) as running:
        slowed(steps, 0.004)
        yield running


class Asking:
    """A request with four answers that runs meanwhile."""

    def __init__(self, server: Served, **given: Any) -> None:
        talk = [{"role": "system", "content": "x" * 90}, *user("sea")]
        body = {"messages": talk, "n": 4, "max_tokens": 280, **given}
        self.thread = threading.Thread(target=lambda: server.post("/v1/chat/completions", body, headers=KEYED))

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.thread.join()


def test_v1_kv_is_the_pool(server: Served) -> None:
    with Asking(server):
        until(lambda: len(server.http.get("/v1/kv").json()["sequences"]) == 4)
        shown = server.http.get("/v1/kv").json()
    counts, content = shown["device"]["counts"], shown["device"]["content"]
    blocks = shown["blocks"]
    assert blocks["total"] == len(counts) == len(content) == 400 and len(shown["host"]) == 8
    assert blocks["live"] == sum(c > 0 for c in counts) and blocks["shared"] == sum(c > 1 for c in counts) > 0
    assert blocks["live"] + blocks["cached"] + blocks["free"] == 400
    tables = [s["tables"][0] for s in shown["sequences"]]
    assert [s["branch"] for s in shown["sequences"]] == [0, 1, 2, 3]
    for block, count in enumerate(counts):
        assert count == sum(table.count(block) for table in tables)
    assert tables[0][:4] == tables[3][:4], "the prompt's blocks are shared"
    assert shown["figures"]["running"] == 4
    assert len({s["id"] for s in shown["sequences"]}) == 1


def test_history_and_stream_tell_the_same_frames(server: Served) -> None:
    with Asking(server):
        until(lambda: server.http.get("/v1/kv").json()["sequences"])
    server.settled()
    now = server.http.get("/v1/kv").json()
    slots = 400 + 8
    past = unfold(server.http.get("/v1/kv/history").content, slots)
    assert past[0].key and past[-1].serial == now["serial"]
    assert max(len(frame.sequences) for frame in past) == 4
    assert any(max(frame.states[:400]) & 127 == 4 for frame in past)
    last = past[-1].states
    counts, content = now["device"]["counts"], now["device"]["content"]
    assert list(last[:400]) == [min(c, 127) | 128 * n for c, n in zip(counts, content, strict=True)]

    data = b""
    with server.http.stream("GET", "/v1/kv/stream", params={"after": past[-3].serial}) as stream:
        for chunk in stream.iter_raw():
            data += chunk
            break
    shown = unfold(server.http.get("/v1/kv/history").content, slots)
    assert data == b"".join(f.data for f in server.state.recorder.since(past[-3].serial)), (
        "the frames after the third last"
    )
    assert [f.serial for f in shown[-2:]] == [past[-2].serial, past[-1].serial]


def test_history_alone_asks_little_of_the_engine(server: Served) -> None:
    """While nobody looks: four snapshots a second, however many steps there are, and no other order between them."""
    orders, taken = 0, 0
    service, recorder = server.llm.service, server.state.recorder
    assert recorder is not None
    order, take = service.order, recorder.take

    def counted(work: Any) -> None:
        nonlocal orders
        orders += 1
        order(work)

    def counted_take() -> Any:
        nonlocal taken
        taken += 1
        return take()

    service.order, recorder.take = counted, counted_take  # type: ignore[method-assign]
    steps, began = server.llm.stats().counters.steps, time.monotonic()
    with Asking(server):
        pass
    server.settled()
    seconds, steps = time.monotonic() - began, server.llm.stats().counters.steps - steps
    assert steps > 250 and 1 <= taken <= 4 * seconds + 2
    assert orders == taken + 1  # the request itself


def test_a_stream_ends_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(ANSWERS, monkeypatch) as (llm, _, _):
        with served(llm) as running:
            stream = running.http.send(running.http.build_request("GET", "/v1/kv/stream"), stream=True)
            began = time.monotonic()
        stream.close()
    assert time.monotonic() - began < 15, "an open map held the server up"


def test_who_holds_a_block_and_its_text(server: Served) -> None:
    with Asking(server):
        until(lambda: len(server.http.get("/v1/kv").json()["sequences"]) == 4)
        shown = server.http.get("/v1/kv").json()
        first = shown["sequences"][0]
        block = first["tables"][0][1]
        told = server.http.get(f"/v1/kv/blocks/{block}").json()
        text = server.http.get(f"/v1/kv/sequences/{first['number']}").json()
    assert shown["texts"] is True
    assert [h["sequence"] for h in told["holders"]] == [s["number"] for s in shown["sequences"]]
    assert {(h["group"], h["place"], h["first_token"]) for h in told["holders"]} == {(0, 1, 16)}
    assert told["text"] == "x" * 16
    assert text["blocks"][0] + text["blocks"][1] == "system:" + "x" * 25
    server.settled()
    assert server.http.get(f"/v1/kv/blocks/{block}").json()["text"] == "x" * 16, "it is cached"
    ended = server.http.get(f"/v1/kv/sequences/{first['number']}").json()
    assert ended["tokens"] == 0 and ended["blocks"] is None
    for path in ("/v1/kv/blocks/400", "/v1/kv/blocks/-1", "/v1/kv/sequences/999", "/map/nothing.js"):
        answer = server.http.get(path)
        assert answer.status_code == 404 and answer.json()["error"]["message"], path


def test_characters_are_not_torn_between_blocks() -> None:
    from octavo.server.kvmap import cut

    text = "a\u00e9\u4f60\U0001f642z" * 5
    tokens = list(text.encode())
    parts = cut(tokens, 4, lambda i: bytes([i]))
    assert "".join(parts) == text and len(parts) == -(-len(tokens) // 4)


def texts(running: Served, **headers: str) -> bool:
    with Asking(running, n=1, max_tokens=100):
        until(lambda: running.http.get("/v1/kv", headers=headers).json()["sequences"])
        shown = running.http.get("/v1/kv", headers=headers).json()
        number = shown["sequences"][0]["number"]
        block = shown["sequences"][0]["tables"][0][0]
        told = running.http.get(f"/v1/kv/blocks/{block}", headers=headers).json()["text"]
        whole = running.http.get(f"/v1/kv/sequences/{number}", headers=headers).json()["blocks"]
    running.settled()
    assert (told is not None) == (whole is not None) == shown["texts"]
    assert shown["texts"] or "x" * 16 not in json.dumps(shown)
    return bool(shown["texts"])


def test_texts_are_told_here_or_with_a_key_and_only_if_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(mode: str | None) -> ServerSettings:
        return ServerSettings(port=0, access_log="off", map=mode)

    with scripted(ANSWERS, monkeypatch) as (llm, _, steps):
        slowed(steps, 0.004)
        for mode in (None, "text"):
            with served(llm, settings(mode)) as running:
                assert texts(running)
                assert not texts(running, **{"X-Forwarded-For": "203.0.113.9"}), "through a proxy: from anywhere"
        with served(llm, settings("shape")) as running:
            assert not texts(running)
        with served(llm, settings("text"), KEYS) as running:
            assert texts(running, **KEYED, **{"X-Forwarded-For": "203.0.113.9"})
            assert running.http.get("/").status_code == 200 == running.http.get("/map/map.js").status_code
            for path in ("/v1/kv", "/v1/kv/history", "/v1/kv/stream", "/v1/kv/blocks/1", "/v1/kv/sequences/1"):
                assert running.http.get(path).status_code == 401, path
        with served(llm, settings("off")) as running:
            for path in ("/", "/v1/kv", "/v1/kv/history", "/map/map.js"):
                assert running.http.get(path).status_code == 404, path


def test_the_page_loads_nothing_from_elsewhere(server: Served) -> None:
    page = server.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    names = [
        "map.js",
        "map.css",
        "icon.svg",
        "paint.js",
        "frames.js",
        "grid.js",
        "rows.js",
        "charts.js",
        "chat.js",
        "link.js",
    ]
    for text in (page.text, *(server.http.get(f"/map/{name}").text for name in names)):
        assert "https://" not in text and "http://" not in text.replace("http://www.w3.org/2000/svg", "")
