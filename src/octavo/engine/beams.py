"""A beam search in the engine: which sequence is which beam.

Beams are sequences like any other: each has its row when memory and budget allow, and waits, parked, until all of its
request's beams have their candidates.  Then the search says who goes on; a beam with several children is forked
(its blocks are shared, and copied only where children write), and one without is dropped with its tail at once.
"""

from __future__ import annotations

from octavo.core.sequence import Sequence
from octavo.decode.beam import BeamSearch, Candidates, Child


class Beams:
    """Owns: one request's search, its running beams' sequences, and the candidates that have come in this round."""

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.sequences: list[Sequence] = []
        self._candidates: dict[int, Candidates] = {}
        self.born = 0  # branch numbers given so far

    def add(self, sequence: Sequence, candidates: Candidates) -> bool:
        """Note one beam's candidates and park it; True once all beams have theirs."""
        self._candidates[sequence.number] = candidates
        sequence.parked = True
        return len(self._candidates) == len(self.sequences)

    def advance(self) -> list[Child]:
        """One round of the search; empty when it is done."""
        found = [self._candidates[s.number] for s in self.sequences]
        self._candidates.clear()
        return self.search.advance(found)
