"""Streamed and plain answers are the same; usage, log-probabilities and tool calls are as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from serving import CALL, HERMES, SAID, Served, scripted, served, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ANSWERS = {
    **SAID,
    "again": "the same",
    **{f"q{i}": f"answer number {i * 37 % 101}" for i in range(32)},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    from serving import TEMPLATE

    with pytest.MonkeyPatch.context() as patch:
        with scripted(ANSWERS, patch, HERMES + TEMPLATE) as (llm, _, _), served(llm) as running:
            yield running


def folded(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """A stream's chunks as the plain answer that a client makes of them."""
    out: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            into = out.setdefault(choice["index"], {"text": "", "reasoning": "", "calls": {}, "logprobs": None})
            assert into.get("finish_reason") is None, "something comes after the finish reason"
            said = choice.get("delta", {"content": choice.get("text")})
            into["text"] += said.get("content") or ""
            into["reasoning"] += said.get("reasoning_content") or ""
            for call in said.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] not in into["calls"], "a call begins twice"
                    into["calls"][call["index"]] = {"name": call["function"]["name"], "arguments": ""}
                else:
                    assert "name" not in call["function"]
                into["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if choice["logprobs"]:
                old = into["logprobs"] or {name: [] for name, v in choice["logprobs"].items() if v is not None}
                into["logprobs"] = {name: old[name] + choice["logprobs"][name] for name in old}
            into["finish_reason"], into["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")
    return {"choices": [out[i] for i in sorted(out)], "usage": usage}


def plain(body: dict[str, Any]) -> dict[str, Any]:
    choices = []
    for choice in body["choices"]:
        said = choice.get("message", {"content": choice.get("text")})
        calls = [call["function"] for call in said.get("tool_calls", [])]
        choices.append(
            {
                "text": said["content"] or "",
                "reasoning": said.get("reasoning_content", ""),
                "calls": {i: call for i, call in enumerate(calls)},
                "logprobs": {k: v for k, v in choice["logprobs"].items() if v is not None}
                if choice["logprobs"]
                else None,
                "finish_reason": choice["finish_reason"],
                "stop_reason": choice["stop_reason"],
            }
        )
    return {"choices": choices, "usage": body["usage"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "<fruit>", "max_tokens": 99}),
        (TEXT, {"prompt": "<emoji>", "max_tokens": 99, "logprobs": 3}),
        (TEXT, {"prompt": ["<fruit>", "<emoji>"], "n": 2, "max_tokens": 7, "echo": True, "logprobs": 1}),
        (TEXT, {"prompt": "<fruit>", "max_tokens": 99, "stop": [" and"], "logprobs": 0}),
        (TEXT, {"prompt": "<fruit>", "max_tokens": 99, "stop": [" and"], "include_stop_str_in_output": True}),
        (TEXT, {"prompt": "<fruit>", "max_tokens": 0, "echo": True, "logprobs": 2}),
        (TEXT, {"prompt": "<emoji>", "max_tokens": 9, "echo": True}),
        (CHAT, {"messages": user("fruit")}),
        (CHAT, {"messages": user("emoji"), "n": 3, "logprobs": True, "top_logprobs": 2}),
        (CHAT, {"messages": user("emoji"), "max_tokens": 8}),
        (CHAT, {"messages": user("fruit"), "stop": "pears"}),
        (CHAT, {"messages": user("thinking"), "logprobs": True}),
        (CHAT, {"messages": user("thinking"), "max_tokens": 12}),
        (CHAT, {"messages": user("one"), "tools": TOOLS}),
        (CHAT, {"messages": user("two"), "tools": TOOLS, "n": 2}),
        (CHAT, {"messages": user("two"), "tools": TOOLS, "parallel_tool_calls": False}),
        (CHAT, {"messages": user("broken"), "tools": TOOLS}),
        (CHAT, {"messages": user("fruit"), "tools": TOOLS, "tool_choice": "none"}),
    ],
)
def test_a_stream_is_the_plain_answer_in_pieces(path: str, body: dict[str, Any], server: Served) -> None:
    whole = plain(server.ask(path, temperature=0, **body))
    parts = folded(server.chunks(path, temperature=0, **body, stream_options={"include_usage": True}))
    for usage in (whole["usage"], parts["usage"]):  # a second run finds the prompt in the cache
        usage["prompt_tokens_details"] = None
    assert parts == whole
    assert all(choice["finish_reason"] in ("stop", "length", "tool_calls") for choice in whole["choices"])


def test_r15_concurrent_streams_hold_their_own_answers(server: Served) -> None:
    """R15 over HTTP: 32 streams at once, and lists of prompts come back in their order."""

    def text(i: int) -> str:
        chunks = server.chunks(CHAT, messages=user(f"q{i}"))
        return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)

    with ThreadPoolExecutor(32) as pool:
        for _ in range(2):
            assert list(pool.map(text, range(32))) == [ANSWERS[f"q{i}"] for i in range(32)]
    answer = server.ask(TEXT, prompt=[f"<q{i}>" for i in range(32)], max_tokens=30)
    assert [c["text"] for c in answer["choices"]] == [ANSWERS[f"q{i}"] for i in range(32)]
    assert [c["index"] for c in answer["choices"]] == list(range(32))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_r37_usage_comes_last_and_only_if_asked_for(path: str, n: int, server: Served) -> None:
    body = {"messages": user("fruit")} if path == CHAT else {"prompt": "<fruit>"}
    for options in (None, {}, {"include_usage": False}):
        chunks = server.chunks(path, **body, n=n, max_tokens=9, stream_options=options)
        assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)
    *before, last = server.chunks(path, **body, n=n, max_tokens=9, stream_options={"include_usage": True})
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in before)
    expected = server.ask(path, **body, n=n, max_tokens=9)["usage"]
    assert last["choices"] == [] and last["usage"] == expected
    assert expected["completion_tokens"] == 9 * n
    assert expected["total_tokens"] == expected["prompt_tokens"] + 9 * n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_r38_tool_calls(choice: str | None, stream: bool, server: Served) -> None:
    """One call, two in a row with text before, and a broken one, which is text."""

    def ask(question: str) -> dict[str, Any]:
        body = {"messages": user(question), "tools": TOOLS, "tool_choice": choice}
        if stream:
            return folded(server.chunks(CHAT, **body))["choices"][0]  # type: ignore[no-any-return]
        answer = server.ask(CHAT, **body)
        ids = [call["id"] for call in answer["choices"][0]["message"].get("tool_calls", [])]
        assert len(set(ids)) == len(ids)
        return plain(answer)["choices"][0]  # type: ignore[no-any-return]

    one, two, broken = ask("one"), ask("two"), ask("broken")
    if choice == "none":
        assert one["text"] == CALL and not one["calls"] and one["finish_reason"] == "stop"
        return
    assert one["calls"].keys() == {0} and one["text"] == "" and one["finish_reason"] == "tool_calls"
    assert one["calls"][0]["name"] == "weather" and json.loads(one["calls"][0]["arguments"]) == {"city": "Paris"}
    assert [json.loads(call["arguments"])["city"] for call in two["calls"].values()] == ["Paris", "Rome"]
    assert two["text"].strip() == "Let me see." and two["finish_reason"] == "tool_calls"
    said = broken["text"] + "".join(call["arguments"] for call in broken["calls"].values())
    assert "Par" in said and broken["finish_reason"] in ("stop", "tool_calls")


def test_r38_arguments_are_streamed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all at once, and a message that is only a call has content null."""
    with scripted(ANSWERS, monkeypatch) as (llm, _, steps), served(llm) as slow:
        steps.delay = 0.005
        chunks = slow.chunks(CHAT, messages=user("one"), tools=TOOLS)
    pieces = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", [])]
    assert len(pieces) > 5 and pieces[0]["type"] == "function" and pieces[0]["id"].startswith("call_")
    message = server.ask(CHAT, messages=user("one"), tools=TOOLS)["choices"][0]["message"]
    assert message["content"] is None and message["role"] == "assistant"


def test_a_conversation_with_tool_results(server: Served) -> None:
    """What a client sends back after a call: the call, with content null, and the tool's result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    talk = [
        *user("one"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"},
        *user("again"),
    ]
    assert server.ask(CHAT, messages=talk)["choices"][0]["message"]["content"] == "the same"


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ("x", None, "tools"),
        ([{"type": "other"}], None, "tools[0].type"),
        ([{"type": "function", "function": {}}], None, "tools[0].function.name"),
        (TOOLS, "some", "tool_choice"),
        (TOOLS, {"type": "function", "function": {"name": "nope"}}, "tool_choice"),
        (None, "required", "tool_choice"),
    ],
)
def test_bad_tools_are_refused(tools: Any, choice: Any, field: str, server: Served) -> None:
    assert server.error(CHAT, {"messages": user("x"), "tools": tools, "tool_choice": choice})["param"] == field


def test_reasoning_is_told_apart(server: Served) -> None:
    message = server.ask(CHAT, messages=user("thinking"))["choices"][0]["message"]
    assert message["reasoning_content"] == "First this." and message["content"] == "Then that."


def test_r40_log_probabilities_have_openais_form(server: Served) -> None:
    """R40: of bytes that are no characters too; the bytes join to the text."""
    for top in (None, 0, 5):
        choice = server.ask(CHAT, messages=user("emoji"), logprobs=True, top_logprobs=top)["choices"][0]
        entries = choice["logprobs"]["content"]
        assert bytes(b for e in entries for b in e["bytes"]).decode() == choice["message"]["content"]
        for entry in entries:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and entry["logprob"] <= 0
            assert len(entry["top_logprobs"]) == (top or 0)
            assert all(set(other) == {"token", "logprob", "bytes"} for other in entry["top_logprobs"])
        assert any(e["token"].startswith("bytes:\\x") for e in entries)
    for count in (0, 5):
        choice = server.ask(TEXT, prompt="<fruit>", logprobs=count, max_tokens=6)["choices"][0]
        lists = choice["logprobs"]
        assert "".join(lists["tokens"]) == choice["text"] == "Apples" and lists["text_offset"] == [0, 1, 2, 3, 4, 5]
        assert all(len(best) == max(1, count) for best in lists["top_logprobs"])
    for body in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": -1}):
        assert server.error(CHAT, {"messages": user("x"), **body})["param"] == "top_logprobs"
    for count in (-1, 21):
        assert server.error(TEXT, {"prompt": "x", "logprobs": count})["param"] == "logprobs"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_r73_usage_tells_cache_hits(path: str, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """R73: the same 100-token prompt twice, blocks of 16, n = 2: 0 and then 96 tokens from the cache."""
    prompt = "x" * (100 - len("<fruit>")) + "<fruit>"
    text = "x" * (100 - len("user:\nassistant:"))
    body = {"prompt": prompt} if path == TEXT else {"messages": user(text)}
    with scripted({"fruit": "y" * 20}, monkeypatch) as (llm, _, _), served(llm) as server:
        found = []
        for _ in range(2):
            if stream:
                usage = server.chunks(path, **body, n=2, max_tokens=4, stream_options={"include_usage": True})[-1]
            else:
                usage = server.ask(path, **body, n=2, max_tokens=4)
            assert usage["usage"]["prompt_tokens"] == 100
            found.append(usage["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert found == [0, 96]
        assert server.metric("octavo:prefix_cache_queries_total") == 200
        assert server.metric("octavo:prefix_cache_hits_total") == 96


def test_best_of_and_beams_answer_at_the_end(server: Served) -> None:
    best = server.ask(TEXT, prompt="<fruit>", best_of=3, n=2, max_tokens=5)
    assert [c["text"] for c in best["choices"]] == ["Apple"] * 2 and best["usage"]["completion_tokens"] == 15
    assert server.error(TEXT, {"prompt": "<fruit>", "best_of": 3, "stream": True})["param"] == "best_of"
    assert server.error(TEXT, {"prompt": "<fruit>", "best_of": 1, "n": 2})["param"] == "best_of"
    assert server.error(TEXT, {"prompt": "x", "use_beam_search": True, "stream": True})["param"] == "use_beam_search"


def test_extra_fields(server: Served) -> None:
    ids = list(b"<fruit>")
    answer = server.ask(TEXT, prompt=ids, max_tokens=3, return_token_ids=True, prompt_logprobs=1)["choices"][0]
    assert answer["token_ids"] == list(b"App") and len(answer["prompt_logprobs"]) == len(ids)
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][1][str(ids[1])]["decoded_token"] == "f"
    longer = server.ask(TEXT, prompt="<fruit>", max_tokens=40, ignore_eos=True, min_tokens=30)
    assert longer["usage"]["completion_tokens"] == 40


def test_a_salt_keeps_prefixes_apart(server: Served) -> None:
    def cached(**given: Any) -> int:
        usage = server.ask(TEXT, prompt="salt and pepper" * 3 + "<fruit>", max_tokens=1, **given)["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached(), cached(cache_salt="mine"), cached(cache_salt="mine"), cached(cache_salt="other")] == [
        0, 48, 0, 48, 0,
    ]  # fmt: skip


def test_min_tokens_hold_the_end_back(server: Served) -> None:
    length = len(ANSWERS["fruit"])
    for path, body in ((TEXT, {"prompt": "<fruit>"}), (CHAT, {"messages": user("fruit")})):
        free, held = (server.ask(path, **body, max_tokens=60, min_tokens=least) for least in (0, 40))
        assert free["usage"]["completion_tokens"] == length + 1 and free["choices"][0]["finish_reason"] == "stop"
        assert held["usage"]["completion_tokens"] >= 40
