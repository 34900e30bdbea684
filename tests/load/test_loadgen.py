"""The load generator against a scripted server: what it sends, what it measures, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, Script

from octavo.cli import main
from octavo.errors import ConfigError
from octavo.loadgen.asking import Asker, Events, Record
from octavo.loadgen.config import LoadConfig
from octavo.loadgen.drive import Drive, Limits
from octavo.loadgen.figures import Figures, Goals, Spread, percentile
from octavo.loadgen.http import Address, Broken, Client
from octavo.loadgen.prompts import WORDS, Writer
from octavo.loadgen.traffic import Lengths, Planned, Prefixes, drawn, limited, traced


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs ``octavo bench serve`` in this process; gives its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["bench", "serve", *arguments])
        return code, *capsys.readouterr()

    return run


def driven(server: FakeServer, requests: list[Planned], limits: Limits, chat: bool = False) -> Drive:
    async def run() -> Drive:
        drive = Drive(Asker(Client(Address.of(server.url)), "fake", chat), Writer(WORDS), iter(requests), limits)
        await drive.run()
        return drive

    return asyncio.run(run())


def plan(count: int, at: float | None = None, output: int = 4) -> list[Planned]:
    return [Planned(i, at, 8, output) for i in range(count)]


# ---- what comes when -------------------------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_the_law() -> None:
    times = [p.at or 0.0 for p in islice(drawn(1, Lengths(10, 10), Prefixes(), rate=5.0), 4001)]
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # exponential
    assert np.mean(gaps > 0.2) == pytest.approx(np.exp(-1), abs=0.03)


def test_the_seed_decides_everything() -> None:
    def made(seed: int) -> list[Any]:
        planned = list(islice(drawn(seed, Lengths(30, 20, 0.8), Prefixes(3, 0.5), 2.0), 20))
        return [(p, Writer(WORDS, seed, 16).prompt(p)) for p in planned]

    assert made(5) == made(5)
    assert made(5) != made(6)


def test_lengths_keep_their_mean() -> None:
    lengths = Lengths(200, 50, 0.7)
    rng = random.Random(3)
    pairs = [lengths.draw(rng) for _ in range(5000)]
    assert np.mean([p for p, _ in pairs]) == pytest.approx(200, rel=0.05)
    assert np.mean([o for _, o in pairs]) == pytest.approx(50, rel=0.05)
    assert len({p for p, _ in pairs}) > 100


def test_prefixes_are_shared_by_their_share() -> None:
    planned = list(islice(drawn(0, Lengths(12, 4), Prefixes(2, 0.75), None), 400))
    assert sum(p.prefix is not None for p in planned) == pytest.approx(300, abs=30)
    writer = Writer(range(1000), 0, prefix_tokens=20)
    prompts = [(p, writer.prompt(p)) for p in planned]
    heads = {tuple(prompt[:20]) for p, prompt in prompts if p.prefix is not None}
    assert len(heads) == 2
    assert all(len(prompt) == (32 if p.prefix is not None else 12) for p, prompt in prompts)
    assert len({tuple(prompt[-12:]) for _, prompt in prompts}) == 400


def test_a_csv_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:16:00.0000000,2000,9\n"
    )
    found = list(limited(traced(path, speed=2.0, scale=0.5), None, 500))
    assert [(p.prompt, p.output) for p in found] == [(187, 22), (198, 54), (499, 1)]
    assert [p.at for p in found] == pytest.approx([0.0, 4.314579 / 2, 13.31941 / 2])


def test_a_jsonl_trace_shares_what_its_blocks_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 500, "input_length": 1300, "output_length": 5, "hash_ids": [7, 8, 9]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 6, "hash_ids": [7, 8, 11]},
        {"timestamp": 3000, "input_length": 10, "output_length": 7},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    found = list(traced(path))
    assert [p.at for p in found] == [0.0, 1.0, 2.5]
    one, two, three = (Writer(range(10**6)).prompt(p) for p in found)
    assert (len(one), len(two), len(three)) == (1300, 1100, 10)
    assert one[:1024] == two[:1024] and one[1024:1100] != two[1024:1100]
    # scaled: the blocks shrink with the lengths
    small = [Writer(range(10**6), scale=0.125).prompt(p) for p in traced(path, scale=0.125)]
    assert [len(p) for p in small] == [162, 138, 1] and small[0][:128] == small[1][:128]
    assert small[0][128:138] != small[1][128:138]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,5\n", "line 2: TIMESTAMP, ContextTokens"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", "line 2"),
        ("a.csv", "", "has no requests"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 5}\n', "line 1: timestamp, input_length"),
        ("a.jsonl", "[1]\n", "line 1"),
    ],
)
def test_a_broken_trace_is_named_with_its_line(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(traced(tmp_path / name))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rate": 1.0, "concurrency": 4}, "rate and concurrency are different kinds"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"rate": float("nan")}, "rate must be above 0"),
        ({"requests": 0}, "requests must be at least 1"),
        ({"context": 1}, "context must be at least 2"),
        ({"prefix_share": 1.5}, "prefix_share must be in"),
        ({"chat": True, "token_ids": True}, "token_ids can't be"),
        ({"extra": "[1]"}, "extra must be a JSON object"),
        ({"extra": "{"}, "extra is no JSON"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        LoadConfig(**settings)


# ---- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("127.0.0.1:8000/v1", "http://127.0.0.1:8000"),
        ("https://api.example.com/v1/", "https://api.example.com"),
        ("http://host/some/where/v1", "http://host/some/where"),
        ("http://[::1]:80/", "http://[::1]"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert str(Address.of(url)) == shown


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="no URL"):
        Address.of(url)


def test_events_arrive_in_any_pieces() -> None:
    stream = (
        b': hello\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: \xc3\xa9\n\n\n\ndata: [DONE]\n\n'
    )
    for size in (1, 2, 3, 7, len(stream)):
        events = Events()
        found = [e for at in range(0, len(stream), size) for e in events.feed(stream[at : at + size])]
        assert found == [b'{"a": 1}', b"two\nlines", "é".encode(), b"[DONE]"]


@pytest.mark.parametrize("script", [Script(6), Script(6, split=1), Script(6, split=7), Script(6, close=True)])
def test_streams_cut_anywhere_are_read_whole(server: FakeServer, script: Script) -> None:
    server.answer = lambda number, body: script
    drive = driven(server, plan(3), Limits(1))
    assert all(r.whole and r.output_tokens == 6 and len(r.gaps) == 5 for r in drive.records), drive.records
    assert server.connections == (3 if script.close else 1)


def test_a_connection_that_was_closed_at_rest_is_replaced(server: FakeServer) -> None:
    """The server may close an idle connection just as it is used again: that is no failure."""

    async def run() -> list[int]:
        client = Client(Address.of(server.url))
        statuses = [(await client.exchange("GET", "/v1/models")).status]
        for connection in client._resting:
            connection.transport.abort()
            connection.reusable = True  # as if its end had not been heard of yet
        statuses.append((await client.exchange("GET", "/v1/models")).status)
        return statuses

    assert asyncio.run(run()) == [200, 200]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "cut off"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "cut off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab", "cut off"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"x" * 70000, "not HTTP"),
    ],
)
def test_answers_against_the_rules(answer: bytes, kind: str) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async def run() -> str:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Broken) as caught:
            await Client(Address("127.0.0.1", port)).exchange("GET", "/")
        server.close()
        return caught.value.kind

    assert asyncio.run(run()) == kind


# ---- what is measured ------------------------------------------------------------------------------------------------


def test_times_are_those_of_the_script(server: FakeServer) -> None:
    server.answer = lambda number, body: Script(5, first=0.2, gap=0.05, cached=3)
    drive = driven(server, plan(8), Limits(8))
    figures = Figures.of(drive)
    assert figures.done == 8 and figures.output_tokens == 40
    assert figures.prompt_tokens == 64 and figures.cached_tokens == 24
    assert figures.ttft is not None and figures.itl is not None and figures.e2e is not None
    # No less than the script slept; how much more is the machine's affair, and a late first token shortens the rest.
    assert figures.ttft.count == 8 and figures.itl.count == 32
    assert figures.ttft.p50 >= 199 and figures.e2e.p50 >= 399
    assert figures.ttft.mean + 4 * figures.itl.mean == pytest.approx(figures.e2e.mean, rel=0.1)
    assert figures.per_token is not None and figures.per_token.p50 == pytest.approx(figures.itl.mean, rel=0.3)
    assert figures.most_running == 8


def test_a_chat_has_its_first_token_after_its_role(server: FakeServer) -> None:
    server.answer = lambda number, body: Script(3, first=0.15, gap=0.01)
    (record,) = driven(server, plan(1), Limits(1), chat=True).records
    assert record.whole and record.output_tokens == 3 and len(record.gaps) == 2
    assert (record.to_first or 0) >= 0.15
    assert server.bodies[0]["messages"][0]["role"] == "user" and "prompt" not in server.bodies[0]


def test_the_open_loop_does_not_wait_for_answers(server: FakeServer) -> None:
    server.answer = lambda number, body: Script(2, first=0.4)
    requests = [Planned(i, 0.02 * i, 4, 2) for i in range(10)]
    drive = driven(server, requests, Limits())
    assert drive.seconds < 1.2 and Figures.of(drive).most_running == 10
    times = [at for at, path, _, _ in server.seen if path.endswith("completions")]
    assert times[-1] - times[0] == pytest.approx(0.18, abs=0.1)
    assert len(drive.lag) == 10


def test_the_closed_loop_keeps_its_places_full_and_never_more(server: FakeServer) -> None:
    server.answer = lambda number, body: Script(3, first=0.01, gap=0.005)
    drive = driven(server, plan(40), Limits(5))
    figures = Figures.of(drive)
    assert figures.done == 40 and figures.most_running == 5 and server.most_open == 5
    assert figures.mean_running > 4


def test_nothing_starts_after_the_duration(server: FakeServer) -> None:
    server.answer = lambda number, body: Script(1, first=0.05)
    endless = (Planned(i, None, 4, 1) for i in range(10**9))
    drive = driven(server, endless, Limits(2, duration=0.3))  # type: ignore[arg-type]
    assert all(r.whole for r in drive.records) and 2 <= len(drive.records) <= 14


def test_percentiles_are_numpys() -> None:
    rng = random.Random(0)
    for count in (1, 2, 3, 10, 101):
        values = sorted(rng.random() for _ in range(count))
        for q in (0, 1, 50, 90, 99, 100):
            assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)))
    assert Spread.of([]) is None


def test_goodput_counts_whole_answers_within_all_limits() -> None:
    def record(first: float, gap: float, failure: str | None = None) -> Record:
        return Record(0, 0.0, 0.0, first, first + 4 * gap, first + 4 * gap, [gap] * 4, 8, 5, failure=failure)

    records = [record(0.1, 0.01), record(0.6, 0.01), record(0.1, 0.2), record(0.1, 0.01, "cut off"), record(0.5, 0.05)]
    drive: Any = SimpleNamespace(records=records, seconds=2.0, lag=[])
    goals = Goals.of("ttft:500,itl:50")
    figures = Figures.of(drive, goals)
    assert figures.good == 2 and figures.rate(figures.good) == 1.0
    assert Figures.of(drive, Goals.of("e2e:140")).good == 1
    assert figures.failures == {"cut off": 1} and figures.done == 4


@pytest.mark.parametrize("text", ["", "ttft", "ttft:x", "ttft:-1", "speed:5", "ttft:5,ttft:6", "ttft:inf"])
def test_goals_that_make_no_sense(text: str) -> None:
    with pytest.raises(ConfigError, match="goodput takes"):
        Goals.of(text)


def test_a_thousand_streams_at_once(server: FakeServer) -> None:
    """All in flight together, all whole, and none waits for a connection."""
    server.answer = lambda number, body: Script(10, first=0.5, gap=0.1)
    drive = driven(server, plan(1000), Limits(1000))
    figures = Figures.of(drive)
    assert figures.done == 1000 and figures.most_running == 1000 and server.most_open == 1000
    assert figures.output_tokens == 10_000 and figures.itl is not None and figures.itl.count == 9_000


# ---- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_told_apart(server: FakeServer) -> None:
    scripts = [
        Script(4),
        Script(4, cut=2),
        Script(status=400, error="no such thing"),
        Script(status=429, error="queue is full", headers="Retry-After: 0\r\n"),
        Script(4, first=5.0),
    ]
    server.answer = lambda number, body: scripts[number]
    drive = driven(server, plan(5, at=0.0), Limits(patience=0.5))
    figures = Figures.of(drive)
    assert figures.done == 1
    assert figures.failures == {"cut off": 1, "HTTP 400": 1, "HTTP 429": 1, "time limit": 1}
    assert figures.reasons["HTTP 429"] == "queue is full"
    assert figures.faults == 3  # a refusal under load is none


def test_a_refused_place_waits_as_long_as_it_is_told(server: FakeServer) -> None:
    server.answer = lambda number, body: (
        Script(status=429, error="full", headers="Retry-After: 0.3\r\n") if number == 0 else Script(1)
    )
    driven(server, plan(2), Limits(1))
    times = [at for at, path, _, _ in server.seen if path.endswith("completions")]
    assert times[1] - times[0] >= 0.3


def test_errors_inside_a_stream_are_the_requests(server: FakeServer) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b'data: {"error": {"message": "engine died"}}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + event)
        writer.close()

    async def run() -> Record:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        asker = Asker(Client(Address("127.0.0.1", server.sockets[0].getsockname()[1])), "m")
        record = Record(0, 0.0, 0.0)
        await asker.ask(asker.body("x", 1), record)
        server.close()
        return record

    record = asyncio.run(run())
    assert (record.failure, record.error) == ("error in the stream", "engine died")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_and_keeps_its_figures(server: FakeServer, bench: Any, tmp_path: Path) -> None:
    code, out, err = bench(
        server.url, "-n", "12", "-c", "4", "--prompt", "10", "--output", "5", "--goodput", "ttft:60000",
        "--json", str(tmp_path / "out.json"), "--plots", str(tmp_path / "plots"), "--api-key", "secret",
    )  # fmt: skip
    assert code == 0 and err == ""
    assert "12 answered" in out and "60 tokens" in out and "to the first token" in out and "goodput" in out
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["done"] == 12 and report["good"] == 12 and len(report["requests"]) == 12
    assert report["ttft"]["count"] == 12 and report["asked"]["model"] == "fake"
    assert "secret" not in json.dumps(report)
    assert {h.get("authorization") for _, _, h, _ in server.seen} == {"Bearer secret"}
    assert all(b["max_tokens"] == 5 and b["ignore_eos"] and b["stream"] for b in server.bodies)
    assert len(server.bodies) == 13  # one ahead, not counted
    for name in ("times.svg", "running.svg", "tokens.svg"):
        assert (tmp_path / "plots" / name).read_text().startswith("<svg")


@pytest.mark.parametrize("gemm", ["fixed", "cublas"])
def test_figures_say_what_the_server_gave_up(server: FakeServer, bench: Any, tmp_path: Path, gemm: str) -> None:
    """Products by cuBLAS are told by the fingerprint of every answer."""
    told = f"octavo-1.0-triton-sm_90-01234567-w89abcdef-float16-{gemm}"
    server.answer = lambda number, body: Script(fingerprint=told)
    code, out, _ = bench(server.url, "-n", "2", "--output", "4", "--json", str(tmp_path / "out.json"))
    assert code == 0 and ("cublas: bytes depend on the batch" in out) == (gemm == "cublas")
    assert json.loads((tmp_path / "out.json").read_text())["system_fingerprint"] == told


def test_token_ids_come_from_the_servers_tokenizer_or_from_a_number(server: FakeServer, bench: Any) -> None:
    assert bench(server.url, "-n", "2", "--token-ids", "--prompt", "50")[0] == 0
    lengths = {len(word) for word in WORDS}
    assert len(server.bodies[-1]["prompt"]) == 50 and set(server.bodies[-1]["prompt"]) <= lengths
    assert bench(server.url, "-n", "2", "--token-ids", "--vocab", "7", "--prompt", "50")[0] == 0
    assert set(server.bodies[-1]["prompt"]) == set(range(7))


def test_no_server_is_said_in_one_line(bench: Any, server: FakeServer) -> None:
    server.die()
    code, out, err = bench(server.url)
    assert code == 1 and out == "" and err == f"error: nothing answers at {server.url}: connection refused\n"


def test_a_server_of_another_kind_is_said_in_one_line(bench: Any, server: FakeServer) -> None:
    code, _, err = bench(f"{server.url}/elsewhere")
    assert code == 1 and "/v1/models answers with HTTP 404: is it OpenAI-compatible?" in err
    server.answer = lambda number, body: Script(status=404, error="no model x")
    code, _, err = bench(server.url, "--model", "x")
    assert code == 1 and "failed a first request: HTTP 404: no model x" in err


def test_a_server_that_dies_midway_ends_the_run_with_what_was_measured(bench: Any, server: FakeServer) -> None:
    def answer(number: int, body: dict[str, Any]) -> Script:
        if number == 30:
            threading.Thread(target=server.die).start()
        return Script(2, first=0.005)

    server.answer = answer
    code, out, err = bench(server.url, "--rate", "200", "-n", "100000", "--prompt", "4")
    assert code == 1 and "has gone: connection refused" in err and err.count("\n") <= 2
    assert "answered" in out and "connect (connection refused)" in out


def test_faults_show_in_the_exit_code(bench: Any, server: FakeServer) -> None:
    server.answer = lambda number, body: Script(4, cut=1) if number == 3 else Script(4)
    code, out, _ = bench(server.url, "-n", "6", "-c", "6")
    assert code == 1 and "5 answered" in out and "1 cut off" in out


def test_ctrl_c_prints_what_was_measured(server: FakeServer, tmp_path: Path) -> None:
    server.answer = lambda number, body: Script(1000, gap=0.05) if number > 8 else Script(2)
    command = [sys.executable, "-m", "octavo", "bench", "serve", server.url, "--rate", "100", "--prompt", "4"]
    command += ["--duration", "1000", "--json", str(tmp_path / "out.json")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    end = time.monotonic() + 30
    while len(server.bodies) < 20 and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "stopped: the figures" in err, err
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["done"] == 8 and report["failures"]["stopped"] >= 11
    assert "8 answered" in out
