"""Cases of text and endings, with scripted tokens: stop strings, bytes of characters, end tokens, empty prompts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tiny
from conftest import TinyModels
from engines import Pieces, Rig, outputs
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.events import Delta
from octavo.core.request import Request
from octavo.engine.build import build
from octavo.errors import OctavoError, RequestError
from octavo.sim.executors import script


def scripted(pieces: list[bytes], **settings: Any) -> tuple[Rig, Request]:
    """An engine that says ``pieces`` to the prompt [0], one token each, and the request that has heard them."""
    given = {k: settings.pop(k) for k in ("stop", "min_tokens", "include_stop_str_in_output") if k in settings}
    known = list(dict.fromkeys(pieces))
    tokenizer = Pieces(known + [b"~"])
    answer = [known.index(piece) for piece in pieces]
    rig = Rig(tokenizer=tokenizer, vocab=len(known) + 1, choose=script({(0,): answer}, end=len(known)), **settings)
    request = rig.add([0], settings.get("most", len(pieces)), **given)
    rig.run()
    assert rig.streamed(request) == request.readers[0].text, "streamed and plain text differ"
    return rig, request


def ended(request: Request) -> tuple[str, str | None, int | str | None]:
    branch = request.branches[0]
    return request.readers[0].text, branch.finish_reason, branch.stop_reason


# ---- R21 ------------------------------------------------------------------------------------------------------------


def cut(text: str) -> list[bytes]:
    return [piece.encode() for piece in text.split("|")]


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason"),
    [
        ("ABC|DEF|G|HI|J|KL", "DEFGHIJ", "ABC", "stop"),
        ("ABC|DEF|GX", "DEFGHIJ", "ABCDEFGX", "length"),
        ("ABC|DEF|G|HI|J", "DEFGHIJ", "ABC", "stop"),
        ("ABC|DEF|G|HI", "DEFGHIJ", "ABCDEFGHI", "length"),
        ("one stop two|three", "stop", "one ", "stop"),
        ("abc|abcd|x", ["abcd", "ab"], "", "stop"),
        ("x|a|b|c|d", ["abcd", "bc"], "xa", "stop"),
        ("x|aab|aab|aac|y", "aabaac", "xaab", "stop"),
        ("für| immer| und| ewig", "ö", "für immer und ewig", "length"),
        ("das| ist| schön| ja", "ö", "das ist sch", "stop"),
        ("日本|語の|文", "語の文", "日本", "stop"),
    ],
)
def test_r21_stop_strings(said: str, stop: Any, text: str, reason: str) -> None:
    """R21: stops that span tokens, within one token, overlapping ones: no letter of the stop is ever sent."""
    rig, request = scripted(cut(said), stop=stop)
    assert ended(request)[:2] == (text, reason)
    if reason == "stop":
        assert request.branches[0].stop_reason in ([stop] if isinstance(stop, str) else stop)
    sent = ""
    for event in rig.events[request.id]:
        sent += event.text if isinstance(event, Delta) else ""
        assert text.startswith(sent), f"{sent!r} was sent of {text!r}"


def test_r21_a_stop_in_the_bytes_of_characters() -> None:
    """R21: a stop with characters of several bytes, one byte a token."""
    said = [bytes([b]) for b in "Wörter, schöne Wörter".encode()]
    _, request = scripted(said, stop="schö")
    assert ended(request) == ("Wörter, ", "stop", "schö")
    _, request = scripted(said, stop="schö", include_stop_str_in_output=True)
    assert ended(request) == ("Wörter, schö", "stop", "schö")


def test_r21_what_was_held_back_is_sent_when_a_request_is_aborted() -> None:
    """R21: letters that could still begin a stop, and half a character, belong to the text once nothing follows."""
    for said, text in ((cut("ABC|DEF|G|HI|J"), "ABCDEFG"), ([b"AB", b"D", b"\xe6"], "ABD\ufffd")):
        known = list(dict.fromkeys(said))
        choose = script({(0,): [known.index(piece) for piece in said]})
        rig = Rig(tokenizer=Pieces(known), vocab=len(known), choose=choose)
        request = rig.add([0], 5, stop="DEFGHIJ")
        rig.steps(3)
        assert len(rig.streamed(request)) < len(text)
        rig.engine.abort(request)
        assert request.readers[0].text == rig.streamed(request) == text
        assert request.branches[0].finish_reason == "abort"


# ---- R20 ------------------------------------------------------------------------------------------------------------


def test_r20_a_stop_string_before_min_tokens() -> None:
    """R20: the script emits the stop at token 2 and again at 25; at least 20 tokens are wanted."""
    said = [b"x"] * 40
    said[1] = said[24] = b"STOP"
    _, request = scripted(said, stop="STOP", min_tokens=20)
    assert ended(request) == ("xSTOP" + "x" * 22, "stop", "STOP")
    assert len(outputs(request)[0]) == 25


def test_r20_end_tokens_are_held_back() -> None:
    """R20: neither of two end tokens that the logits favour comes before min_tokens; a stop token id neither."""

    def eager(prefix: Any, draw: Any) -> int:
        banned = {token for token, value in draw.bias if value == float("-inf")}
        return next(token for token in (2, 7, 5, 9) if token not in banned)

    for given, favourite in (({}, 2), ({"stop_token_ids": [5]}, 2), ({"ignore_eos": True, "stop_token_ids": [2]}, 2)):
        rig = Rig(choose=eager, eos_ids=(2, 7))
        request = rig.add([1, 1, 1], 30, min_tokens=20, **given)
        rig.run()
        tokens = outputs(request)[0]
        assert len(tokens) == 21 and tokens[-1] == favourite
        assert not {2, 7} & set(tokens[:20]) or given.get("ignore_eos")
        assert request.branches[0].finish_reason == "stop"
    with pytest.raises(ValueError, match="min_tokens: is 9, more than max_tokens, 8") as refused:
        SamplingParams(min_tokens=9, max_tokens=8)
    assert refused.value.field == "min_tokens"  # type: ignore[attr-defined]


# ---- R23 ------------------------------------------------------------------------------------------------------------

HARD = "naïve 日本 👍🏽 🏳️‍🌈 e\u0301"


def test_r23_characters_of_several_byte_tokens() -> None:
    """R23: one byte a token; nothing is shown before it is whole, nothing twice, no replacement mark."""
    rig, request = scripted([bytes([b]) for b in HARD.encode()])
    assert request.readers[0].text == HARD
    assert "\ufffd" not in "".join(e.text for e in rig.events[request.id] if isinstance(e, Delta))


def test_r23_a_character_cut_by_max_tokens() -> None:
    """R23: wherever max_tokens cuts, there is one mark at most, at the very end, streamed as in plain mode."""
    data = HARD.encode()
    for most in range(1, len(data)):
        _, request = scripted([bytes([b]) for b in data[:most]])
        text = request.readers[0].text
        whole = data[:most].decode(errors="ignore")
        assert text in (whole, whole + "\ufffd")


# ---- R60 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [2, 7])
def test_r60_every_end_token_ends(end: int) -> None:
    """R60: the answer stops at either end token; with ignore_eos it runs past both to max_tokens."""
    said = [11, 12, end, 13, 2, 7, 14, 15]
    for given, want, reason in (
        ({}, said[:3], "stop"),
        ({"ignore_eos": True}, said, "length"),
        ({"ignore_eos": True, "stop_token_ids": [13]}, said[:4], "stop"),
    ):
        rig = Rig(choose=script({(1,): said}), eos_ids=(2, 7))
        request = rig.add([1], 8, **given)
        rig.run()
        assert (outputs(request)[0], request.branches[0].finish_reason) == (want, reason)


def configured(models: TinyModels, tmp_path: Path) -> Path:
    """A tiny model whose files name the ends [2, 7] and 1, and a temperature."""
    folder = models.get("llama").save(tmp_path / "ends")
    settings = {"eos_token_id": [2, 7], "temperature": 0.3, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_r60_defaults_of_the_generation_config(
    tiny_models: TinyModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R60: which defaults come from the file is logged, what a request says wins, and a switch turns them off."""
    folder = configured(tiny_models, tmp_path)
    with caplog.at_level(logging.INFO, "octavo"):
        parts = build(str(folder), EngineConfig(kv_blocks=8, threads=1))
    assert "temperature 0.3" in caplog.text and "defaults from the model's generation config" in caplog.text
    assert {2, 7, 1} <= parts.engine.eos_ids and set(parts.intake.eos_ids) == parts.engine.eos_ids
    assert parts.intake.request([3]).params.temperature == 0.3
    assert parts.intake.request([3], SamplingParams(temperature=0.8)).params.temperature == 0.8
    assert parts.intake.request([3], SamplingParams(temperature=0)).params.temperature == 0.0
    caplog.clear()
    with caplog.at_level(logging.INFO, "octavo"):
        parts = build(str(folder), EngineConfig(kv_blocks=8, threads=1, generation_defaults=False))
    assert "are off (temperature 0.3)" in caplog.text
    assert parts.intake.request([3]).params.temperature == 1.0
    assert {2, 7} <= parts.engine.eos_ids, "end tokens are no sampling default"


# ---- R36 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], [[], [1]], ["", "a"], {"prompt": ""}, {}, [{}], None, b"ab"])
def test_r36_empty_prompts_are_refused(prompt: Any, tiny_models: TinyModels) -> None:
    """R36: an empty prompt is one clear error, and the next request works."""
    with LLM(str(tiny_models.folder("llama")), kv_blocks=16, threads=1) as llm:
        with pytest.raises(RequestError, match="prompt") as refused:
            llm.generate(prompt, SamplingParams(max_tokens=2))
        assert refused.value.field == "prompt"
        for messages in ([], [[]]):
            with pytest.raises(OctavoError):
                llm.chat(messages, SamplingParams(max_tokens=2))
        assert len(llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


def test_r36_an_empty_text_after_a_bos(tiny_models: TinyModels, tmp_path: Path) -> None:
    """R36: where the tokenizer puts a BOS, an empty text is answered from that alone; empty ids are still refused."""
    from tokenizers.processors import TemplateProcessing

    folder = tiny_models.get("llama").save(tmp_path / "bos")
    tokenizer = type(tiny.tokenizer()).from_str(tiny.tokenizer().to_str())
    tokenizer.post_processor = TemplateProcessing(single=f"{tiny.BOS} $A", special_tokens=[(tiny.BOS, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), kv_blocks=16, threads=1) as llm:
        output = llm.generate("", SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))[0]
        assert output.prompt_token_ids == [0] and len(output.outputs[0].token_ids) == 3
        with pytest.raises(RequestError, match="prompt is empty"):
            llm.generate([[]], SamplingParams(max_tokens=2))


def test_r36_messages_without_content(tiny_models: TinyModels, tmp_path: Path) -> None:
    """R36: messages that render to no token at all are refused, and the next conversation works."""
    folder = tiny_models.get("llama").save(tmp_path / "chat")
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    path.write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with LLM(str(folder), kv_blocks=16, threads=1) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        for messages in ([], [[]], [{"role": "user", "content": ""}], [[{"role": "user", "content": ""}]]):
            with pytest.raises(RequestError):
                llm.chat(messages, params)
        answers = llm.chat([{"role": "user", "content": "hello"}], params)
        assert len(answers) == 1 and len(answers[0].outputs[0].token_ids) == 3
