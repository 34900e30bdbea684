"""The official client's newer interface, as its documentation uses it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from octavo.loadgen.process import ServerProcess
from weather import Weather

ASK = "Name five fruits."
LOGPROBS: Any = ["message.output_text.logprobs"]
ENDLESS: dict[str, Any] = {"ignore_eos": True}


def test_a_text_is_answered(client: openai.OpenAI, model: str) -> None:
    told = client.responses.create(model=model, input=ASK, max_output_tokens=8, temperature=0, extra_body=ENDLESS)
    Response.model_validate(told.model_dump())  # the client takes anything; this is what it should be
    assert told.status == "incomplete" and told.output_text and told.usage is not None
    assert told.incomplete_details is not None and told.incomplete_details.reason == "max_output_tokens"
    assert told.usage.output_tokens == 8 and told.temperature == 0
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": ASK}], max_tokens=8, temperature=0, extra_body=ENDLESS
    )
    assert told.output_text == chat.choices[0].message.content


def test_a_stream_is_the_plain_answer(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "input": ASK, "instructions": "Be brief.", "max_output_tokens": 24}
    asked |= {"include": LOGPROBS, "top_logprobs": 2, "extra_body": {"seed": 5}}
    plain = client.responses.create(**asked)
    text, last = "", None
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert text == plain.output_text and last is not None
    assert last.type in ("response.completed", "response.incomplete")
    assert last.response.usage is not None and plain.usage is not None
    assert last.response.usage.output_tokens == plain.usage.output_tokens
    part = plain.output[0].content[0]  # type: ignore[union-attr,index]
    assert part.type == "output_text" and part.logprobs is not None
    assert len(part.logprobs) == plain.usage.output_tokens and len(part.logprobs[0].top_logprobs) == 2


def test_parsed_answers(client: openai.OpenAI, model: str) -> None:
    """A Pydantic model as the form of the answer, through the client's own parser, plain and streamed."""
    asked: dict[str, Any] = {"model": model, "input": ASK, "text_format": Weather, "max_output_tokens": 100}
    asked["extra_body"] = {"seed": 2}
    done = client.responses.parse(**asked)
    assert isinstance(done.output_parsed, Weather)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_parsed == done.output_parsed and final.output_text == done.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_json_mode(client: openai.OpenAI, model: str) -> None:
    text: Any = {"format": {"type": "json_object"}}
    done = client.responses.create(model=model, input=ASK, text=text, max_output_tokens=60, extra_body={"seed": 3})
    assert done.output_text.lstrip().startswith("{")
    if done.status == "completed":
        json.loads(done.output_text)


def test_a_forced_call_and_its_result(client: openai.OpenAI, model: str) -> None:
    """Plain, streamed, and the loop that sends the items back with the call's result."""
    schema = openai.pydantic_function_tool(Weather, name="report")["function"]
    tools: Any = [{"type": "function", **schema}]
    choice: Any = {"type": "function", "name": "report"}
    asked: dict[str, Any] = {"model": model, "tools": tools, "max_output_tokens": 200, "extra_body": {"seed": 1}}
    done = client.responses.create(**asked, input=ASK, tool_choice=choice)
    (call,) = done.output
    assert call.type == "function_call" and call.name == "report" and call.status == "completed"
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**asked, input=ASK, tool_choice=choice) as stream:
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call" and streamed.arguments == call.arguments
    talk: list[Any] = [{"role": "user", "content": ASK}, *done.output]
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "noted"})
    again = client.responses.create(**asked, input=talk, tool_choice="none")
    assert again.status in ("completed", "incomplete") and again.output[0].type == "message"


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    for field, value in (("previous_response_id", "resp_1"), ("background", True), ("temperature", -1)):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model=model, input=ASK, **{field: value})
        assert caught.value.param == field
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError):
        client.responses.delete("resp_1")


def test_many_at_once(tiny_server: ServerProcess) -> None:
    """16 concurrent streams, each with its own answer."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none") as client:

            async def one(i: int, stream: bool) -> str:
                asked: dict[str, Any] = {"model": tiny_server.model, "input": f"{i} " * 9, "max_output_tokens": 12}
                asked |= {"temperature": 0, "extra_body": ENDLESS}
                if not stream:
                    return (await client.responses.create(**asked)).output_text
                events = await client.responses.create(**asked, stream=True)
                return "".join([e.delta async for e in events if e.type == "response.output_text.delta"])

            streamed = await asyncio.gather(*(one(i, True) for i in range(16)))
            plain = await asyncio.gather(*(one(i, False) for i in range(16)))
            assert streamed == plain and len(set(plain)) > 8

    asyncio.run(run())


def test_a_real_model_answers(real_server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none")
    ask = "What is the capital of France? Answer in one sentence."
    done = client.responses.create(model=real_server.model, input=ask, temperature=0, max_output_tokens=40)
    assert "Paris" in done.output_text and done.status == "completed"
