"""Who goes first: a policy is a rank key and a level.

Sequences are served in the order of their rank, smaller first, and memory is taken from the worst rank.  A waiting
sequence may push a running one out of memory only if its *level* is better (or if it is the best-ranked of all).
Ranks that move while sequences run do so in quanta, so that nobody is swapped to and fro.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.sequence import Sequence

Rank = tuple[float, ...]

QUANTUM = 256  # tokens by which a moving rank has to change before it counts
IDLE_LEVEL = 2**62


class Policy:
    """First come, first served; the others differ in :meth:`key` and :meth:`standing`.

    Owns: nothing here; a fair share owns its counters.  Promises: a total order (request and branch break ties), with
    idle sessions behind everybody.
    """

    name = "fcfs"
    moving = False  # whether the rank of a waiting sequence can change

    def rank(self, sequence: Sequence, now: float) -> Rank:
        return (sequence.idle, *self.key(sequence, now), sequence.request, sequence.branch)

    def level(self, sequence: Sequence) -> int:
        return IDLE_LEVEL if sequence.idle else self.standing(sequence)

    def key(self, sequence: Sequence, now: float) -> Rank:
        return ()

    def standing(self, sequence: Sequence) -> int:
        return 0

    def arrived(self, sequence: Sequence) -> None:
        """A new sequence: to be called once for each."""

    def left(self, sequence: Sequence) -> None:
        """A sequence is finished."""

    def served(self, sequence: Sequence, computed: int, drawn: int) -> None:
        """A step computes ``computed`` tokens of a sequence and draws ``drawn`` new ones."""


class Priority(Policy):
    """Lower number first, ties by arrival.  Strict: those below a steady stream wait as long as it lasts."""

    name = "priority"

    def key(self, sequence: Sequence, now: float) -> Rank:
        return (sequence.priority,)

    def standing(self, sequence: Sequence) -> int:
        return sequence.priority


class ShortestRemaining(Policy):
    """Fewest tokens to go first, in quanta; a long one waits while shorter ones keep coming."""

    name = "shortest"
    moving = True

    def key(self, sequence: Sequence, now: float) -> Rank:
        return (-(-(sequence.limit - sequence.computed) // QUANTUM),)


class FairShare(Policy):
    """Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024).

    Owns: for each user the tokens served so far over its weight, an output token counting as two input tokens.  The
    user with the smallest counter goes first.  A user who comes back after a pause is lifted to the smallest counter of
    those who are there, so that idle time is no credit.
    """

    name = "fair"
    moving = True
    input_cost, output_cost = 1.0, 2.0

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self.weights = dict(weights or {})
        self.counters: dict[str, float] = {}
        self._present: dict[str, int] = {}  # user -> sequences in the engine

    def key(self, sequence: Sequence, now: float) -> Rank:
        return (self.counters.get(sequence.user, 0.0) // QUANTUM,)

    def arrived(self, sequence: Sequence) -> None:
        user = sequence.user
        if user not in self._present:
            others = [self.counters.get(u, 0.0) for u in self._present]
            floor = min(others) if others else 0.0
            self.counters[user] = max(self.counters.get(user, 0.0), floor)
        self._present[user] = self._present.get(user, 0) + 1

    def left(self, sequence: Sequence) -> None:
        user = sequence.user
        self._present[user] -= 1
        if not self._present[user]:
            del self._present[user]

    def served(self, sequence: Sequence, computed: int, drawn: int) -> None:
        # Tokens computed again after a preemption are no service to the user.
        cost = self.output_cost * drawn
        if not sequence.preemptions and drawn != computed:
            cost += self.input_cost * computed
        user = sequence.user
        self.counters[user] = self.counters.get(user, 0.0) + cost / self.weights.get(user, 1.0)


POLICIES: dict[str, type[Policy]] = {p.name: p for p in (Policy, Priority, ShortestRemaining, FairShare)}
