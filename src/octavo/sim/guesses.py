"""A drafter for executors without a model, whose texts repeat nothing that a lookup could find."""

from __future__ import annotations

from array import array

from octavo.core.plan import Draw
from octavo.core.sequence import Sequence
from octavo.sim.executors import Next, mixed


class Guesses:
    """Drafts what ``choose`` will draw, and from some draft on something else; how many of which is a hash.

    Where parameters change the draw (``min_tokens``, biases) it is wrong without meaning to be.
    """

    def __init__(self, choose: Next, most: int) -> None:
        self._choose = choose
        self.most = most

    def drafts(self, sequence: Sequence, most: int, rows: int) -> array[int]:
        mix = mixed((sequence.number, len(sequence.tokens)))
        count = min(most, mix % (self.most + 1))
        right = (mix >> 20) % (count + 2)
        tokens = sequence.tokens[:]
        for i in range(count):
            draw = Draw(sequence.branch, len(tokens), *sequence.params.constants)
            tokens.append(self._choose(tokens, draw) + (i >= right))
        return tokens[len(sequence.tokens) :]

    def forget(self, number: int) -> None:
        pass
