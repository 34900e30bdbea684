"""Paged memory as an API: a text that stays in blocks, to be continued, forked, rewound and scored.

The truth of a session is its tokens; its blocks are a cache of them.  An idle session keeps its blocks until somebody
else needs them, and is the first to give them up; what it lost is brought back, or computed again, when it is used.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from octavo.core.params import SamplingParams
from octavo.core.request import Request, Sink
from octavo.core.sequence import Sequence
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.errors import EngineError, RequestError

Text = str | Seq[int]


@dataclass(frozen=True)
class Score:
    """How likely a text is as the continuation of a session: for each of its tokens, and their sum."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


class SessionState:
    """Owns: a session's tokens, and the sequence that holds their blocks.

    Promises: every method is to be called between steps, in the thread that steps the engine; a dropped session gives
    back its blocks with the next thing that the engine does.
    """

    def __init__(self, engine: Engine, intake: Intake, tokens: array[int], salt: bytes, user: str) -> None:
        self.engine = engine
        self.intake = intake
        self.salt, self.user = salt, user
        self.tokens = tokens
        self.closed = False
        self.busy = False
        self._settle(engine.rest(tokens[:], salt, user))

    def _settle(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self._orphan = weakref.finalize(self, engine_orphan, self.engine, sequence)
        self._orphan.atexit = False

    def check(self, busy: bool = False) -> None:
        if self.closed:
            raise RequestError("this session is closed", "session")
        if self.busy and not busy:
            raise RequestError("this session is running another call", "session")

    def append(self, text: Text) -> int:
        """More tokens, computed when they are first needed; returns how many.  Raises RequestError beyond the limit."""
        self.check()
        ids = self.ids_of(text)
        most = min(self.intake.context, self.intake.longest)
        if len(self.tokens) + len(ids) > most:
            raise RequestError(
                f"{len(self.tokens)} tokens + {len(ids)} exceed the {most} tokens that a session can have", "text"
            )
        self.tokens.extend(ids)
        return len(ids)

    def ids_of(self, text: Text) -> array[int]:
        if isinstance(text, str) and not text:
            raise RequestError("text is empty", "text")
        return self.intake.tokens(text, add_special=False)

    def rewind(self, to: int) -> None:
        self.check()
        if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to <= len(self.tokens):
            raise RequestError(f"to must be in [0, {len(self.tokens)}], the session's length, not {to!r}", "to")
        del self.tokens[to:]
        if len(self.sequence.tokens) > to:
            self.engine.scheduler.rewind(self.sequence, to)

    def fork(self) -> SessionState:
        self.check()
        twin = SessionState.__new__(SessionState)
        twin.engine, twin.intake, twin.salt, twin.user = self.engine, self.intake, self.salt, self.user
        twin.tokens, twin.closed, twin.busy = self.tokens[:], False, False
        parent = self.sequence
        twin._settle(self.engine.rest(parent.tokens[:], self.salt, self.user, parent))
        return twin

    def begin(self, params: SamplingParams | None, **given: Any) -> Request:
        """A request that continues the session; :meth:`end` takes it back."""
        self.check()
        if not self.tokens:
            raise RequestError("prompt is empty: append something to the session first", "prompt")
        if params is not None and params.n != 1:
            raise RequestError("n must be 1 in a session: fork it for more", "n")
        request = self.request(self.tokens, params, **given)
        request.keep = True
        self.busy = True
        parent = self.sequence
        self.engine.add(request, parent)
        self._orphan.detach()
        self.engine.scheduler.remove(parent)
        self._settle(request.branches[0])
        return request

    def end(self, request: Request, heard: bool = True) -> None:
        """The request has ended: the session has its tokens, or, if it was cut short or nobody ``heard`` its end, the
        ones from before."""
        self.busy = False
        sequence = request.branches[0]
        if heard and sequence.finish_reason in ("stop", "length"):
            self.tokens = sequence.tokens[:]
        else:
            self.engine.scheduler.rewind(sequence, len(self.tokens))

    def score(self, texts: Seq[Text], sink: Sink | None = None) -> list[tuple[Request, array[int]]]:
        """Requests that score each text as the continuation, on blocks of their own; with a RequestError none."""
        if not self.tokens:
            raise RequestError("text: an empty session has no continuation to score", "text")
        asked = []
        for ids in [self.ids_of(text) for text in texts]:
            params = SamplingParams(max_tokens=0, prompt_logprobs=0)
            request = self.request(self.tokens + ids, params, sink=sink)
            request.score_from = len(self.tokens) - 1
            asked.append((request, ids))
        for request, _ in asked:
            self.engine.add(request, self.sequence)
        return asked

    def prefill(self, sink: Sink | None = None) -> Request | None:
        """A request that computes what is not computed yet; None if there is nothing to gain."""
        if len(self.tokens) < 2 or self.sequence.computed >= len(self.tokens) - 1:
            return None
        request = self.request(self.tokens, SamplingParams(max_tokens=0, prompt_logprobs=0), sink=sink)
        request.score_from = len(self.tokens) - 2
        request.keep = True
        parent = self.sequence
        self.engine.add(request, parent)
        self._orphan.detach()
        self.engine.scheduler.remove(parent)
        self._settle(request.branches[0])
        return request

    def request(self, tokens: array[int], params: SamplingParams | None, **given: Any) -> Request:
        request = self.intake.request(tokens, params, user=self.user, **given)
        request.salt = self.salt
        return request

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._orphan.detach()
            self.engine.orphans.append(self.sequence)
            self.engine.reap()


class Call:
    """Owns: the requests that one call of a session has in flight, and the session itself meanwhile.

    Promises: whenever the call is left, be it before it has begun anything, :meth:`end` or :meth:`leave` ends its
    requests and frees the session, once; nothing begins after that.  To be called between steps, like the session's
    state.
    """

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self.ended = False
        self._holds = False
        self._answer: Request | None = None
        self._scores: list[Request] = []

    def answer(self, params: SamplingParams | None, **given: Any) -> Request:
        """Continue the session."""
        self._check()
        self._answer = self.state.begin(params, **given)
        return self._answer

    def prefill(self, sink: Sink | None = None) -> Request | None:
        """Before scores: compute what is not computed yet, so that they share it."""
        self._check()
        self.state.check()
        self._holds = self.state.busy = True
        request = self.state.prefill(sink)
        if request is not None:
            self._scores.append(request)
        return request

    def score(self, texts: Seq[Text], sink: Sink | None = None) -> list[tuple[Request, array[int]]]:
        self._check()
        asked = self.state.score(texts, sink)
        self._scores += [request for request, _ in asked]
        return asked

    def end(self) -> None:
        """The caller has heard all there is: an answer becomes part of the session."""
        self._end(heard=True)

    def leave(self) -> None:
        """The caller went away: an answer is taken back, however far it has come by now."""
        self._end(heard=False)

    def _end(self, heard: bool) -> None:
        if self.ended:
            return
        self.ended = True
        for request in self._scores:
            self.state.engine.abort(request)
        if self._answer is not None:
            self.state.engine.abort(self._answer)
            self.state.end(self._answer, heard)
        elif self._holds:
            self.state.busy = False

    def _check(self) -> None:
        if self.ended:
            raise EngineError("the call was left before it began")


def engine_orphan(engine: Engine, sequence: Sequence) -> None:
    """A session was dropped: note what it holds for the engine to take back."""
    engine.orphans.append(sequence)
    engine.orphaned()


def scored(request: Request, ids: array[int]) -> Score:
    """What a request of ``score`` has found.  Raises EngineError if it failed or was cut short."""
    if request.error is not None or request.branches[0].finish_reason != "length":
        raise EngineError(f"request {request.id}: {request.error or 'ended before its text was scored'}")
    return Score(list(ids), [s.logprob for s in request.scores[-len(ids) :]])


def as_texts(texts: Any) -> list[Any]:
    """One text, one list of ids, or a list of either, as a list."""
    single = isinstance(texts, str) or (isinstance(texts, Seq) and bool(texts) and isinstance(texts[0], int))
    if not isinstance(texts, Seq):
        raise RequestError(f"texts must be text, token ids, or a list of either, not {type(texts).__name__}", "texts")
    items = [texts] if single else list(texts)
    if not items:
        raise RequestError("texts is empty", "texts")
    return items


Run = Callable[[list[Request]], None]


class Session:
    """A text in blocks; see :meth:`octavo.LLM.session`.

    ``append`` adds text, ``generate`` continues it, ``fork`` gives sessions that share all blocks until one writes,
    ``rewind`` goes back to an earlier length in tokens, ``score`` says how likely continuations are, ``close`` gives
    everything back (as does dropping the session).  A call while another one runs is a RequestError.
    """

    def __init__(self, state: SessionState, run: Run, lock: Any) -> None:
        self._state = state
        self._run = run
        self._lock = lock

    @property
    def token_ids(self) -> list[int]:
        return list(self._state.tokens)

    @property
    def text(self) -> str:
        tokenizer = self._state.intake.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self.token_ids)

    def __len__(self) -> int:
        return len(self._state.tokens)

    def append(self, text: Text) -> int:
        """More text (tokenised on its own, without BOS) or token ids; returns how many tokens."""
        self._state.check()
        with self._lock:
            return self._state.append(text)

    def generate(self, params: SamplingParams | None = None, **given: Any) -> Any:
        """Continue the session; the answer becomes part of it.  Returns a RequestOutput."""
        from octavo.engine.outputs import request_output

        self._state.check()
        with self._lock:
            call = Call(self._state)
            try:
                request = call.answer(params, **given)
                self._run([request])
            finally:
                call.end()
        return request_output(request)

    def fork(self, n: int = 1) -> list[Session]:
        """``n`` sessions with the same text, on the same blocks."""
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 10_000:
            raise RequestError(f"n must be an integer in [1, 10000], not {n!r}", "n")
        self._state.check()
        with self._lock:
            return [Session(self._state.fork(), self._run, self._lock) for _ in range(n)]

    def rewind(self, to: int) -> None:
        """Back to the first ``to`` tokens."""
        self._state.check()
        with self._lock:
            self._state.rewind(to)

    def score(self, texts: Text | Seq[Text]) -> list[Score]:
        """How likely each text is as what comes next; the session itself stays as it is."""
        state = self._state
        state.check()
        items = as_texts(texts)
        with self._lock:
            call = Call(state)
            try:
                first = call.prefill()
                if first is not None:
                    self._run([first])
                asked = call.score(items)
                self._run([request for request, _ in asked])
            finally:
                call.end()
        return [scored(request, ids) for request, ids in asked]

    def close(self) -> None:
        """Give back every block."""
        with self._lock:
            self._state.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
