"""Outputs that follow a guide: always of its form, and nobody's bytes change for it."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest

import real
import tiny
from conftest import TinyModels
from engines import answer
from octavo.core.guide import Guide
from octavo.core.request import Request
from octavo.engine.build import Parts
from octavo.errors import EngineError
from octavo.text.guides import Matcher
from octavo.text.tools import FORMATS, CallArguments, CallStart, TextPiece

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dög", 3, None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "home": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{3}$"}, "floor": {"enum": [1, 2]}},
            "required": ["zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "tags"],
    "additionalProperties": False,
}


def text_of(request: Request, branch: int = 0) -> str:
    return str(request.readers[branch].text)


def guided(parts: Parts, guide: Guide, most: int = 200, prompt: Any = None, **given: Any) -> Request:
    """A request that is drawn hot, so that whatever the guide allows comes at some time."""
    given = {"temperature": 1.5, "seed": 1, "ignore_eos": False, "logprobs": None, **given}
    return real.add(parts, prompt or tiny.prompt(20), most, guide=guide, **given)


def ends(request: Request) -> list[str | None]:
    return [s.finish_reason for s in request.branches]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Objects and arrays with bounds, optional properties, enumerations, strings with patterns and all of Unicode."""
    leaves: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randint(0, 6)},
        {"type": "string", "pattern": "^[a-zäöü]{2,5}$"},
        {"type": "integer", "minimum": -5, "maximum": rng.randint(0, 2000)},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["α", "b c", 7, True]},
        {"const": "fixed"},
    ]
    if depth > 2 or rng.random() < 0.35:
        return rng.choice(leaves)
    inner = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
    shape = rng.randrange(3)
    if shape == 0:
        low = rng.randint(0, 2)
        return {"type": "array", "items": inner[0], "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if shape == 1:
        return {"anyOf": inner}
    names = [f"k{i}" if rng.random() < 0.8 else f"schlüssel {i}" for i in range(len(inner))]
    required = [name for name in names if rng.random() < 0.6]
    properties = dict(zip(names, inner, strict=True))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_r48_random_schemas_are_obeyed(family: str, tiny_models: TinyModels) -> None:
    """R48: in one batch of many, each with a schema of its own, every output that ends is valid by its schema."""
    rng = random.Random(48)
    with real.engine(tiny_models.folder(family), kv_blocks=1500) as parts:
        pairs = []
        for i in range(24):
            schema = random_schema(rng)
            pairs.append(
                (schema, guided(parts, Guide.json(schema), 300, seed=i, temperature=rng.choice([0.0, 1.0, 3.0])))
            )
        real.finish(parts)
        done = 0
        for schema, request in pairs:
            assert request.error is None
            if ends(request) == ["stop"]:
                done += 1
                jsonschema.validate(json.loads(text_of(request)), schema)
        assert done >= 22, "all of these are bounded"


def test_r48_white_space_is_bounded(tiny_models: TinyModels) -> None:
    """R48: a model that loves spaces, tabs and newlines gets no more of them than the one form of the JSON has."""
    with real.engine(tiny_models.folder("llama")) as parts:
        spaces = [i for i in range(tiny.VOCAB) if parts.tokenizer.token_bytes(i).strip() == b""]
        bias = dict.fromkeys(spaces, 1000.0)
        schema = {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}, "c": {"type": "null"}},
            "required": ["a", "b", "c"],
            "additionalProperties": False,
        }
        request = guided(parts, Guide.json(schema), 60, logit_bias=bias)
        free = guided(parts, Guide.json(), 40, logit_bias=bias)
        real.finish(parts)
        assert ends(request) == ["stop"]
        value = json.loads(text_of(request))
        assert text_of(request) == json.dumps(value)
        jsonschema.validate(value, schema)
        assert "\n" not in text_of(free) and "  " not in text_of(free).split('"')[0]


def test_r48_too_few_tokens_end_with_length(tiny_models: TinyModels) -> None:
    with real.engine(tiny_models.folder("llama")) as parts:
        request = guided(parts, Guide.json(PERSON), 5)
        exact = guided(parts, Guide.choice(["ab"]), 1, logit_bias={})
        real.finish(parts)
        assert ends(request) == ["length"] and len(request.branches[0].output()) == 5
        assert ends(exact)[0] in ("length", "stop")


@pytest.mark.parametrize("schema", [{}, True, {"type": "object"}, None])
def test_schemas_that_say_little(schema: Any, tiny_models: TinyModels) -> None:
    with real.engine(tiny_models.folder("llama")) as parts:
        requests = [guided(parts, Guide.json(schema), 120, seed=i) for i in range(6)]
        real.finish(parts)
        for request in requests:
            assert request.error is None
            if ends(request) == ["stop"]:
                value = json.loads(text_of(request))
                assert schema in ({}, True) or isinstance(value, dict)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_regex_choice_and_grammar(temperature: float, tiny_models: TinyModels) -> None:
    lark = 'start: "<" word ("," word)* ">"\nword: /[a-c]{1,3}/\n'
    choices = ["yes", "no", 'may\\be [x] "q"\n', "yes, but", "übrigens"]
    with real.engine(tiny_models.folder("llama")) as parts:
        rows = [
            [
                guided(parts, Guide.regex(r"[0-9]{4}-[01][0-9] (ok|nö)"), temperature=temperature, seed=seed),
                guided(parts, Guide.choice(choices), temperature=temperature, seed=seed),
                guided(parts, Guide.lark(lark), 100, temperature=temperature, seed=seed),
            ]
            for seed in range(5)
        ]
        real.finish(parts)
        seen = set()
        for date, choice, words in rows:
            assert re.fullmatch(r"[0-9]{4}-[01][0-9] (ok|nö)", text_of(date))
            assert text_of(choice) in choices
            seen.add(text_of(choice))
            assert ends(date) == ends(choice) == ["stop"]
            if ends(words) == ["stop"]:
                assert re.fullmatch(r"<[abc]{1,3}(,[abc]{1,3})*>", text_of(words))
        assert temperature < 5 or len(seen) > 1


def test_end_tokens_wait_for_the_guide(tiny_models: TinyModels) -> None:
    """An end token comes only where the guide is fulfilled; ``min_tokens`` and ``ignore_eos`` hold it back from there,
    until nothing else may come."""
    with real.engine(tiny_models.folder("llama")) as parts:
        (end,) = parts.engine.eos_ids
        eager = {"logit_bias": {end: 1000.0}, "temperature": 0.0}
        early = guided(parts, Guide.regex("[ab]{3,9}"), **eager)
        later = guided(parts, Guide.regex("[ab]{3,9}"), min_tokens=7, **eager)
        never = guided(parts, Guide.regex("[ab]{3,9}"), ignore_eos=True, **eager)
        short = guided(parts, Guide.regex("[ab]{3}"), min_tokens=50, **eager)
        real.finish(parts)
        assert ends(early) == ends(later) == ends(never) == ends(short) == ["stop"]
        assert len(text_of(early)) >= 3 and early.branches[0].output()[-1] == end
        assert len(later.branches[0].output()) >= 7 or len(text_of(later)) == 9
        assert len(text_of(never)) == 9
        assert len(text_of(short)) == 3
        assert all(r.branches[0].stop_reason is None for r in (early, later, never, short))


def test_stops_and_special_tokens(tiny_models: TinyModels) -> None:
    """A stop string cuts a guided output like any other; special tokens never stand for text."""
    with real.engine(tiny_models.folder("llama")) as parts:
        stopped = guided(parts, Guide.regex("[ab]{4}:[cd]{30}"), stop=":")
        special = guided(parts, Guide.regex(r"(?s:.{30})"), logit_bias={0: 1000.0})
        real.finish(parts)
        assert re.fullmatch("[ab]{4}", text_of(stopped)) and stopped.branches[0].stop_reason == ":"
        assert 0 not in special.branches[0].output()


def test_a_guide_that_leaves_nothing_is_its_requests_error(tiny_models: TinyModels) -> None:
    with real.engine(tiny_models.folder("llama")) as parts:
        stuck = guided(parts, Guide.regex("zz"), bad_words=["z", "zz"])
        other = real.add(parts, tiny.prompt(30), 8)
        real.finish(parts)
        assert stuck.error is not None and "banned" in stuck.error
        assert other.error is None and len(other.branches[0].output()) == 8


def test_a_guide_that_grows_too_complex_is_its_requests_error(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some grammars only show on the way that no limit holds them; whoever runs beside them goes on."""
    with real.engine(tiny_models.folder("llama")) as parts:
        alone = real.add(parts, tiny.prompt(30), 20)
        real.finish(parts)
        compute = Matcher._compute

        def fails(matcher: Matcher) -> bytes:
            if matcher._count == 5:
                raise EngineError("the guide cannot be followed: it grew")
            return compute(matcher)

        monkeypatch.setattr(Matcher, "_compute", fails)
        wild = guided(parts, Guide.json(PERSON))
        other = real.add(parts, tiny.prompt(30), 20)
        real.finish(parts)
        assert wild.error is not None and "the guide cannot be followed" in wild.error
        assert answer(other) == answer(alone)


# ---- the promise: same request, same bytes -------------------------------------------------------------------------


def test_neighbours_keep_their_bytes(tiny_models: TinyModels) -> None:
    plain = {"temperature": 0.9, "seed": 5, "logprobs": 3}
    with real.engine(tiny_models.folder("llama")) as parts:
        alone = [real.add(parts, tiny.prompt(25, 100 * i), 20, **plain) for i in range(4)]
        real.finish(parts)
    with real.engine(tiny_models.folder("llama")) as parts:
        beside = []
        for i in range(4):
            guided(parts, Guide.json(PERSON), seed=i)
            beside.append(real.add(parts, tiny.prompt(25, 100 * i), 20, **plain))
        real.finish(parts)
    assert [answer(r) for r in beside] == [answer(r) for r in alone]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("preempt", ["swap", "recompute"])
def test_preemption_changes_nothing(family: str, preempt: str, tiny_models: TinyModels) -> None:
    """The same bytes from a pool too small for all, by swap and by recompute, with branches among them."""
    asked = [{"seed": i, "n": n, "logprobs": 2} for i, n in enumerate((1, 3, 1, 2))]

    def run(**settings: Any) -> tuple[list[dict[str, Any]], int]:
        with real.engine(tiny_models.folder(family), block_size=4, **settings) as parts:
            requests = [
                guided(parts, Guide.json(PERSON), 60, tiny.prompt(21, 90 * i), **a) for i, a in enumerate(asked)
            ]
            real.finish(parts)
            for request in requests:
                for branch, sequence in enumerate(request.branches):
                    if sequence.finish_reason == "stop":
                        jsonschema.validate(json.loads(text_of(request, branch)), PERSON)
            return [answer(r) for r in requests], sum(r.preemptions for r in requests)

    want, none = run(kv_blocks=2000)
    host = {"swap_memory": "64M"} if preempt == "swap" else {}
    got, some = run(kv_blocks=170 if family == "gemma3" else 28, preempt=preempt, max_batched_tokens=16, **host)
    assert none == 0 and some > 0
    assert got == want


def test_branches_follow_the_guide_each_on_its_own(tiny_models: TinyModels) -> None:
    with real.engine(tiny_models.folder("llama")) as parts:
        request = guided(parts, Guide.json(PERSON), 200, n=3)
        best = guided(parts, Guide.regex("[a-f]{8}"), n=2, best_of=4)
        real.finish(parts)
        texts = [text_of(request, b) for b in range(3)]
        assert ends(request) == ["stop"] * 3 and len(set(texts)) == 3
        for text in texts:
            jsonschema.validate(json.loads(text), PERSON)
        assert all(re.fullmatch("[a-f]{8}", text_of(best, b)) for b in range(4))


def test_aborting_a_guided_request_frees_its_blocks(tiny_models: TinyModels) -> None:
    with real.engine(tiny_models.folder("llama")) as parts:
        request = guided(parts, Guide.json(PERSON), 200)
        for _ in range(4):
            parts.engine.step()
        parts.engine.abort(request)
        assert parts.engine.kv.pool.free == parts.engine.kv.pool.size


def test_guides_in_sessions_and_chats(tiny_models: TinyModels) -> None:
    from octavo import LLM, SamplingParams

    with LLM(str(tiny_models.folder("llama")), kv_blocks=200) as llm, llm.session(tiny.prompt(12)) as session:
        params = SamplingParams(guide=Guide.choice(["red", "green"]), temperature=1.0, seed=3)
        first = session.generate(params)
        assert first.outputs[0].text in ("red", "green")
        session.append(" and ")
        assert session.generate(params).outputs[0].text in ("red", "green")


def tool(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize("which", [None, "paint"])
@pytest.mark.parametrize("name", list(FORMATS))
def test_r38_a_call_is_forced_and_read_back(name: str, which: str | None, tiny_models: TinyModels) -> None:
    """R38: tool_choice required or named: even a random model calls a tool, with arguments by its schema."""
    tools = [
        tool("paint", {"colour": {"enum": ["red", "grün"]}, "size": {"enum": [1, 2, 3]}}),
        tool("ring", {"times": {"type": "boolean"}}),
    ]
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in tools}
    form = FORMATS[name]
    guide = form.grammar(tools, which)
    assert guide is not None
    with real.engine(tiny_models.folder("llama")) as parts:
        requests = [guided(parts, guide, 300, seed=i) for i in range(4)]
        real.finish(parts)
    for request in requests:
        assert ends(request) == ["stop"]
        stream = form.stream()
        pieces = [p for char in text_of(request) for p in stream.feed(char)] + stream.finish()
        calls = [p.name for p in pieces if isinstance(p, CallStart)]
        assert calls and not any(isinstance(p, TextPiece) for p in pieces)
        assert which is None or calls == [which]
        for index, called in enumerate(calls):
            written = "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == index)
            jsonschema.validate(json.loads(written), schemas[called])
