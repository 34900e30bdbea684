"""A request: a prompt, its parameters, and the branches that answer it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.plan import TokenLogprobs
from octavo.core.sequence import Sequence, State

Sink = Callable[["Delta | Finished"], None]


class Request:
    """Owns: what was asked, the branches, and what has been scored of the prompt.

    Promises: exactly one final event.
    """

    def __init__(
        self,
        id: str,
        number: int,
        prompt: array[int],
        params: SamplingParams,
        rules: Any,
        limit: int,
        *,
        prompt_text: str | None = None,
        priority: int = 0,
        user: str = "",
        salt: bytes = b"",
        arrival: float = 0.0,
        sink: Sink | None = None,
    ) -> None:
        self.id = id
        self.number = number
        self.prompt = prompt
        self.prompt_text = prompt_text
        self.params = params
        self.rules = rules
        self.limit = limit
        self.priority = priority
        self.user = user
        self.salt = salt
        self.arrival = arrival
        self.sink = sink
        self.branches: list[Sequence] = []
        self.readers: list[Any] = []  # one for each branch: what turns its tokens into text
        self.form: Any = None  # text.guides.Form that the output must have
        self.matchers: list[Any] = []  # one for each branch, where there is a form
        self.scores: list[TokenLogprobs] = []  # of prompt tokens 1, 2, ...
        self.beams: Any = None  # engine.beams.Beams of a beam search
        self.dropped_preemptions = 0  # of branches that are no longer listed
        self.miss = ""  # why no more of the prompt came from the prefix cache, see paging/miss.py
        self.cached = 0  # prompt tokens that came from the prefix cache
        self.keep = False  # whether its only branch stays, idle, when it has ended: a session's
        self.score_from = 0  # prompt tokens up to this position need no score
        self.error: str | None = None
        self.first_token: float | None = None
        self.finished = False

    def branch(self, number: int, index: int, tokens: array[int]) -> Sequence:
        """A new branch; the first is the prompt's own."""
        sequence = Sequence(
            number,
            self.number,
            index,
            tokens,
            len(self.prompt),
            self.params,
            self.limit,
            self.salt,
            self.priority,
            self.user,
            self.arrival,
        )
        self.branches.append(sequence)
        return sequence

    def single(self, sequence: Sequence) -> bool:
        """Whether a sequence of it draws alone: as no beam, before no fork, without scores, and under no guide, whose
        masks are known for the next token only."""
        return self.beams is None and not self.matchers and not sequence.forks and not sequence.scoring

    def add_scores(self, start: int, scores: tuple[TokenLogprobs, ...]) -> None:
        """Scores of the tokens at positions start+1, ...; a preempted prompt scores some of them again."""
        known = self.score_from + len(self.scores) - start
        self.scores.extend(scores[known:])
        self.branches[0].scored = self.score_from + len(self.scores)

    @property
    def preemptions(self) -> int:
        return self.dropped_preemptions + sum(s.preemptions for s in self.branches)

    @property
    def done(self) -> bool:
        ended = all(s.state is State.FINISHED or s.idle for s in self.branches)
        return ended and len(self.branches) == self.params.branches
