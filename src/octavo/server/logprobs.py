"""Log-probabilities in the forms of OpenAI's two interfaces, and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.plan import TokenLogprobs
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer

LEAST = -9999.0  # what OpenAI sends for minus infinity, which JSON has no word for


def finite(value: float) -> float:
    """NaN cannot come here: a row with NaN is an error of its request."""
    return value if value > LEAST else LEAST


class TokenNames:
    """Owns: nothing but the tokenizer.  Promises: a token's text where its bytes are text by themselves, and else its
    bytes spelled out, as OpenAI does; the bytes of an answer's tokens join to its text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._names: dict[int, str] = {}

    def name(self, token: int) -> str:
        found = self._names.get(token)
        if found is None:
            raw = self.tokenizer.token_bytes(token)
            try:
                found = raw.decode("utf-8")
            except UnicodeDecodeError:
                found = "bytes:" + "".join(f"\\x{b:02x}" for b in raw)
            self._names[token] = found
        return found


class ChatLogprobs:
    """Owns: whether a choice's first text is still to come.  Promises: entries as /v1/chat/completions has them."""

    def __init__(self, names: TokenNames, skip_special: bool) -> None:
        self._names = names
        self._skipped: frozenset[int] = names.tokenizer.special_ids if skip_special else frozenset()
        self._strips = names.tokenizer.strips_space

    def entries(self, scored: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": [self._entry(s) for s in scored], "refusal": None}

    def _entry(self, scored: TokenLogprobs) -> dict[str, Any]:
        entry = self._one(scored.token, scored.logprob)
        if self._strips and entry["bytes"]:  # the first space came with the tokenizer and is no part of the text
            self._strips = False
            if entry["bytes"][0] == 32:
                entry["bytes"] = entry["bytes"][1:]
        entry["top_logprobs"] = [self._one(token, value) for token, value in scored.best]
        return entry

    def _one(self, token: int, value: float) -> dict[str, Any]:
        raw = b"" if token in self._skipped else self._names.tokenizer.token_bytes(token)
        return {"token": self._names.name(token), "logprob": finite(value), "bytes": list(raw)}


class TextLogprobs:
    """Owns: how long a choice's text is so far.

    Promises: lists as /v1/completions has them; ``text_offset`` counts characters of the choice's own ``text``, where
    its prompt is part of it if it is echoed.
    """

    def __init__(self, names: TokenNames, skip_special: bool) -> None:
        self._names = names
        self._skip = skip_special
        self._length = 0
        self._text = Detokenizer(names.tokenizer, skip_special)

    def prompt(self, tokens: Sequence[int], scored: Sequence[TokenLogprobs], text: str) -> dict[str, Any]:
        """The prompt's: null for the first token, which nothing foretells."""
        out = self._lists()
        self._add(out, tokens[0], None)
        for score in scored:
            self._add(out, score.token, score)
        self._length = len(text)
        self._text = Detokenizer(self._names.tokenizer, self._skip)
        return out

    def entries(self, scored: Sequence[TokenLogprobs]) -> dict[str, Any]:
        out = self._lists()
        for score in scored:
            self._add(out, score.token, score)
        return out

    def after(self, text: str) -> None:
        """The choice's text begins with an echo that has no log-probabilities."""
        self._length = len(text)

    @staticmethod
    def _lists() -> dict[str, Any]:
        return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}

    def _add(self, out: dict[str, Any], token: int, scored: TokenLogprobs | None) -> None:
        out["text_offset"].append(self._length)
        out["tokens"].append(self._names.name(token))
        self._length += len(self._text.push(token))
        if scored is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            return
        value = finite(scored.logprob)
        best: dict[str, float] = {}
        for other, logprob in (*scored.best, (token, value)):
            best.setdefault(self._names.name(other), finite(logprob))
        out["token_logprobs"].append(value)
        out["top_logprobs"].append(best)


def prompt_logprobs(names: TokenNames, scored: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """As vLLM has them: for each prompt token but the first, by token id."""
    out: list[dict[str, Any] | None] = [None]
    for score in scored:
        entry = {
            str(token): {"logprob": finite(value), "rank": rank, "decoded_token": names.name(token)}
            for rank, (token, value) in enumerate(score.best, 1)
        }
        own = {"logprob": finite(score.logprob), "rank": score.rank, "decoded_token": names.name(score.token)}
        entry.setdefault(str(score.token), own)
        out.append(entry)
    return out
