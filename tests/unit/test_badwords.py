"""Words that must not be written, in both their forms (R28)."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.decode.branching import banned_next
from octavo.errors import RequestError
from octavo.text.badwords import token_sequences
from octavo.text.tokenizer import Tokenizer
from texts import PROSE, byte_level, byte_level_gguf, sentencepiece_gguf, sentencepiece_model

BYTES = Tokenizer.from_gguf(byte_level_gguf(byte_level(None), "gpt-2"))
PIECES = Tokenizer.from_gguf(sentencepiece_gguf(sentencepiece_model()))


def spelled(tokenizer: Tokenizer, ids: tuple[int, ...]) -> bytes:
    return b"".join(map(tokenizer.token_bytes, ids))


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["bytes", "pieces"])
@pytest.mark.parametrize("word", ["object", "the", "zyx", "日", " the "])
def test_both_forms_of_a_word_are_found(tokenizer: Tokenizer, word: str) -> None:
    forms = {spelled(tokenizer, ids) for ids in token_sequences(tokenizer, [word])}
    assert forms == {word.strip().encode(), b" " + word.strip().encode()}


def test_spaced_form_of_one_token_and_plain_form_of_two() -> None:
    """R28: the usual trap; which word of the training text is like that depends on the text."""
    forms = {word: (BYTES.encode(" " + word), BYTES.encode(word)) for word in PROSE.split()[:5000] if word.isalpha()}
    word = next(word for word, (spaced, plain) in forms.items() if (len(spaced), len(plain)) == (1, 2))
    assert set(token_sequences(BYTES, [word])) == set(map(tuple, forms[word]))


def test_only_the_last_token_is_banned_and_only_after_the_others() -> None:
    """R28: the phrase's second token alone stays legal."""
    sequences = [(5,), (7, 8), (7, 8, 9)]
    assert list(banned_next([], sequences)) == [5]
    assert list(banned_next([1, 7], sequences)) == [5, 8]
    assert list(banned_next([7, 8], sequences)) == [5, 9]
    assert list(banned_next([8], sequences)) == [5]
    assert list(banned_next([7, 1], sequences)) == [5]


@pytest.mark.parametrize("words", [[""], ["  "], [7], [None]])
def test_nonsense_is_refused_with_the_field(words: Any) -> None:
    with pytest.raises(RequestError, match=r"bad_words\[0\]") as error:
        token_sequences(BYTES, words)
    assert error.value.field == "bad_words"
