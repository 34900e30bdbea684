"""Who goes first: a policy is a rank key and a level.

Sequences are served in the order of their rank, smaller first, and memory is taken from the worst rank.  A waiting
sequence may push a running one out of memory only if its *level* is better (or if it is the best-ranked of all).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.sequence import Sequence

Rank = tuple[float, ...]


@dataclass(frozen=True)
class Policy:
    name: str
    rank: Callable[[Sequence, float], Rank]
    level: Callable[[Sequence], int]


FIRST_COME = Policy("fcfs", lambda s, now: (s.request, s.branch), lambda s: 0)
PRIORITY = Policy("priority", lambda s, now: (s.priority, s.request, s.branch), lambda s: s.priority)

POLICIES = {p.name: p for p in (FIRST_COME, PRIORITY)}
