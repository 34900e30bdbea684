"""Who may wait: a bounded queue, and a quick no for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable

from octavo.server.errors import ApiError


class Place:
    """One request's place: ``sequences`` that run or wait, ``tokens`` of its prompt until the first answer token."""

    __slots__ = ("_admission", "sequences", "tokens", "_since")

    def __init__(self, admission: Admission, sequences: int, tokens: int, since: float) -> None:
        self._admission = admission
        self.sequences = sequences
        self.tokens = tokens
        self._since = since

    def started(self) -> None:
        """Its prompt is computed: its tokens wait no more."""
        self._admission.tokens -= self.tokens
        self.tokens = 0

    def leave(self) -> None:
        """Its request has ended.  Twice is once."""
        self.started()
        if self.sequences:
            self._admission.left(self.sequences, self._since)
            self.sequences = 0


class Admission:
    """Owns: how many sequences and waiting prompt tokens the server has let in.

    Promises: no more than ``running`` + ``waiting`` sequences and ``most_tokens`` waiting prompt tokens, but for a
    single request that is larger than that by itself, which is let in when nobody else is there; each answer to a
    prompt counts as a sequence, so that n > 1 takes what it uses.
    """

    def __init__(self, running: int, waiting: int, most_tokens: int, now: Callable[[], float]) -> None:
        self.most = running + waiting
        self.most_tokens = most_tokens
        self.sequences = 0
        self.tokens = 0
        self.refused = 0
        self.draining = False
        self._now = now
        self._duration = 1.0  # of a request, a moving mean

    def check(self) -> None:
        """Raises ApiError if there is no place for anybody: cheap, before a prompt is even read."""
        if self.draining:
            raise self._no(503, "the server is shutting down and takes no new requests", "shutting_down", 5)
        if self.sequences >= self.most or (self.tokens >= self.most_tokens and self.sequences):
            raise self._busy()

    def enter(self, sizes: list[tuple[int, int]]) -> list[Place]:
        """A place for each of (sequences, prompt tokens), or for none of them: ApiError 429."""
        self.check()
        sequences, tokens = sum(s for s, _ in sizes), sum(t for _, t in sizes)
        if self.sequences and (self.sequences + sequences > self.most or self.tokens + tokens > self.most_tokens):
            raise self._busy()
        self.sequences += sequences
        self.tokens += tokens
        now = self._now()
        return [Place(self, s, t, now) for s, t in sizes]

    def left(self, sequences: int, since: float) -> None:
        self.sequences -= sequences
        self._duration += 0.1 * (self._now() - since - self._duration)

    def _busy(self) -> ApiError:
        # A place gets free about every duration / sequences seconds.
        wait = math.ceil(min(60.0, max(1.0, self._duration / max(1, self.sequences))))
        message = (
            f"the server is busy: {self.sequences} sequences of {self.most} and {self.tokens} waiting prompt tokens "
            f"of {self.most_tokens} are taken; try again in {wait} s"
        )
        return self._no(429, message, "overloaded", wait)

    def _no(self, status: int, message: str, code: str, wait: int) -> ApiError:
        self.refused += 1
        return ApiError(status, message, code=code, headers={"Retry-After": str(wait)})
