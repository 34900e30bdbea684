"""What the engine tells of a request while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from octavo.core.plan import TokenLogprobs


class Delta(NamedTuple):
    """New tokens and text of one branch; with ``finish_reason`` its last."""

    request: str
    branch: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The final event of a request: all branches ended, or ``error`` says why they could not."""

    request: str
    error: str | None = None
