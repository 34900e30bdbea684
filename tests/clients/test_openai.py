"""The official client, as its documentation uses it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from octavo.loadgen.process import ServerProcess
from weather import Weather

TALK: list[Any] = [{"role": "user", "content": "Name five fruits."}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def test_models(client: openai.OpenAI, model: str) -> None:
    assert [m.id for m in client.models.list()] == [model]
    assert client.models.retrieve(model).id == model


def test_completions_of_texts_and_ids(client: openai.OpenAI, model: str) -> None:
    one = client.completions.create(model=model, prompt="The sea is", max_tokens=8, **GREEDY)
    assert one.choices[0].finish_reason == "length" and one.usage is not None and one.usage.completion_tokens == 8
    both = client.completions.create(model=model, prompt=["The sea is", "Once upon"], max_tokens=8, **GREEDY)
    assert [c.index for c in both.choices] == [0, 1] and both.choices[0].text == one.choices[0].text
    ids = client.completions.create(model=model, prompt=[[5, 6, 7], [8, 9]], max_tokens=4, **GREEDY)
    assert len(ids.choices) == 2 and ids.usage is not None and ids.usage.prompt_tokens == 5


def test_echo_and_logprobs(client: openai.OpenAI, model: str) -> None:
    told = client.completions.create(model=model, prompt="The sea is", max_tokens=3, logprobs=2, echo=True, **GREEDY)
    choice = told.choices[0]
    assert choice.text.startswith("The sea is") and choice.logprobs is not None
    lists = choice.logprobs
    assert lists.tokens and lists.token_logprobs and lists.token_logprobs[0] is None
    assert len(lists.tokens) == len(lists.token_logprobs) == told.usage.total_tokens  # type: ignore[union-attr]
    assert "".join(lists.tokens).startswith("The sea is")  # bytes that are no text alone are spelled out


def test_a_stream_is_the_plain_answer(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": TALK, "max_tokens": 24, "seed": 5, "n": 2}
    plain = client.chat.completions.create(**asked)
    texts, ends, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]  # type: ignore[call-overload]
    assert texts == [c.message.content for c in plain.choices] and texts[0] != texts[1]
    assert ends == [c.finish_reason for c in plain.choices]
    assert usage is not None and plain.usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (plain.usage.prompt_tokens, plain.usage.completion_tokens)


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    told = client.chat.completions.create(
        model=model, messages=TALK, max_completion_tokens=4, logprobs=True, top_logprobs=3, **GREEDY
    )
    scored = told.choices[0].logprobs
    assert scored is not None and scored.content is not None and len(scored.content) == 4
    for entry in scored.content:
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].logprob == entry.logprob <= 0


def test_cached_tokens_are_told(client: openai.OpenAI, model: str) -> None:
    prompt = "All the trees of the field shall clap their hands, and the hills break forth into singing. " * 2
    for _ in range(2):
        usage = client.completions.create(model=model, prompt=prompt, max_tokens=2, **GREEDY).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens


def test_parsed_answers(client: openai.OpenAI, model: str) -> None:
    """A Pydantic model as the form of the answer, through the client's own parser."""
    done = client.chat.completions.parse(model=model, messages=TALK, response_format=Weather, max_tokens=100)
    assert isinstance(done.choices[0].message.parsed, Weather)


def test_a_forced_tool_call(client: openai.OpenAI, model: str) -> None:
    tool: Any = openai.pydantic_function_tool(Weather, name="report")
    choice: Any = {"type": "function", "function": {"name": "report"}}
    asked: dict[str, Any] = {"model": model, "messages": TALK, "tools": [tool], "tool_choice": choice, "seed": 1}
    done = client.chat.completions.create(**asked, max_tokens=200)
    (call,) = done.choices[0].message.tool_calls or ()
    assert call.type == "function" and call.function.name == "report"
    Weather.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked, max_tokens=200) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert [c.function.arguments for c in streamed] == [call.function.arguments]


def test_json_mode(client: openai.OpenAI, model: str) -> None:
    """A random model may write JSON without end; what it writes is a beginning of it."""
    done = client.chat.completions.create(
        model=model, messages=TALK, response_format={"type": "json_object"}, max_tokens=60, seed=3
    )
    text = done.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if done.choices[0].finish_reason == "stop":
        json.loads(text)


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt="x", temperature=-1)
    assert caught.value.param == "temperature" and "temperature" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=model, prompt="x", suffix="y")


def test_many_at_once(tiny_server: ServerProcess) -> None:
    """32 concurrent streams, each with its own answer."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:

            async def one(i: int, stream: bool) -> str:
                asked: dict[str, Any] = {"model": tiny_server.model, "prompt": [i + 3] * 9, "max_tokens": 12, **GREEDY}
                if not stream:
                    return (await client.completions.create(**asked)).choices[0].text
                chunks = await client.completions.create(**asked, stream=True)
                return "".join([c.text async for chunk in chunks for c in chunk.choices])

            streamed = await asyncio.gather(*(one(i, True) for i in range(32)))
            plain = await asyncio.gather(*(one(i, False) for i in range(32)))
            assert streamed == plain and len(set(plain)) > 16

    asyncio.run(run())


def test_a_real_model_answers(real_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none")
    ask: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    done = client.chat.completions.create(model=real_server.model, messages=ask, temperature=0, max_tokens=40)
    assert "Paris" in (done.choices[0].message.content or "") and done.choices[0].finish_reason == "stop"
