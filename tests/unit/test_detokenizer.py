"""Streaming text equals plain text, whatever the tokens cut (R23)."""

from __future__ import annotations

import pytest

from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer
from texts import byte_level, byte_level_gguf, hard_strings, sentencepiece_gguf, sentencepiece_model

R23 = "naïve 日本 👍🏽 🏳️‍🌈 e\u0301 x"


def bytes_tokenizer() -> Tokenizer:
    hf = byte_level(None, specials=("<|end|>",))
    return Tokenizer.from_gguf(byte_level_gguf(hf, "gpt-2", eos_token_id=0))


def pieces_tokenizer(prefix: bool = True) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_gguf(sentencepiece_model(prefix), add_space_prefix=prefix))


def one_byte_a_token(tokenizer: Tokenizer, text: str) -> list[int]:
    single = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size)) if not tokenizer.is_special(i)}
    return [single[bytes([byte])] for byte in text.encode()]


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", [bytes_tokenizer(), pieces_tokenizer()], ids=["bytes", "pieces"])
def test_characters_of_one_byte_a_token_come_whole(tokenizer: Tokenizer) -> None:
    """R23: no replacement mark inside, nothing twice, and each character as soon as its last byte is there."""
    ids = one_byte_a_token(tokenizer, R23)
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == R23 == tokenizer.decode(ids)
    assert [part for part in parts if part] == list(R23)


@pytest.mark.parametrize("tokenizer", [bytes_tokenizer(), pieces_tokenizer()], ids=["bytes", "pieces"])
def test_a_cut_character_is_one_mark_at_the_very_end(tokenizer: Tokenizer) -> None:
    """R23: wherever max_tokens cuts, in both modes."""
    ids = one_byte_a_token(tokenizer, R23)
    for end in range(len(ids) + 1):
        whole = R23.encode()[:end].decode("utf-8", "ignore")
        cut = whole.encode() != R23.encode()[:end]
        assert tokenizer.decode(ids[:end]) == "".join(streamed(tokenizer, ids[:end])) == whole + "\ufffd" * cut


def test_bytes_that_are_no_utf8_are_one_mark_each() -> None:
    tokenizer = pieces_tokenizer()
    byte = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    ids = [byte[b] for b in (b"a", b"\xff", b"b", b"\xe6", b"\x97", b"c", b"\x80")]
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids) == "a\ufffdb\ufffdc\ufffd"


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_stream_equals_plain(skip_special: bool, prefix: bool) -> None:
    tokenizer = pieces_tokenizer(prefix)
    for text in hard_strings():
        ids = tokenizer.encode(text + "</s>" + text)
        assert "".join(streamed(tokenizer, ids, skip_special)) == tokenizer.decode(ids, skip_special)


def test_first_space_is_the_tokenizers_and_later_ones_the_models() -> None:
    tokenizer = pieces_tokenizer()
    ids = tokenizer.encode("hello hello", add_special=False)
    assert "".join(streamed(tokenizer, ids)) == "hello hello"
    assert Detokenizer(tokenizer).push_all(tokenizer.encode("  hello")) == "  hello"


def test_special_tokens_are_silent_unless_asked_for() -> None:
    tokenizer = bytes_tokenizer()
    ids = [*tokenizer.encode("hi"), 0]
    assert "".join(streamed(tokenizer, ids)) == "hi"
    assert "".join(streamed(tokenizer, ids, skip_special=False)) == "hi<|end|>"
