"""/v1/responses: streams and plain answers are the same, items in and out are OpenAI's, and nothing is kept."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from octavo.errors import RequestError
from octavo.server.answers import Piece
from octavo.server.parsing import CallStart, Tooling
from octavo.server.response_items import messages
from octavo.server.response_reading import Reading
from octavo.server.settings import ServerSettings
from octavo.text.chat import ChatTemplate
from octavo.text.detokenize import Detokenizer
from serving import CALL, EOS, HERMES, SAID, TEMPLATE, Bytes, Served, scripted, served, until, user

CHAT, PATH = "/v1/chat/completions", "/v1/responses"
ANSWERS = {
    **SAID,
    "between": "First.\n" + CALL + "\nThen < this.\n" + CALL + "\nAt last.",
    "both": "<think>\nI wonder.\n</think>\n\nA moment.\n" + CALL,
    "long": "x" * 3000,
    "none": "",
}
TOOLS = [{"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}]
LOGPROBS = ["message.output_text.logprobs"]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        with scripted(ANSWERS, patch, HERMES + TEMPLATE) as (llm, _, _), served(llm) as running:
            yield running


def events(server: Served, **body: Any) -> list[dict[str, Any]]:
    """A stream's events: named by their types, numbered, typed as the official client has them."""
    answer = server.post(PATH, {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    out = []
    for block in answer.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(out)
        EVENT.validate_python(event)
        out.append(event)
    return out


def watched(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a client sees grow.  Every item begins, grows and ends; the events that end things repeat what
    their deltas said."""
    assert [e["type"] for e in stream[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    grown: dict[str, Any] = {}
    open = None
    for event in stream[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert open is None and event["output_index"] == len(items)
            open, grown = event["item"], {"text": "", "logprobs": []}
            assert open["status"] == "in_progress"
            continue
        assert open is not None and event["output_index"] == len(items), event
        assert event.get("item_id", open["id"]) == open["id"] and event.get("content_index", 0) == 0
        if kind.endswith(".delta"):
            grown["text"] += event["delta"]
            grown["logprobs"] += event.get("logprobs", [])
        elif kind == "content_part.done":
            assert event["part"]["text"] == grown["text"]
            assert event["part"].get("logprobs", []) == grown["logprobs"]
        elif kind == "output_item.done":
            item = event["item"]
            assert item["id"] == open["id"] and item["status"] in ("completed", "incomplete")
            said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert said == grown["text"]
            items.append(item)
            open = None
        elif kind.endswith(".done"):
            assert event.get("text", event.get("arguments")) == grown["text"]
            assert event.get("logprobs", []) == grown["logprobs"]
        else:
            assert kind == "content_part.added" and event["part"]["text"] == ""
    assert open is None
    response: dict[str, Any] = stream[-1]["response"]
    assert stream[-1]["type"] == f"response.{response['status']}" and response["output"] == items
    assert {e["response"]["id"] for e in (*stream[:2], stream[-1])} == {response["id"]}
    return response


def bare(response: dict[str, Any]) -> dict[str, Any]:
    """Without what is another each time."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    usage = {**response["usage"], "input_tokens_details": None}  # a second run finds the prompt in the cache
    fresh = {"id", "created_at", "completed_at"}
    return {**{k: v for k, v in response.items() if k not in fresh}, "output": items, "usage": usage}


@pytest.mark.parametrize(
    "body",
    [
        {"input": "fruit"},
        {"input": "none"},
        {"input": "fruit", "instructions": "Be brief.", "metadata": {"a": "b"}, "user": "ann", "store": True},
        {"input": "emoji", "include": LOGPROBS, "top_logprobs": 2},
        {"input": "emoji", "max_output_tokens": 8, "include": LOGPROBS},
        {"input": "fruit", "stop": "pears", "include": LOGPROBS},
        {"input": "thinking", "include": LOGPROBS},
        {"input": "thinking", "max_output_tokens": 12},
        {"input": "one", "tools": TOOLS},
        {"input": "two", "tools": TOOLS, "include": LOGPROBS},
        {"input": "two", "tools": TOOLS, "parallel_tool_calls": False},
        {"input": "between", "tools": TOOLS, "include": LOGPROBS},
        {"input": "both", "tools": TOOLS, "include": LOGPROBS},
        {"input": "broken", "tools": TOOLS},
        {"input": "one", "tools": TOOLS, "max_output_tokens": 60},
        {"input": "one", "tools": TOOLS, "tool_choice": "none"},
    ],
)
def test_a_stream_is_the_plain_answer_in_events(body: dict[str, Any], server: Served) -> None:
    plain = server.ask(PATH, temperature=0, **body)
    Response.model_validate(plain)
    assert bare(watched(events(server, temperature=0, **body))) == bare(plain)


def test_it_says_what_a_chat_says(server: Served) -> None:
    for question in ("fruit", "emoji", "thinking", "two"):
        functions = [{"type": "function", "function": {k: v for k, v in TOOLS[0].items() if k != "type"}}]
        chat = server.ask(CHAT, messages=user(question), tools=functions)
        response = server.ask(PATH, input=question, tools=TOOLS)
        message, usage = chat["choices"][0]["message"], response["usage"]
        said: dict[str, Any] = {"message": "", "reasoning": "", "function_call": []}
        for item in response["output"]:
            said[item["type"]] += [item] if item["type"] == "function_call" else item["content"][0]["text"]
        assert said["message"] == (message["content"] or "")
        assert said["reasoning"] == message.get("reasoning_content", "")
        calls = [{"name": c["name"], "arguments": c["arguments"]} for c in said["function_call"]]
        assert calls == [c["function"] for c in message.get("tool_calls", [])]
        assert usage["input_tokens"] == chat["usage"]["prompt_tokens"]
        assert usage["output_tokens"] == chat["usage"]["completion_tokens"]
        assert usage["total_tokens"] == chat["usage"]["total_tokens"]


def test_items_come_in_the_order_in_which_they_were_said(server: Served) -> None:
    found = server.ask(PATH, input="between", tools=TOOLS)["output"]
    kinds = [item["type"] for item in found]
    assert kinds == ["message", "function_call", "message", "function_call", "message"]
    assert [i["content"][0]["text"].strip() for i in found[::2]] == ["First.", "Then < this.", "At last."]
    assert [json.loads(i["arguments"]) for i in found[1::2]] == [{"city": "Paris"}] * 2
    assert len({i["call_id"] for i in found[1::2]}) == 2


def test_how_a_response_ends(server: Served) -> None:
    whole = server.ask(PATH, input="fruit")
    assert whole["status"] == "completed" and whole["incomplete_details"] is None and whole["completed_at"]
    assert whole["id"].startswith("resp_") and whole["object"] == "response" and whole["store"] is False
    cut = server.ask(PATH, input="fruit", max_output_tokens=5)
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["output"][0]["status"] == "incomplete" and cut["output"][0]["content"][0]["text"] == "Apple"
    assert cut["usage"]["output_tokens"] == 5
    shorter = server.ask(PATH, input="fruit", max_output_tokens=5, max_tokens=3)  # the chats' name counts too
    assert shorter["usage"]["output_tokens"] == 3 and shorter["status"] == "incomplete"
    empty = server.ask(PATH, input="none")
    assert [i["content"][0]["text"] for i in empty["output"]] == [""] and empty["status"] == "completed"
    thoughts = server.ask(PATH, input="thinking", max_output_tokens=15)
    assert [i["type"] for i in thoughts["output"]] == ["reasoning"]
    assert thoughts["usage"]["output_tokens_details"]["reasoning_tokens"] == 15
    call = server.ask(PATH, input="one", tools=TOOLS, max_output_tokens=60)["output"][-1]
    assert call["type"] == "function_call" and call["status"] == "incomplete"


def test_usage_tells_thoughts_and_cache_hits(server: Served) -> None:
    found = [server.ask(PATH, input="thinking", instructions="y" * 50)["usage"] for _ in range(2)]
    assert found[0]["output_tokens_details"]["reasoning_tokens"] == len("<think>\nFirst this.\n</think>")
    assert found[0]["input_tokens"] == len("system:" + "y" * 50 + "\nuser:thinking\nassistant:")
    cached = [usage["input_tokens_details"]["cached_tokens"] for usage in found]
    assert cached[0] == 0 and cached[1] >= 64


def test_log_probabilities_are_of_what_is_said(server: Served) -> None:
    for question in ("emoji", "thinking", "between", "both"):
        output = server.ask(PATH, input=question, tools=TOOLS, include=LOGPROBS, top_logprobs=3)["output"]
        for item in output:
            if item["type"] == "message":
                part = item["content"][0]
                said = bytes(b for entry in part["logprobs"] for b in entry["bytes"]).decode()
                assert said.removesuffix("<eos>").strip() == part["text"].strip(), question
                assert all(len(entry["top_logprobs"]) == 3 for entry in part["logprobs"])


def test_parts_do_not_depend_on_how_an_answer_is_cut() -> None:
    """What a slow reader finds is joined: parts, log-probabilities and thoughts are the same, however it was."""
    tooling, tokenizer = Tooling(ChatTemplate(HERMES + TEMPLATE), None, "auto"), Bytes()
    tools = [{"type": "function", "function": {"name": "weather"}}]

    def parts(tokens: list[int], cuts: list[int]) -> tuple[Any, int]:
        reading = Reading(tooling.parser("", tools, "auto", True), Detokenizer(tokenizer))  # type: ignore[arg-type]
        text = Detokenizer(tokenizer)  # type: ignore[arg-type]
        told: list[list[Any]] = []
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            new = tuple(tokens[start:end])
            entries = [{"at": at} for at in range(start, end)]
            reason = "stop" if end == len(tokens) else None
            for part, scored in reading.read(Piece(0, text.push_all(new), new, {"content": entries}, reason)):
                said = part.name if isinstance(part, CallStart) else part.text
                if told and told[-1][0] is type(part) and not isinstance(part, CallStart):
                    told[-1][1] += said
                    told[-1][2] += scored
                else:
                    told.append([type(part), said, list(scored)])
        return told, reading.thoughts

    chance = random.Random(7)
    for answer in ANSWERS.values():
        tokens = [*answer.encode()[:300], EOS]
        whole = parts(tokens, [])
        assert whole == parts(tokens, list(range(1, len(tokens))))
        for _ in range(20):
            cuts = sorted(chance.sample(range(1, len(tokens)), min(len(tokens) - 1, chance.randint(0, 9))))
            assert parts(tokens, cuts) == whole


# ---- what goes in ----------------------------------------------------------------------------------------------------


def call(id: str, name: str = "weather") -> dict[str, Any]:
    return {"type": "function_call", "id": "fc_1", "call_id": id, "name": name, "arguments": '{"city": "Paris"}'}


def test_items_become_messages() -> None:
    def text(role: str, said: str, kind: str = "input_text") -> dict[str, Any]:
        return {"type": "message", "role": role, "content": [{"type": kind, "text": said, "annotations": []}]}

    made = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
    part = [{"type": "text", "text": "go"}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    secret = {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "abc"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    tool = {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "sunny"}
    said = {"role": "assistant", "content": "yes"}
    cases: list[tuple[Any, list[dict[str, Any]]]] = [
        ("go", [{"role": "user", "content": "go"}]),
        ([{"role": "user", "content": "go"}], [{"role": "user", "content": "go"}]),
        ([text("user", "go"), text("developer", "go")], [{"role": r, "content": part} for r in ("user", "developer")]),
        ([text("assistant", "yes", "output_text")], [said]),
        ([said, said], [said, said]),
        ([thought, text("assistant", "yes", "output_text")], [{**said, "reasoning_content": "hm"}]),
        ([secret, said], [said]),
        (
            [thought, said, call("c1"), result],
            [{**said, "reasoning_content": "hm", "tool_calls": made}, tool],
        ),
        ([call("c1"), said, result], [{**said, "tool_calls": made}, tool]),
        (
            [call("c1"), call("c1"), result, said],
            [{"role": "assistant", "content": None, "tool_calls": made * 2}, tool, said],
        ),
        ([{**result, "output": [{"type": "input_text", "text": "go"}]}], [{**tool, "content": part, "name": None}]),
    ]
    for given, expected in cases:
        found = messages(given)
        assert [{k: v for k, v in m.items() if v is not None or k == "content"} for m in found] == [
            {k: v for k, v in m.items() if v is not None or k == "content"} for m in expected
        ], given


def test_instructions_are_the_one_system_message() -> None:
    own = {"role": "system", "content": "Be kind."}
    assert messages("go", "Be brief.") == [{"role": "system", "content": "Be brief."}, *user("go")]
    assert messages([own, *user("go")], "Be brief.") == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        *user("go"),
    ]
    with pytest.raises(RequestError):
        messages([], "Be brief.")


def test_what_came_back_can_be_sent_again(server: Served) -> None:
    """A client's loop: the items of an answer, then the results of its calls, then the next question."""
    talk: list[Any] = user("both")
    answer = server.ask(PATH, input=talk, tools=TOOLS)
    talk += answer["output"]
    for item in answer["output"]:
        if item["type"] == "function_call":
            talk.append({"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"})
    talk += user("fruit")
    assert server.ask(PATH, input=talk, tools=TOOLS)["output"][-1]["content"][0]["text"] == ANSWERS["fruit"]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": 7}),
        ("input[0]", {"input": [7]}),
        ("input[0].type", {"input": [{}]}),
        ("input[0].role", {"input": [{"role": "tool", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content[1].type", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"},
                                                                            {"type": "input_image"}]}]}),
        ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        ("input[0].type", {"input": [{"type": "web_search_call", "id": "ws_1"}]}),
        ("input[0]", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input[0].call_id", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        ("input[0].output", {"input": [{"type": "function_call_output", "call_id": "c"}]}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("truncation", {"truncation": "auto"}),
        ("n", {"n": 2}),
        ("max_completion_tokens", {"max_completion_tokens": 5}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_output_tokens", {"max_output_tokens": 4090}),
        ("input", {"input": "x" * 5000}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"top_logprobs": 21, "include": LOGPROBS}),
        ("include[0]", {"include": ["everything"]}),
        ("metadata", {"metadata": {"a": 1}}),
        ("temperature", {"temperature": -1}),
        ("top_k", {"top_k": -7}),
        ("reasoning", {"reasoning": {"effort": 7}}),
        ("text", {"text": "x"}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("tools", {"tools": "x"}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
        ("tools[0].parameters", {"tools": [{"type": "function", "name": "f", "parameters": 7}]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "nope"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": TOOLS}}),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_a_400_that_names_the_field(field: str, body: dict[str, Any], server: Served) -> None:
    for stream in (False, True):
        given = body if "input" in body or field == "input" else {"input": "fruit", **body}
        error = server.error(PATH, {**given, "stream": stream})
        assert error["param"] == field and error["type"] == "invalid_request_error"
        assert field in error["message"] or error["code"] == "context_length_exceeded", error["message"]


def test_a_template_that_refuses_refuses_the_input(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(ANSWERS, monkeypatch, "{{ raise_exception('Not so') }}") as (llm, _, _), served(llm) as own:
        error = own.error(PATH, {"input": "fruit"})
        assert error["param"] == "input" and "Not so" in error["message"]


def test_nothing_is_stored(server: Served) -> None:
    kept = server.ask(PATH, input="fruit", store=True)
    for answer in (server.http.get(f"{PATH}/{kept['id']}"), server.http.delete(f"{PATH}/{kept['id']}")):
        assert answer.status_code == 404 and kept["id"] in answer.json()["error"]["message"]
        assert answer.json()["error"]["type"] == "not_found_error"


def test_another_model_is_a_404(server: Served) -> None:
    assert server.error(PATH, {"model": "other", "input": "fruit"}, 404)["code"] == "model_not_found"
    assert server.ask(PATH, model="tiny", input="fruit")["model"] == "tiny"


# ---- life ------------------------------------------------------------------------------------------------------------


def test_an_error_in_a_stream_is_an_event_and_a_failed_response(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(ANSWERS, monkeypatch) as (llm, rig, steps), served(llm) as own:
        steps.delay = 0.01
        body = {"input": "long", "timeout": 0.2}
        assert own.error(PATH, body, 504)["code"] == "request_timeout"
        stream = events(own, **body)
        error, failed = stream[-2:]
        assert error["type"] == "error" and error["code"] == "request_timeout" and "0.2 s" in error["message"]
        assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
        assert failed["response"]["error"] == {"code": "server_error", "message": error["message"]}
        (item,) = failed["response"]["output"]
        deltas = "".join(e["delta"] for e in stream if e["type"] == "response.output_text.delta")
        assert item["status"] == "incomplete" and item["content"][0]["text"] == deltas and len(deltas) > 3
        until(lambda: not rig.kv.holdings)


def test_a_stream_begins_before_its_first_token_and_ends_when_its_client_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scripted(ANSWERS, monkeypatch) as (llm, rig, steps), served(llm) as own:
        steps.hold()
        with own.http.stream("POST", PATH, json={"input": "long", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created" and not steps.done
        steps.free.set()
        until(lambda: not rig.kv.holdings and not own.state.admission.sequences)
        assert llm.stats().counters.aborted == 1
        assert own.metric('octavo:http_requests_total{path="/v1/responses",status="200"}'.partition("{")[0]) >= 1


def test_what_goes_beyond_the_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = ServerSettings(port=0, access_log="off", max_waiting=0)
    with scripted(ANSWERS, monkeypatch, max_running=1) as (llm, _, steps), served(llm, limits) as own:
        steps.hold()
        with own.http.stream("POST", PATH, json={"input": "fruit", "stream": True}) as answer:
            assert answer.status_code == 200
            for stream in (False, True):
                refused = own.post(PATH, {"input": "fruit", "stream": stream})
                assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            steps.free.set()
            assert b"response.completed" in answer.read()
