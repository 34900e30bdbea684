"""Receipts: what a server records, under load, and that replaying it gives the same bytes or says what does not."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo.cli import main
from octavo.cli.comparison import first_difference
from octavo.errors import ConfigError
from octavo.server import receipts as receipts_module
from octavo.server.fingerprint import Fingerprint
from octavo.server.receipts import Exchange, Receipts
from octavo.server.settings import ServerSettings
from serving import scripted, served, tiny_llm, until, user

if TYPE_CHECKING:
    from conftest import TinyModels

CHAT, TEXT, ITEMS = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SECRET = "the parrot's name is Coco"
ENGINE = ("--kv-blocks", "256", "--threads", "1")
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | length }}\n{% endif %}[assistant] "
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "boolean"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
FLAT: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]  # type: ignore[dict-item]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["yes", "no", "perhaps"]}}}
COMMON = {"max_tokens": 24, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "The sea is", "temperature": 0, **COMMON}),
    (TEXT, {"prompt": "The sea is", "temperature": 1.1, "seed": 7, "n": 2, "logprobs": 3, **COMMON}),
    (TEXT, {"prompt": "The sea is", **COMMON}),  # a seed is drawn
    (TEXT, {"prompt": ["The sea is", [5, 6, 7], "The sea is"], "return_token_ids": True, **COMMON}),  # three seeds
    (TEXT, {"prompt": "A list of", "echo": True, "logprobs": 1, "best_of": 3, **COMMON}),
    (TEXT, {"prompt": "A list of", "use_beam_search": True, "beam_width": 3, "n": 2, "max_tokens": 8}),
    (TEXT, {"prompt": "A list", "prompt_logprobs": 1, "top_p": 0.9, "repetition_penalty": 1.2, **COMMON}),
    (CHAT, {"messages": user("Hello"), "temperature": 0, "logprobs": True, "top_logprobs": 2, **COMMON}),
    (CHAT, {"messages": user("Hello"), "n": 2, "return_token_ids": True, "logprobs": True, **COMMON}),
    (CHAT, {"messages": user("Weather?"), "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}),
    (CHAT, {"messages": user("Weather?"), "tools": TOOLS, "tool_choice": "auto", "max_tokens": 12}),
    (CHAT, {"messages": user("Well?"), "response_format": SCHEMA, "max_tokens": 60}),
    (CHAT, {"messages": user("A tale"), "ignore_eos": True}),  # runs to what fits
    (ITEMS, {"input": "Hello", "temperature": 0, "include": ["message.output_text.logprobs"], **COMMON}),
    (ITEMS, {"input": "A tale", "ignore_eos": True}),
    (ITEMS, {"input": "Weather?", "tools": FLAT, "tool_choice": "required", "max_output_tokens": 200}),
]


def streamed(body: dict[str, Any], number: int) -> dict[str, Any]:
    return {**body, "stream": True, **({"stream_options": {"include_usage": True}} if number % 2 else {})}


@pytest.fixture(scope="module")
def model(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("receipts") / "chatty"
    shutil.copytree(tiny_models.folder("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def recorded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Any]]]:
    """A file of receipts, written under load, and what the clients got of the plain answers."""
    file = tmp_path_factory.mktemp("recorded") / "receipts.jsonl"
    plain = REQUESTS
    streams = [
        (path, streamed(body, i))
        for i, (path, body) in enumerate(REQUESTS)
        if not body.get("best_of") and not body.get("use_beam_search")
    ]
    with Receipts(str(file)) as receipts, tiny_llm(model, max_context=320, max_batched_tokens=48) as llm:
        with served(llm, model=str(model), receipts=receipts) as server, ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(server.post, path, body) for path, body in plain + streams]
            answers = [future.result() for future in asked]
            assert {answer.status_code for answer in answers} == {200}, [
                a.text for a in answers if a.status_code != 200
            ]
            assert server.post(TEXT, {"prompt": "x", "max_tokens": 10**6}).status_code == 400  # no receipt
    yield file, [answer.json() for answer in answers[: len(plain)]]


@pytest.fixture(autouse=True)
def log() -> Iterator[None]:
    """The log as it was: commands send it to the stderr of their test."""
    log = logging.getLogger("octavo")
    before = log.handlers[:], log.level, log.propagate
    log.handlers, log.propagate = [], True
    yield
    log.handlers, log.level, log.propagate = before


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(file: Path, *options: str) -> tuple[int, str, str]:
        code = main(["replay", str(file), *ENGINE, *options])
        return code, *capsys.readouterr()

    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_what_was_recorded_under_load_comes_again(recorded: Any, replay: Any) -> None:
    """Eight at a time and all alone, whatever was asked: greedy, sampled with and without a seed, n, tools, forms."""
    file, answers = recorded
    found = lines(file)
    assert len(found) == len(REQUESTS) * 2 - 2 and file.stat().st_mode & 0o777 == 0o600
    assert all(line["response"] in answers for line in found if not line["request"].get("stream"))
    assert any(choice["message"].get("tool_calls") for line in found if "tools" in line["request"]
               for choice in line["response"].get("choices", ()))  # fmt: skip
    code, out, err = replay(file, "--keep-going", "--max-context", "320")
    assert code == 0, out + err
    assert f"{len(found)} receipts: {len(found)} same, 0 differ" in out and out.count("same   ") == len(found)
    tight = ("-c", "1", "--only", "2", "--only", "3", "--no-prefix-cache", "--max-batched-tokens", "16")
    code, out, _ = replay(file, "--max-context", "320", *tight)
    assert code == 0 and "2 receipts: 2 same" in out


def test_what_chance_and_the_pool_decided_is_in_the_receipt(recorded: Any) -> None:
    file, _ = recorded
    for line in lines(file):
        asked, filled = line["request"], line["filled"]
        assert ("seed" in asked) != bool(filled.keys() & {"seed", "seeds"})
        if isinstance(asked.get("prompt"), list):
            assert len(set(filled["seeds"])) == 3
        if asked.get("messages") == user("A tale"):
            assert filled["max_tokens"] == line["response"].get("usage", {}).get(
                "completion_tokens", filled["max_tokens"]
            )
        assert line["system_fingerprint"] == line["response"]["system_fingerprint"] and line["request_id"]
        assert "authorization" not in json.dumps(line).lower()


def test_a_changed_byte_is_found_and_shown(recorded: Any, replay: Any, tmp_path: Path) -> None:
    file, _ = recorded
    found = lines(file)
    line = next(
        line
        for line in found
        if line["request"].get("prompt") == "The sea is" and len(line["response"]["choices"]) == 1
    )
    text = line["response"]["choices"][0]["text"]
    line["response"]["choices"][0]["text"] = text[:5] + chr(ord(text[5]) ^ 1) + text[6:]
    changed = tmp_path / "changed.jsonl"
    changed.write_text(
        "\n".join(map(json.dumps, [line, *[other for other in found if other is not line][:2]])), encoding="utf-8"
    )
    code, out, _ = replay(changed, "--max-context", "320")
    place = f"choices[0].text, byte {len(text[:5].encode())}"
    assert code == 1 and place in out and "recorded  " in out and "now       " in out
    assert "3 receipts: 0 same, 1 differs, 2 left out" in out
    code, out, _ = replay(changed, "--max-context", "320", "--keep-going")
    assert code == 1 and "3 receipts: 2 same, 1 differs" in out


def test_logprobs_finish_reasons_calls_and_counts_are_compared(recorded: Any) -> None:
    """Each alone, in a copy of an answer: a last bit of a number is enough."""
    file, _ = recorded

    def difference(change: Callable[[Any], None], wanted: Callable[[Any], bool]) -> str:
        line = next(line for line in lines(file) if wanted(line))
        changed = json.loads(json.dumps(line["response"]))
        assert first_difference(line["response"], changed, True) is None
        change(changed)
        found = first_difference(line["response"], changed, True)
        return "" if found is None else found.place

    def plain(line: Any) -> bool:
        return bool(line["request"].get("logprobs")) and line["path"] == TEXT and "seed" in line["request"]

    def nudge(body: Any) -> None:
        values = body["choices"][1]["logprobs"]["token_logprobs"]
        values[2] = float.fromhex(values[2].hex()) * (1 + 2**-52)

    def calls(line: Any) -> bool:
        return line["path"] == CHAT and bool(line["response"]["choices"][0]["message"].get("tool_calls"))

    def items(line: Any) -> bool:
        return line["path"] == ITEMS and line["request"].get("tools") is not None

    assert difference(nudge, plain) == "choices[1].logprobs.token_logprobs[2]"
    assert (
        difference(lambda b: b["choices"][0].update(finish_reason="stop"), plain) == "choices[0].finish_reason, byte 0"
    )
    assert difference(lambda b: b["usage"].update(completion_tokens=1), plain) == "usage.completion_tokens"
    assert difference(lambda b: b["usage"]["prompt_tokens_details"].update(cached_tokens=99), plain) == ""
    assert difference(lambda b: b["choices"].pop(), plain) == "choices"
    call = "choices[0].message.tool_calls[0].function.name, byte 0"
    assert difference(lambda b: b["choices"][0]["message"]["tool_calls"][0]["function"].update(name="x"), calls) == call
    assert difference(lambda b: b["output"][0].update(arguments="{"), items) == "output[0].arguments, byte 1"
    assert difference(lambda b: b["output"][0].update(call_id="x"), items) == ""
    ids = difference(
        lambda b: b["choices"][0]["token_ids"].__setitem__(3, -1), lambda line: "return_token_ids" in line["request"]
    )
    assert ids == "choices[0].token_ids[3]"


def test_another_setting_or_model_is_named_and_not_replayed(
    recorded: Any, replay: Any, tiny_models: TinyModels, tmp_path: Path
) -> None:
    file, _ = recorded
    other = shutil.copytree(tiny_models.folder("llama"), tmp_path / "other")
    (other / "chat_template.jinja").write_text(TEMPLATE + " ", encoding="utf-8")
    for options, part, hint in [
        (("--kv-dtype", "int8"), "KV type: recorded float32, here int8", "--kv-dtype float32"),
        (("--compute", "fast"), "compute mode: recorded exact, here fast", "--compute exact"),
        (("--isa", "scalar"), "instruction set or GPU: recorded cpu-", "here cpu-scalar"),
        (("--model", str(other)), "weights", "recorded"),
    ]:
        code, out, err = replay(file, "--max-context", "320", *options)
        assert code == 2, err
        assert part in err and hint in err and "--anyway" in err and "replaying" not in out
        assert err.count("another ") == 1, err
    code, out, err = replay(file, "--max-context", "320", "--kv-dtype", "int8", "--anyway", "--only", "1")
    assert code in (0, 1) and "KV type" in err and "1 receipt: " in out


def test_receipts_by_hand(recorded: Any, replay: Any, model: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """What any client can save: path, request and response; a stream as its chunks; from stdin, too."""
    _, answers = recorded
    with tiny_llm(model, max_context=320) as llm, served(llm, model=str(model)) as server:
        chunks = server.chunks(CHAT, messages=user("Hello"), temperature=0, max_tokens=9)
    by_hand = [
        {"path": TEXT, "request": REQUESTS[1][1], "response": answers[1]},
        {
            "path": CHAT,
            "request": {"messages": user("Hello"), "temperature": 0, "max_tokens": 9, "stream": True},
            "response": chunks,
        },
    ]
    file = tmp_path / "by-hand.json"
    here = ("--model", str(model), "--max-context", "320")
    file.write_text(json.dumps(by_hand, indent=1), encoding="utf-8")
    assert replay(file, *here)[0] == 0
    file.write_text(json.dumps(by_hand[0], indent=1), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", file.open(encoding="utf-8"))
    assert replay(Path("-"), *here)[0] == 0
    drawn = {"path": TEXT, "request": REQUESTS[2][1], "response": answers[2]}
    file.write_text(json.dumps(drawn), encoding="utf-8")
    code, out, _ = replay(file, *here)
    assert code == 1 and "no seed" in out


def test_a_running_server_is_asked(recorded: Any, replay: Any, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = recorded
    with tiny_llm(model, max_context=320) as llm, served(llm, model=str(model)) as server:
        assert main(["replay", str(file), "--url", server.url, "-c", "12"]) == 0
        out = capsys.readouterr().out
        assert f"{len(lines(file))} same, 0 differ" in out
        assert replay(file, "--url", server.url)[0] == 2  # with engine options
    capsys.readouterr()
    assert main(["replay", str(file), "--url", server.url]) == 1
    assert "connection refused" in capsys.readouterr().err


def test_a_line_that_is_cut_off_is_passed_over(recorded: Any, replay: Any, tmp_path: Path) -> None:
    """As kill -9 leaves it; a server that goes on with the file begins a new line."""
    file, _ = recorded
    data = file.read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(data[0] + data[1][:-40])
    code, out, err = replay(torn, "--max-context", "320")
    assert code == 0 and "line 2 is cut off" in err and "1 receipt: 1 same" in out
    with Receipts(str(torn)) as receipts:
        about = {"path": TEXT, "octavo": "1"}
        receipts.put(Exchange(about, b'{"prompt":"x"}', {"seed": 1}, b'{"choices":[]}', False))
    assert [line[:1] for line in torn.read_bytes().splitlines()] == [b"{"] * 3
    assert json.loads(torn.read_bytes().splitlines()[2])["request"] == {"prompt": "x"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no receipts"),
        ("not json\nat all", "line 1"),
        ("[3]", "receipt 1 is no JSON object"),
        ('{"path": "/v1/embeddings", "request": {}, "response": {}}', "/v1/embeddings"),
        ('{"path": "/v1/completions", "request": 3, "response": {"choices": []}}', "request"),
        ('{"path": "/v1/completions", "request": {}, "response": {"error": {}}}', "no answer"),
        ('{"path": "/v1/completions", "request": {}, "response": [{}]}', "chunks"),
        ('{"path": "/v1/completions", "request": {}, "response": {"choices": []}}', "--model"),
    ],
)
def test_files_that_hold_no_receipts(text: str, words: str, replay: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text, encoding="utf-8")
    code, out, err = replay(tmp_path / "file")
    assert (code, out) == (2, "") and words in err and err.splitlines()[-1].startswith("error: ")


def test_only_whole_answers_are_receipts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a refusal, nor a time limit, nor a client that leaves."""
    file = tmp_path / "receipts.jsonl"
    answers = {"long": "x" * 3000, "short": "yes"}
    with scripted(answers, monkeypatch) as (llm, _, steps), Receipts(str(file)) as receipts:
        with served(llm, receipts=receipts) as server:
            steps.delay = 0.01
            for stream in (False, True):
                server.post(CHAT, {"messages": user("long"), "timeout": 0.1, "stream": stream})
            with server.http.stream("POST", CHAT, json={"messages": user("long"), "stream": True}) as answer:
                next(answer.iter_bytes())
            server.error(CHAT, {"messages": user("long"), "n": 0})
            server.settled()
            assert server.ask(CHAT, messages=user("short"))["choices"][0]["message"]["content"] == "yes"
            until(lambda: receipts.written)
    assert [line["response"]["choices"][0]["message"]["content"] for line in lines(file)] == ["yes"]


def test_a_full_disk_costs_receipts_and_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "receipts.jsonl"
    write, full = os.write, [False]

    def half(descriptor: int, data: bytes) -> int:
        if not full[0]:
            return write(descriptor, data)
        if not data.startswith(b"{"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:20])

    with scripted({"short": "yes"}, monkeypatch) as (llm, _, _), Receipts(str(file)) as receipts:
        monkeypatch.setattr(receipts_module.os, "write", half)
        with served(llm, receipts=receipts) as server:
            for number, full[0] in enumerate((False, True, True, True, False), 1):
                assert server.ask(CHAT, messages=user("short"))["choices"][0]["finish_reason"] == "stop"
                until(lambda count=number: receipts.written + receipts.lost == count)  # type: ignore[misc]
    assert len(lines(file)) == 2 and receipts.lost == 3
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("receipts")]
    assert len(told) == 2 and "No space left" in told[0] and "3 were lost" in told[1], told


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model), "--port", "0", "--record", str(tmp_path / "no" / "such")]) == 2
    assert "receipts cannot be written" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no regular file|Is a directory"):
        Receipts(str(tmp_path))
    with pytest.raises(ConfigError, match="no regular file"):
        Receipts("/dev/null")
    with Receipts(str(tmp_path / "one")), pytest.raises(ConfigError, match="another server"):
        Receipts(str(tmp_path / "one"))


@pytest.mark.parametrize("record", [False, True])
def test_prompts_are_written_only_when_asked(
    record: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without --record a prompt is in no log and no file; with it a warning says where it goes."""
    caplog.set_level(logging.DEBUG, "octavo")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "receipts.jsonl"
    settings = ServerSettings(port=0, access_log="json")
    with scripted({"x": "yes"}, monkeypatch) as (llm, _, _):
        receipts = Receipts(str(file)) if record else None
        with served(llm, settings, receipts=receipts) as server:
            server.ask(CHAT, messages=user(SECRET))
            server.ask(TEXT, prompt=SECRET)
        if receipts is not None:
            receipts.close()
    assert SECRET not in caplog.text
    assert ("prompts and answers are written to" in caplog.text) == record
    written = [path.read_text(encoding="utf-8") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == int(record) and sum(text.count(SECRET) for text in written) == 2 * record


def test_fingerprints_name_their_parts() -> None:
    one = Fingerprint("0.1.0", "cpu-x86-64-v3", "0123abcd", "89abcdef", "float16", "fast")
    assert Fingerprint.parse(str(one)) == one and Fingerprint.parse("fp_44709d6fcb") is None
    assert Fingerprint.parse("octavo-0.1.0") == Fingerprint("0.1.0")
    other = Fingerprint("0.2.0", "cpu-x86-64-v3", "0123abce", "89abcdef", "float16", "fast")
    assert [part for part, _, _ in one.differences(other)] == ["version of Octavo", "build of the kernels"]


def test_a_seed_for_each_prompt(model: Path) -> None:
    with tiny_llm(model) as llm, served(llm, model=str(model)) as server:
        ask = {"temperature": 1.2, "max_tokens": 12, "ignore_eos": True}
        alone = [server.ask(TEXT, prompt="The sea", seed=s, **ask)["choices"][0]["text"] for s in (3, 4)]
        both = server.ask(TEXT, prompt=["The sea", "The sea"], seeds=[3, 4], **ask)["choices"]
        assert [choice["text"] for choice in both] == alone and alone[0] != alone[1]
        for wrong in ({"seeds": [1, 2]}, {"seeds": [1], "seed": 1}, {"seeds": 3}, {"seeds": ["a"]}):
            assert server.error(TEXT, {"prompt": "x", **wrong})["param"] == "seeds"
