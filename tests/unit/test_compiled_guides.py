"""Guides as plain data, and their compilation: what is refused, and where."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import tiny
from octavo.core.guide import Guide
from octavo.core.params import ParamError, SamplingParams
from octavo.errors import EngineError, RequestError
from octavo.text.guides import KEPT, Guides
from octavo.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.fast_tokenizer().save_pretrained(folder)
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer, tokenizer.eos_ids)


def test_guides_are_data() -> None:
    assert (
        Guide.json({"type": "object"}) == Guide.json('{"type": "object"}') == Guide("json_schema", '{"type": "object"}')
    )
    assert Guide.json() == Guide("json_object") and hash(Guide.regex("a")) == hash(Guide("regex", "a"))
    assert SamplingParams(guide=Guide.regex("a")) == SamplingParams(guide=Guide("regex", "a"))

    class Model:
        @classmethod
        def model_json_schema(cls) -> dict[str, Any]:
            return {"type": "object", "title": "Model"}

    assert Guide.json(Model) == Guide.json({"type": "object", "title": "Model"})


@pytest.mark.parametrize(
    "make",
    [
        lambda: Guide("xml", ""),
        lambda: Guide("regex", 5),  # type: ignore[arg-type]
        lambda: Guide.regex(""),
        lambda: Guide.lark(""),
        lambda: Guide.choice([]),
        lambda: Guide.choice("ab"),
        lambda: Guide.choice(["a", ""]),
        lambda: Guide.choice(["a", 1]),  # type: ignore[list-item]
        lambda: Guide.choice(["a"] * 1001),
        lambda: Guide.json(5),
        lambda: Guide.json({"a": object()}),
        lambda: Guide.json({"a": float("nan")}),
        lambda: Guide.regex("a" * 300_000),
    ],
)
def test_what_is_no_guide_is_refused(make: Any) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.field == "guide"


def test_a_guide_is_asked_for_by_its_type() -> None:
    with pytest.raises(ParamError, match="Guide"):
        SamplingParams(guide={"type": "object"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "guide",
    [
        Guide.json("{"),
        Guide.json("[]"),
        Guide.json(False),
        Guide.json({"type": "objekt"}),
        Guide.json({"type": "object", "properties": []}),
        Guide.json({"$ref": "#/nowhere"}),
        Guide.json({"type": "string", "pattern": "("}),
        Guide.json({"type": "array", "uniqueItems": True}),
        Guide.json({"type": "string", "minLength": 5, "maxLength": 2}),
        Guide.json("[" * 100_000),
        Guide.regex("("),
        Guide.regex("(?=a)b"),
        Guide.regex("[a&&b]"),
        Guide.regex("\ud800"),
        Guide.lark("start: nothing"),
        Guide.lark("rule: 'a'"),
        Guide.lark("start: %json {"),
        Guide("choice", "5"),
        Guide("choice", "[]"),
    ],
    ids=range(19),
)
def test_r48_a_bad_guide_is_refused_with_a_reason(guide: Guide, guides: Guides) -> None:
    with pytest.raises(RequestError, match=r"^guide: .{15}") as caught:
        guides.compile(guide)
    assert caught.value.field == "guide" and "\n" not in str(caught.value)


def test_the_last_guides_are_remembered(guides: Guides) -> None:
    first = guides.compile(Guide.regex("a+"))
    assert guides.compile(Guide.regex("a+")) is first
    for i in range(KEPT):
        guides.compile(Guide.regex(f"b{{{i + 1}}}"))
    assert guides.compile(Guide.regex("a+")) is not first


def test_guides_are_compiled_from_any_thread(guides: Guides) -> None:
    found = []
    work = [
        threading.Thread(target=lambda i=i: found.append(guides.compile(Guide.regex(f"c{{{i % 5 + 1}}}"))))
        for i in range(20)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(found) == 20 and len({id(form) for form in found}) == 5


def allowed(mask: bytes) -> set[int]:
    return {i for i in range(len(mask) * 8) if mask[i >> 3] >> (i & 7) & 1}


def test_masks_depend_on_the_tokens_alone(guides: Guides, tokenizer: Tokenizer) -> None:
    """A matcher that was forked on the way says what one says that has read all tokens from the start."""
    form = guides.compile(Guide.json({"type": "array", "items": {"type": "integer"}}))
    one = form.matcher(0)
    ids = tokenizer.encode_inside("[12, 3, 45]")
    for at, token in enumerate(ids):
        fresh = form.matcher(0)
        for earlier in ids[:at]:
            fresh.advance(earlier)
        twin = one.fork()
        assert one.mask().bits() == fresh.mask().bits() == twin.mask().bits()
        assert token in allowed(one.mask().bits())
        one.advance(token)
    assert allowed(one.mask().bits()) == set(tokenizer.eos_ids)


def test_only_tokens_that_have_text_are_allowed(guides: Guides, tokenizer: Tokenizer) -> None:
    mask = allowed(guides.compile(Guide.regex(r"(?s:.*)")).matcher(0).mask().bits())
    assert tokenizer.bos_id not in mask and set(tokenizer.eos_ids) <= mask
    assert all(i < tokenizer.vocab_size for i in mask)


def test_a_token_that_was_not_allowed_is_an_error_of_the_next_mask(guides: Guides, tokenizer: Tokenizer) -> None:
    matcher = guides.compile(Guide.regex("a")).matcher(0)
    matcher.advance(tokenizer.encode_inside("b")[0])
    with pytest.raises(EngineError, match="guide"):
        matcher.mask().bits()


def test_without_an_end_token_there_are_no_guides(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="end"):
        Guides(tokenizer, ()).compile(Guide.regex("a"))


def test_without_llguidance_the_error_says_what_to_install(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:

    def without(name: str, *rest: Any) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(RequestError, match=r"pip install octavo\[server\]"):
        Guides(tokenizer, tokenizer.eos_ids).compile(Guide.regex("a"))


def test_a_choice_is_written_in_the_tokenizers_own_way(guides: Guides, tokenizer: Tokenizer) -> None:
    """No first letter decides for a text that the model would write with other tokens."""
    texts = ["the", "this", "the other"]
    matcher = guides.compile(Guide.choice(texts)).matcher(0)
    written = [tokenizer.encode_inside(text) for text in texts]
    assert allowed(matcher.mask().bits()) == {ids[0] for ids in written}
    for token in written[0]:
        matcher.advance(token)
    assert set(tokenizer.eos_ids) < allowed(matcher.mask().bits())
    matcher.advance(written[1][0])
    with pytest.raises(EngineError, match="choice"):
        matcher.mask().bits()
