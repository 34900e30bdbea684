"""A tiny real model behind the server: the official client, scores against transformers, guides, beams, sessions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

import tiny
from octavo import LLM, SamplingParams
from octavo.server.settings import ServerSettings
from serving import Served, served, tiny_llm, until, user

if TYPE_CHECKING:
    from conftest import TinyModels

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def folder(tiny_models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_models.get("llama").save(tmp_path_factory.mktemp("chat") / "llama")
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with tiny_llm(folder) as llm, served(llm, ServerSettings(port=0, access_log="off")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as found:
        yield found


def test_the_official_client_completes(client: openai.OpenAI, folder: Path) -> None:
    """Texts, ids, lists, streams; and what comes is what the offline engine says."""
    prompts = ["The sea is", "def f(x):"]
    with LLM(str(folder), threads=1, kv_blocks=256, kv_dtype="float32", compute="exact") as llm:
        expected = [o.outputs[0].text for o in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=12))]
    done = client.completions.create(model="tiny", prompt=prompts, max_tokens=12, temperature=0)
    assert [c.text for c in done.choices] == expected and done.usage is not None and done.usage.completion_tokens == 24
    assert done.system_fingerprint and "float32-exact" in done.system_fingerprint
    stream = client.completions.create(model="tiny", prompt=prompts[0], max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]


def test_the_official_client_chats(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": "tiny", "messages": user("What is it?"), "max_completion_tokens": 16}
    done = client.chat.completions.create(**given, seed=7, logprobs=True, top_logprobs=2, n=2)
    assert [c.index for c in done.choices] == [0, 1] and done.choices[0].finish_reason in ("stop", "length")
    logprobs = done.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None and len(logprobs.content[0].top_logprobs) == 2
    again = client.chat.completions.create(**given, seed=7, n=2)
    assert [c.message.content for c in again.choices] == [c.message.content for c in done.choices]
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == (again.usage.prompt_tokens - 1) // 16 * 16
    parts = ["", ""]
    usage = None
    for chunk in client.chat.completions.create(
        **given, seed=7, n=2, stream=True, stream_options={"include_usage": True}
    ):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert parts == [c.message.content for c in done.choices]
    assert usage is not None and usage.completion_tokens == again.usage.completion_tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_r38_the_official_client_calls_tools(choice: Any, client: openai.OpenAI) -> None:
    """R38: required and named: the call is made whatever the model would like to say, streamed and plain."""
    given: dict[str, Any] = {"model": "tiny", "messages": user("Rain?"), "tools": [WEATHER], "tool_choice": choice}
    done = client.chat.completions.create(**given, temperature=0, max_tokens=200, parallel_tool_calls=False)
    calls = done.choices[0].message.tool_calls
    assert calls is not None and len(calls) == 1 and calls[0].function.name == "weather"
    arguments = json.loads(calls[0].function.arguments)
    assert set(arguments) == {"city", "days"} and isinstance(arguments["days"], int)
    assert done.choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    text, names = "", []
    for chunk in client.chat.completions.create(
        **given, temperature=0, max_tokens=200, parallel_tool_calls=False, stream=True
    ):
        for call in chunk.choices[0].delta.tool_calls or []:
            assert call.function is not None
            names += [call.function.name] if call.function.name else []
            text += call.function.arguments or ""
    assert names == ["weather"] and text == calls[0].function.arguments


def test_the_official_client_gets_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x", max_tokens=10**6)
    assert long.value.code == "context_length_exceeded" and long.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    assert [m.id for m in client.models.list()] == ["tiny"]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}}, dict),
        ({"guided_json": SCHEMA}, dict),
        ({"guided_choice": ["yes", "no"]}, str),
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, str),
        ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}, "max_tokens": 12, "ignore_eos": False}, str),
        ({"response_format": {"type": "text"}}, str),
        ({"top_k": 1, "temperature": 1}, str),
    ],
)
def test_r40_answers_of_a_given_form(extra: dict[str, Any], right: type, server: Served) -> None:
    """With log-probabilities of what the form rules out: no minus infinity, strict JSON."""
    body = {"messages": user("Who?"), "temperature": 0, "max_tokens": 60, "logprobs": True, "top_logprobs": 5, **extra}
    choice = server.ask(CHAT, **body)["choices"][0]
    text = choice["message"]["content"]
    assert all(math.isfinite(e["logprob"]) for e in choice["logprobs"]["content"])
    if right is dict:
        assert set(json.loads(text)) == {"name", "age"}
    if "guided_choice" in extra:
        assert text in ("yes", "no")
    if "guided_regex" in extra:
        assert len(text) == 8 and text[3] == "-"
    if "structured_outputs" in extra:
        assert text.startswith("ab")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_schema", "json_schema": {"name": "p", "schema": {"type": "nonsense"}}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "p"}}),
        ("guided_json", {"type": "nonsense"}),
        ("guided_regex", "(("),
        ("guided_grammar", "start: nothing"),
    ],
)
def test_a_bad_form_is_a_400(field: str, value: Any, server: Served) -> None:
    for stream in (False, True):
        error = server.error(CHAT, {"messages": user("x"), field: value, "stream": stream})
        assert error["param"].split(".")[0] == field


@pytest.mark.parametrize("most", [0, 1])
def test_r39_scores_of_a_prompt_are_transformers(most: int, server: Served, tiny_models: TinyModels) -> None:
    """R39: echo with log-probabilities, of a text, of ids, of a list of both."""
    truth = tiny_models.truth("llama")
    ids = truth.tokens[:60]
    text = tiny.tokenizer().decode(ids)
    assert tiny.tokenizer().encode(text).ids == ids
    for prompt in (text, ids, [text, ids]):
        answer = server.ask(TEXT, prompt=prompt, echo=True, logprobs=5, max_tokens=most, temperature=0)
        assert answer["usage"]["completion_tokens"] == most * len(answer["choices"])
        for choice in answer["choices"]:
            lists = choice["logprobs"]
            assert choice["text"].startswith(text)
            assert all(len(values) == 60 + most for values in lists.values())
            assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
            for i in range(1, 60):
                assert abs(lists["token_logprobs"][i] - truth.logprobs[i - 1][ids[i]]) < truth.bound
                assert 5 <= len(lists["top_logprobs"][i]) <= 6
                best = max(lists["top_logprobs"][i].values())
                assert abs(best - truth.logprobs[i - 1].max()) < truth.bound
            for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
                if not token.startswith("bytes:"):
                    assert choice["text"][offset : offset + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("extra", "form"),
    [
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
        ({"guided_grammar": 'start: "a" "b" "c"'}, "abc"),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_json": {"enum": [17]}}, "17"),
    ],
)
def test_completions_of_a_given_form(extra: dict[str, Any], form: str, stream: bool, server: Served) -> None:
    body = {"prompt": "Who?", "temperature": 0, "max_tokens": 30, **extra}
    if stream:
        text = "".join(chunk["choices"][0]["text"] for chunk in server.chunks(TEXT, **body))
    else:
        text = server.ask(TEXT, **body)["choices"][0]["text"]
    assert re.fullmatch(form, text)


def test_logit_bias_decides(server: Served) -> None:
    usual = server.ask(TEXT, prompt="The sea", temperature=0, max_tokens=1, return_token_ids=True)["choices"][0]
    token = usual["token_ids"][0]
    banned = {"prompt": "The sea", "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}
    ids = server.ask(TEXT, **banned, logit_bias={str(token): -100})["choices"][0]["token_ids"]
    assert token not in ids
    assert server.ask(TEXT, **banned, logit_bias={"77": 100})["choices"][0]["token_ids"] == [77] * 6


def test_best_of_are_the_offline_engines(server: Served, folder: Path) -> None:
    body = {"prompt": "The sea", "best_of": 4, "n": 2, "max_tokens": 8, "temperature": 1, "seed": 3}
    choices = server.ask(TEXT, **body)["choices"]
    params = SamplingParams(best_of=4, n=2, max_tokens=8, temperature=1.0, seed=3)
    with LLM(str(folder), threads=1, kv_blocks=256, kv_dtype="float32", compute="exact") as llm:
        best = llm.generate("The sea", params)[0].outputs
        others = llm.generate("The sea", replace(params, n=4))[0].outputs
    assert [c["text"] for c in choices] == [o.text for o in best] and choices[0]["logprobs"] is None
    assert {o.text for o in best} < {o.text for o in others}


def test_beams_over_http(server: Served, folder: Path) -> None:
    body = {"prompt": "The sea", "use_beam_search": True, "beam_width": 4, "n": 2, "max_tokens": 8}
    choices = server.ask(TEXT, **body)["choices"]
    with LLM(str(folder), threads=1, kv_blocks=256, kv_dtype="float32", compute="exact") as llm:
        expected = llm.beam_search("The sea", width=4, max_tokens=8, n=2)[0].outputs
    assert [c["text"] for c in choices] == [o.text for o in expected]
    assert [c["score"] for c in choices] == pytest.approx([o.score for o in expected])


def test_sessions_over_http(server: Served) -> None:
    made = server.ask("/v1/sessions", prompt="Q: What is it? A:")
    path, length = f"/v1/sessions/{made['id']}", made["length"]
    added = server.ask(path + "/append", text=" It is")
    assert added["length"] == length + added["added"]
    answer = server.ask(path + "/generate", temperature=0, max_tokens=6)
    assert answer["choices"][0]["finish_reason"] == "length" and answer["length"] == added["length"] + 6
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    text = server.http.get(path).json()["text"]
    assert text == "Q: What is it? A: It is" + answer["choices"][0]["text"]
    assert server.ask(path + "/rewind", to=added["length"])["length"] == added["length"]
    twins = server.ask(path + "/fork", n=2)["data"]
    again = [server.ask(f"/v1/sessions/{t['id']}/generate", temperature=0, max_tokens=6) for t in twins]
    assert [a["choices"][0]["text"] for a in again] == [answer["choices"][0]["text"]] * 2
    scores = server.ask(path + "/score", texts=[" one", " two three"])["data"]
    assert all(s["total"] == pytest.approx(sum(s["logprobs"])) and s["total"] < 0 for s in scores)
    assert server.error(path + "/rewind", {"to": 10**6})["param"] == "to"
    assert server.error(path + "/generate", {"stream": True})["param"] == "stream"
    for id in (made["id"], *(t["id"] for t in twins)):
        assert server.http.delete(f"/v1/sessions/{id}").json()["deleted"]
        assert server.error(f"/v1/sessions/{id}/generate", {}, 404)["param"] == "id"
    until(lambda: not server.llm.parts.engine.kv.holdings)


def test_idle_sessions_go(folder: Path) -> None:
    settings = ServerSettings(port=0, access_log="off", session_idle=1, max_sessions=2)
    with tiny_llm(folder) as llm, served(llm, settings) as own:
        ids = [own.ask("/v1/sessions", prompt="Once upon a time")["id"] for _ in range(2)]
        assert own.error("/v1/sessions", {}, 429)["code"] == "too_many_sessions"
        own.ask(f"/v1/sessions/{ids[0]}/generate", max_tokens=4)
        until(lambda: not own.state.sessions.kept, 10)
        until(lambda: not llm.parts.engine.kv.holdings)


def test_a_session_is_its_key_owners(folder: Path) -> None:
    with tiny_llm(folder) as llm, served(llm, keys={"key-of-alice": "alice", "key-of-bob": "bob"}) as own:
        alice, bob = ({"Authorization": f"Bearer key-of-{name}"} for name in ("alice", "bob"))
        path = "/v1/sessions/" + own.post("/v1/sessions", {"prompt": "Dear diary"}, headers=alice).json()["id"]
        assert own.http.get(path, headers=alice).json()["text"] == "Dear diary"
        assert own.http.get(path, headers=bob).status_code == own.http.delete(path, headers=bob).status_code == 404
        assert own.error(path + "/generate", {}, 404, headers=bob)["param"] == "id"
        assert own.http.delete(path, headers=alice).json()["deleted"]
