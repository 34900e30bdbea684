"""A real model follows guides: it answers in their form, and what it says makes sense in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import jsonschema
import pytest

from octavo import LLM, Guide, ModelError, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "capital": {"type": "string", "maxLength": 30},
        "in_europe": {"type": "boolean"},
        "languages": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "capital", "in_europe", "languages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    try:
        made = LLM(request.param, kv_blocks=200)
    except ModelError as error:
        if "OCTAVO_REAL_MODELS" in os.environ:
            raise
        pytest.skip(f"{request.param} is not here ({error})")
    with made:
        yield made


def test_an_object_by_a_schema(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120, guide=Guide.json(SCHEMA))
    question = "France as JSON, with its name, its capital, whether it is in Europe, and its languages:\n"
    if llm.parts.template.source is not None:
        output = llm.chat([{"role": "user", "content": question}], params)[0]
    else:
        output = llm.generate(question, params)[0]
    found = output.outputs[0]
    assert found.finish_reason == "stop"
    value = json.loads(found.text)
    jsonschema.validate(value, SCHEMA)
    assert "Paris" in value["capital"], "the mask leaves the model its say"


def test_a_choice_and_an_expression(llm: LLM) -> None:
    prompts = ["The capital of France is", "Christmas is on this date, as MM-DD:"]
    asked = [Guide.choice([" Berlin", " Paris", " Rome"]), Guide.regex(" ?[01][0-9]-[0-3][0-9]")]
    outputs = llm.generate(prompts, [SamplingParams(temperature=0.0, max_tokens=12, guide=g) for g in asked])
    first, second = (output.outputs[0].text for output in outputs)
    assert first.strip() == "Paris"
    assert re.fullmatch(" ?[01][0-9]-[0-3][0-9]", second)


def test_branches_each_in_the_form(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, temperature=1.0, max_tokens=150, guide=Guide.json(SCHEMA))
    for output in llm.generate("A country in JSON: ", params)[0].outputs:
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), SCHEMA)
