"""What users are to get, known beforehand, and what they were told."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.plan import Draw, TokenLogprobs
from octavo.decode.beam import BeamSearch
from octavo.sim.executors import logprobs_of, prefix_hash

VOCAB = 97


@dataclass
class Heard:
    """Owns: what a user was told of a request.  Promises: an AssertionError for anything told after the final event."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # by branch
    reasons: dict[int, str] = field(default_factory=dict)  # why a branch ended
    final: Finished | None = None

    def __call__(self, event: Delta | Finished) -> None:
        if self.final is not None:
            raise AssertionError(f"{event} after the final event")
        if isinstance(event, Finished):
            self.final = event
            return
        if event.branch in self.reasons:
            raise AssertionError(f"{event} after the branch's end")
        self.tokens.setdefault(event.branch, []).extend(event.tokens)
        if event.finish_reason is not None:
            self.reasons[event.branch] = event.finish_reason


class Oracle:
    """Owns: right answers, from the prompt alone."""

    def __init__(self, windows: tuple[int | None, ...]) -> None:
        self.reach = None if None in windows else max(w for w in windows if w is not None)
        self._next = prefix_hash(VOCAB, self.reach)

    def answer(self, prompt: list[int], most: int, params: SamplingParams, branch: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(most):
            tokens.append(self._next(tokens, self._draw(params, branch)))
            if tokens[-1] in params.stop_token_ids:
                break
        return tokens[len(prompt) :]

    def scores(self, prompt: list[int], first: int, best: int) -> list[TokenLogprobs]:
        """Of the tokens at positions ``first``, ... of a prompt."""
        return [logprobs_of(self.seen(prompt[:i]), prompt[i], best) for i in range(first, len(prompt))]

    def _draw(self, params: SamplingParams, branch: int) -> Draw:
        seed = params.seed or 0
        return Draw(branch, 0, params.temperature or 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed, -1)

    def seen(self, tokens: list[int]) -> list[int]:
        """The prefix as an executor reads it: -1 where all windows have slid on."""
        gone = max(0, len(tokens) - self.reach) if self.reach else 0
        return [-1] * gone + tokens[gone:]

    def beams(self, prompt: list[int], width: int, most: int) -> list[tuple[tuple[int, ...], float]]:
        search = BeamSearch(width, most)
        greedy = self._draw(SamplingParams(temperature=0.0), 0)
        while not search.done:
            candidates = []
            for running in search.running:
                tokens = [*prompt, *running]
                token = self._next(tokens, greedy)
                candidates.append(logprobs_of(self.seen(tokens), token, search.kept).best)
            search.advance(candidates)
        return [(h.tokens, h.score) for h in search.finished]
