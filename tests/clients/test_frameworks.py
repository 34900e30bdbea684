"""litellm, LangChain and instructor, unmodified, on the same server."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Literal

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no table of prices from the network

import instructor
import litellm
import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from octavo.loadgen.process import ServerProcess

TALK: list[Any] = [{"role": "user", "content": "Name five fruits."}]


class Review(BaseModel):
    """A judgement of a film."""

    model_config = ConfigDict(extra="forbid")  # a random model would make use of the freedom

    verdict: Literal["good", "bad"]
    stars: Literal[1, 2, 3, 4, 5]
    watched: bool


@pytest.fixture
def given(tiny_server: ServerProcess) -> dict[str, Any]:
    return {"model": f"openai/{tiny_server.model}", "api_base": f"{tiny_server.url}/v1", "api_key": "none"}


@pytest.fixture
def chat(tiny_server: ServerProcess) -> ChatOpenAI:
    options: dict[str, Any] = {"base_url": f"{tiny_server.url}/v1", "api_key": "none", "model": tiny_server.model}
    return ChatOpenAI(**options, temperature=0, max_tokens=200, max_retries=0)


# ---- litellm ---------------------------------------------------------------------------------------------------------


def test_litellm_completes_and_streams(given: dict[str, Any]) -> None:
    asked: dict[str, Any] = {**given, "messages": TALK, "temperature": 0, "max_tokens": 16}
    plain: Any = litellm.completion(**asked)
    assert plain.choices[0].message.content and plain.usage.completion_tokens <= 16
    chunks: Any = litellm.completion(**asked, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == plain.choices[0].message.content
    waited: Any = asyncio.run(litellm.acompletion(**asked))
    assert waited.choices[0].message.content == plain.choices[0].message.content


def test_litellm_text_completion(given: dict[str, Any], tiny_server: ServerProcess) -> None:
    asked = {**given, "model": f"text-completion-openai/{tiny_server.model}"}
    told: Any = litellm.text_completion(**asked, prompt="The sea is", max_tokens=6, temperature=0)
    assert told.choices[0].text and told.usage.completion_tokens == 6


def test_litellm_responses(given: dict[str, Any]) -> None:
    asked: dict[str, Any] = {**given, "input": "Name five fruits.", "temperature": 0, "max_output_tokens": 16}
    plain: Any = litellm.responses(**asked)
    events: Any = litellm.responses(**asked, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert plain.output[0].content[0].text == "".join(deltas) and deltas


def test_litellm_knows_our_errors(given: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**given, messages=TALK, temperature=-2, max_retries=0)


# ---- LangChain -------------------------------------------------------------------------------------------------------


def test_langchain_invokes_batches_and_streams(chat: ChatOpenAI) -> None:
    messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
    one = chat.invoke(messages)
    assert one.content and one.usage_metadata is not None and one.usage_metadata["output_tokens"] <= 200  # type: ignore[union-attr]
    assert "".join(str(c.content) for c in chat.stream(messages)) == one.content
    assert [m.content for m in chat.batch([messages, messages])] == [one.content] * 2
    assert asyncio.run(chat.ainvoke(messages)).content == one.content


def test_langchain_on_responses(tiny_server: ServerProcess) -> None:
    options: dict[str, Any] = {"base_url": f"{tiny_server.url}/v1", "api_key": "none", "model": tiny_server.model}
    newer = ChatOpenAI(**options, temperature=0, max_tokens=24, max_retries=0, use_responses_api=True)
    messages = [SystemMessage("Be brief."), HumanMessage("Hello")]
    one = newer.invoke(messages)
    assert one.text and one.usage_metadata is not None and one.usage_metadata["output_tokens"] <= 24
    assert "".join(chunk.text for chunk in newer.stream(messages)) == one.text
    assert newer.invoke([*messages, one, HumanMessage("And then?")]).text


def test_langchain_chains_and_structured_output(chat: ChatOpenAI) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "You judge films."), ("human", "{film}")])
    for method in ("json_schema", "function_calling"):
        review = (prompt | chat.with_structured_output(Review, method=method)).invoke({"film": "Stalker"})  # type: ignore[arg-type]
        assert isinstance(review, Review), method


def test_langchain_text_completion(tiny_server: ServerProcess) -> None:
    options: dict[str, Any] = {"base_url": f"{tiny_server.url}/v1", "api_key": "none", "model": tiny_server.model}
    assert OpenAI(**options, temperature=0, max_tokens=8).invoke("The sea is")


# ---- instructor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor(tiny_server: ServerProcess, mode: instructor.Mode) -> None:
    inner = openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none")
    client = instructor.from_openai(inner, mode=mode)
    review = client.chat.completions.create(
        model=tiny_server.model, response_model=Review, messages=TALK, max_tokens=200, max_retries=0, seed=2
    )
    assert isinstance(review, Review)
