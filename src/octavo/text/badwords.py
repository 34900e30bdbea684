"""Words that must not be written, as token sequences."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import RequestError
from octavo.text.tokenizer import Tokenizer


def token_sequences(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The sequences that spell each word, both after a space and without one; a word means either form.

    Raises ``RequestError`` for an empty word.
    """
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        plain = word.strip(" ") if isinstance(word, str) else ""
        if not plain:
            raise RequestError(f"bad_words[{index}] must be a word, not {word!r}.", field="bad_words")
        for form in (plain, " " + plain):
            ids = tuple(tokenizer.encode_inside(form))
            if ids:
                found[ids] = None
    return list(found)
