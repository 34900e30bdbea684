"""One branch's tokens on their way to its reader: text, stop strings, log-probabilities."""

from __future__ import annotations

from octavo.core.params import SamplingParams
from octavo.core.plan import TokenLogprobs
from octavo.decode.stop import StopChecker
from octavo.text.detokenize import Detokenizer
from octavo.text.tokenizer import Tokenizer


class Reader:
    """Owns: the text so far and what of it may still be part of a stop string.

    Promises: text handed out is never taken back; the pieces join to the whole.
    """

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens) if tokenizer else None
        self._stops: StopChecker | None = None
        if params.stop:
            self._stops = StopChecker(tuple(params.stop), params.min_tokens, params.include_stop_str_in_output)

    def push(self, token: int, count: int) -> tuple[str, str | None]:
        """The text that output token number ``count`` makes certain, and the stop string that it completes, if any."""
        if self._detokenizer is None:
            return "", None
        return self._emit(self._detokenizer.push(token), count)

    def flush(self, count: int) -> str:
        """The rest, when the branch has ended without a stop string."""
        if self._detokenizer is None:
            return ""
        text, stop = self._emit(self._detokenizer.flush(), count)
        if self._stops is not None and stop is None:
            rest = self._stops.flush()
            self.text += rest
            text += rest
        return text

    def _emit(self, text: str, count: int) -> tuple[str, str | None]:
        stop = None
        if self._stops is not None:
            text, stop = self._stops.push(text, count)
        self.text += text
        return text, stop
