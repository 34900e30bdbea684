"""What one step does, frozen: moves of blocks, then rows of tokens.  And what came of it.

A worker that has the weights, its stores and a plan needs nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

NO_TOKENS: array[int] = array("i")

DEVICE, HOST, DISK = 0, 1, 2  # the tier that attention reads, and what lies behind it


@dataclass(frozen=True, slots=True)
class Place:
    """A block-sized slot of one tier."""

    tier: int
    slot: int


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one block's bytes; copy-on-write, swap and promotion are all this.

    Moves to and from disk carry what the block is: a file's ``name``, and a ``label`` that the file must repeat.
    """

    source: Place
    target: Place
    name: str = ""
    label: bytes = b""


class Mask(Protocol):
    """Which tokens may be drawn: bit t % 8 of byte t // 8 is token t's.

    What it says is settled by the tokens before the draw.  Computing it takes a while, so it is begun just before the
    model runs, beside it, and asked for just before sampling.
    """

    def begin(self) -> None: ...

    def bits(self) -> bytes: ...


class Draw(NamedTuple):
    """One token to be drawn from a row's last logits, for one branch.

    The result is a function of the logits, these values and nothing else.  ``position`` is that of the new token.
    ``bias`` holds (token, value) pairs, ``-inf`` to ban; ``history`` (token, count in the output) pairs, count 0 for
    tokens that only the prompt holds, empty without penalties; ``mask``, if any, says what a guide allows.
    """

    branch: int
    position: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition: float
    presence: float
    frequency: float
    seed: int
    logprobs: int  # -1: none
    bias: tuple[tuple[int, float], ...] = ()
    history: tuple[tuple[int, int], ...] = ()
    mask: Mask | None = None


class Row(NamedTuple):
    """A run of consecutive tokens of one sequence: positions start .. start + len(tokens) - 1.

    ``tables`` has one block table for each layer group.  ``draws`` sample from the last token's logits; but if the last
    ``drafts`` tokens are drafts, there is a draw for each of them and one more, from the logits of the token before
    the first draft and of each draft, in order: what is drawn says which drafts are right, and what follows.  With
    ``score`` >= 0 the logits of the first ``len(targets)`` tokens are scored against ``targets`` (the tokens that
    follow them) with that many best ones reported.

    A negative last token, -(1 + k), stands for what draw k of the plan submitted just before this one has drawn (all
    draws of its rows, counted in order); for any token if that draw failed.
    """

    sequence: int
    start: int
    tokens: array[int]
    tables: tuple[array[int], ...]
    draws: tuple[Draw, ...] = ()
    targets: array[int] = NO_TOKENS
    score: int = -1
    drafts: int = 0


def stand_in(draw: int) -> int:
    """The token that stands for what draw number ``draw`` of the plan before draws."""
    return -1 - draw


def waits(rows: Sequence[Row]) -> bool:
    """Whether a row's last token stands for one that the plan before draws."""
    return any(row.tokens[-1] < 0 for row in rows)


def filled(rows: Sequence[Row], drawn: Sequence[int]) -> tuple[Row, ...]:
    """The rows with real tokens: ``drawn`` has one for each draw of the plan before, negative where it failed."""
    return tuple(
        row._replace(tokens=row.tokens[:-1] + array("i", [max(0, drawn[-1 - row.tokens[-1]])]))
        if row.tokens[-1] < 0
        else row
        for row in rows
    )


@dataclass(frozen=True, slots=True)
class Plan:
    step: int
    moves: tuple[Move, ...]
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of rows that read or recompute a prompt: all but single ones, with drafts or without."""
        return sum(len(row.tokens) for row in self.rows if len(row.tokens) - row.drafts > 1)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The most that one step is, whatever the load: the scheduler keeps to it, and executors make room for it once.

    So many ``tokens``, in ``rows`` of one sequence each, of which so many ``logits`` are wanted; a row sees positions
    before ``context``.  The tokens are the budget's most; the rows those of the sequences that may run at a time; each
    row wants one of its logits and one more for each draft, but for scored chunks, which together want no more than
    ``most_logits`` of the scheduler.
    """

    tokens: int
    rows: int
    logits: int
    context: int


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw logits: the chosen token's, its rank, and the best ones.

    ``best`` is (token, logprob) in rank order.
    """

    token: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...] = ()


class RowResult(NamedTuple):
    """What a row yields: a token for each draw, with its log-probabilities if asked; scores; or an error.

    A row with drafts may yield fewer tokens: none for a draw that fails, nor after it.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    scores: tuple[TokenLogprobs, ...] = ()
    error: str | None = None


def drawn(rows: Sequence[Row], results: Sequence[RowResult]) -> list[int]:
    """The tokens of all draws of a plan's rows, in order; -1 where one failed."""
    out: list[int] = []
    for row, result in zip(rows, results, strict=True):
        out += result.tokens
        out += [-1] * (len(row.draws) - len(result.tokens))
    return out


@dataclass(frozen=True, slots=True)
class StepResult:
    """One :class:`RowResult` for each row of the plan, in order; and the slow moves, of this or an earlier plan, that
    have ended, well or not."""

    step: int
    rows: tuple[RowResult, ...]
    moved: tuple[tuple[Move, bool], ...] = ()
