"""Signals to a server in a process of its own: the first lets answers end, within a time; a second one does not."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from octavo.loadgen.process import ServerProcess
from serving import until

if TYPE_CHECKING:
    from conftest import TinyModels

ENDLESS = 900  # tokens that take far longer than any of these tests, since the plain NumPy backend computes them


@contextmanager
def answering(tiny_models: TinyModels, tokens: int, *options: str) -> Iterator[tuple[ServerProcess, Iterator[str]]]:
    """A slow server that has begun to answer, and the rest of its answer, line by line."""
    folder = tiny_models.folder("llama")
    with ServerProcess(folder, "--backend", "reference", "--kv-blocks", "600", *options) as server:
        body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": tokens, "n": 8, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = filter(None, answer.iter_lines())
            assert "choices" in json.loads(next(lines).removeprefix("data: "))
            yield server, lines


def stop(server: ServerProcess, number: int) -> None:
    """One signal, of which the server has heard when this returns: it listens no more."""
    server.process.send_signal(number)
    host, port = server.url.removeprefix("http://").split(":")

    def refused() -> bool:
        try:
            socket.create_connection((host, int(port)), 1).close()
        except OSError:
            return True
        return False

    until(refused)


def events(lines: Iterator[str]) -> list[dict[str, Any]]:
    *found, last = (line.removeprefix("data: ") for line in lines)
    assert last == "[DONE]"
    return [json.loads(line) for line in found]


def test_after_a_signal_answers_end_and_the_process_with_them(tiny_models: TinyModels) -> None:
    with answering(tiny_models, 40) as (server, lines):
        stop(server, signal.SIGTERM)
        assert server.process.poll() is None
        assert "stopping when 1 running requests are done" in server.log()
        reasons = [choice["finish_reason"] for event in events(lines) for choice in event["choices"]]
        assert reasons.count("length") == 8
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(number: int, tiny_models: TinyModels) -> None:
    with answering(tiny_models, ENDLESS, "--drain-timeout", "600") as (server, lines):
        stop(server, number)
        assert server.process.poll() is None
        server.process.send_signal(number)
        *before, last = events(lines)
        assert last["error"]["code"] == "shutting_down"
        assert not any(choice["finish_reason"] for event in before for choice in event["choices"])
        assert server.process.wait(20) == 0


def test_what_takes_longer_than_the_drain_timeout_ends_with_an_error(tiny_models: TinyModels) -> None:
    with answering(tiny_models, ENDLESS, "--drain-timeout", "0.5") as (server, lines):
        stop(server, signal.SIGTERM)
        assert events(lines)[-1]["error"]["code"] == "shutting_down"
        assert server.process.wait(20) == 0
