"""One rule that turns what the engine tells into choices.

Streamed or not, an answer is made of the same pieces in the same order: a stream sends them one by one, a plain answer
is their join.  So both have equal text, tokens, log-probabilities, finish reasons and usage by construction.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.core.events import Delta
from octavo.core.request import Request
from octavo.engine.outputs import beam_completions
from octavo.server.generation import Generation, Told
from octavo.server.logprobs import ChatLogprobs, TextLogprobs, TokenNames, prompt_logprobs
from octavo.server.parsing import Calls, Parsed, Parser


class Piece(NamedTuple):
    """What is new of one choice."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str = ""
    calls: Calls = ()
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    score: float | None = None


class Choice:
    """Owns: what one branch's text and tokens have come to.  Promises: one piece for each delta, and nothing held back
    after the last."""

    def __init__(
        self, index: int, request: Request, lists: TextLogprobs | ChatLogprobs | None, parser: Parser | None
    ) -> None:
        self.index = index
        self._request = request
        self._lists = lists
        self._parser = parser
        self.begun = False

    def piece(self, delta: Delta, echo: str | None = None, show_prompt: TokenNames | None = None) -> Piece:
        """``echo``: the prompt's text, to go first; ``show_prompt``: to report the prompt's log-probabilities."""
        self.begun = True
        told = Parsed(delta.text)
        reason = delta.finish_reason
        if self._parser is not None:
            told = self._parser.feed(delta.text)
            if reason is not None:
                told = _both(told, self._parser.finish())
                reason = self._parser.reason(reason)
        logprobs = None
        if self._lists is not None:
            before = self._echoed(echo)
            logprobs = self._lists.entries(delta.logprobs)
            if before is not None:
                logprobs = join_lists(before, logprobs)
        scores = None if show_prompt is None else prompt_logprobs(show_prompt, self._request.scores)
        text = told.content if echo is None else echo + told.content
        return Piece(
            self.index, text, delta.tokens, logprobs, reason, delta.stop_reason, told.reasoning, told.calls, scores
        )

    def _echoed(self, echo: str | None) -> dict[str, Any] | None:
        if echo is None or not isinstance(self._lists, TextLogprobs):
            return None
        return self._lists.prompt(self._request.prompt, self._request.scores, echo)


def _both(first: Parsed, then: Parsed) -> Parsed:
    return Parsed(first.content + then.content, first.reasoning + then.reasoning, first.calls + then.calls)


def join_lists(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Log-probabilities of two pieces; both forms are dicts of lists (or of null)."""
    return {name: value if value is None else value + then[name] for name, value in first.items()}


def join(pieces: list[Piece]) -> Piece:
    """The pieces of one choice as one."""
    first, last = pieces[0], pieces[-1]
    logprobs = first.logprobs
    for piece in pieces[1:]:
        if logprobs is not None and piece.logprobs is not None:
            logprobs = join_lists(logprobs, piece.logprobs)
    return Piece(
        first.choice,
        "".join(p.text for p in pieces),
        tuple(token for p in pieces for token in p.tokens),
        logprobs,
        last.finish_reason,
        last.stop_reason,
        "".join(p.reasoning for p in pieces),
        join_calls([call for p in pieces for call in p.calls]),
        first.prompt_logprobs,
        first.score,
    )


def join_calls(deltas: list[dict[str, Any]]) -> Calls:
    """Whole tool calls of their deltas: the first has id and name, later ones add to the arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        call = calls.get(delta["index"])
        if call is None:
            calls[delta["index"]] = {**delta, "function": dict(delta["function"])}
        else:
            call["function"]["arguments"] += delta["function"].get("arguments", "")
    return tuple({name: value for name, value in call.items() if name != "index"} for call in calls.values())


@dataclass
class Usage:
    """Tokens that went in, of them those that came from the prefix cache, and tokens that came out."""

    prompt: int
    cached: int
    generated: int

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass
class Answers:
    """Owns: the choices of one HTTP request; prompt p's branch b is choice p * n + b.

    Promises: each choice is told from its first piece to the one with its finish reason; where more is computed than
    told (``best_of``, beams) only the best are, at the end.
    """

    generation: Generation
    names: TokenNames
    logprobs: Callable[[TokenNames, bool], TextLogprobs | ChatLogprobs]
    parser: Callable[[], Parser | None] = lambda: None
    _choices: dict[tuple[int, int], Choice] = field(default_factory=dict)

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces as they come; raises what :meth:`Generation.take` does."""
        take, asked = self.generation.take, self.generation.asked
        if not asked.ranked:
            while told := await take():
                yield [self._piece(index, delta) for index, delta in told]
            return
        kept: Told = []
        while told := await take():
            kept += told
        for index, request in enumerate(self.generation.requests):
            if request.beams is not None:
                yield self._beams(index, request)
            else:
                yield self._best(index, [delta for i, delta in kept if i == index])

    async def whole(self) -> list[Piece]:
        """Every choice as one piece, in order."""
        found: dict[int, list[Piece]] = {}
        async for pieces in self.pieces():
            for piece in pieces:
                found.setdefault(piece.choice, []).append(piece)
        return [join(found[choice]) for choice in sorted(found)]

    def usage(self) -> Usage:
        requests = self.generation.requests
        return Usage(sum(len(r.prompt) for r in requests), sum(r.cached for r in requests), self.generation.generated)

    def _piece(self, index: int, delta: Delta, branch: int | None = None) -> Piece:
        """``branch``: the one that the delta's is told as."""
        asked = self.generation.asked
        key = index, delta.branch if branch is None else branch
        choice = self._choices.get(key)
        if choice is not None:
            return choice.piece(delta)
        request = self.generation.requests[index]
        wanted = asked.logprobs is not None
        lists = self.logprobs(self.names, request.params.skip_special_tokens) if wanted else None
        choice = self._choices[key] = Choice(index * asked.n + key[1], request, lists, self.parser())
        echo = self._echo(request) if asked.echo else None
        return choice.piece(delta, echo, self.names if asked.prompt_logprobs else None)

    def _echo(self, request: Request) -> str:
        if request.prompt_text is not None:
            return request.prompt_text
        return self.names.tokenizer.decode(request.prompt)

    def _best(self, index: int, deltas: list[Delta]) -> list[Piece]:
        """The ``n`` branches with the largest sum of log-probabilities; equal ones in the order of branches."""
        branches: dict[int, list[Delta]] = {}
        for delta in deltas:
            branches.setdefault(delta.branch, []).append(delta)
        score = {b: sum(s.logprob for d in own for s in d.logprobs) for b, own in branches.items()}
        best = sorted(sorted(branches), key=lambda b: -score[b])[: self.generation.asked.n]
        return [self._piece(index, delta, rank) for rank, b in enumerate(best) for delta in branches[b]]

    def _beams(self, index: int, request: Request) -> list[Piece]:
        asked = self.generation.asked
        out = []
        for found in beam_completions(request, self.names.tokenizer.decode)[: asked.n]:
            tokens = tuple(found.token_ids)
            delta = Delta(request.id, found.index, tokens, found.text, (), found.finish_reason)
            out.append(self._piece(index, delta)._replace(score=found.score))
            self.generation.generated += len(tokens)
        return out
