"""Prompts of a wanted length: seeded words, or token ids, that share exactly the prefixes they are meant to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.loadgen.traffic import TRACE_BLOCK, Planned

# Short and frequent: nearly every tokenizer has each of them, with the space ahead, as one token.
WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or had an they which "
    "one you were all her she there would their we him been has when who will no more if out so up said what its "
    "about than into them can only other time new some could these two may first then do any like my now over such "
    "our man me even most made after also did many off before must well back through years much where your way down "
    "should because long each just state those people too how little good world make very year still see own work "
    "men day get here old life both between being under three never know same last another while us might great go "
    "come since against right came take used himself few house use place during high without again home around small "
    "however found part school thought went say general once upon water left war set end put yet hand light form"
).split()


@dataclass(frozen=True)
class Writer:
    """Owns: the vocabulary, words or token ids.

    Promises: a request's prompt depends on the seed and the request alone, and shares with others only what their
    plans share: common prefixes, or a trace's blocks.
    """

    vocabulary: Sequence[str] | Sequence[int]
    seed: int = 0
    prefix_tokens: int = 0
    scale: float = 1.0

    def prompt(self, planned: Planned) -> str | list[int]:
        """As many words or ids as tokens are wanted; a word is about a token, the server's count is what is told."""
        items: list[str | int] = []
        if planned.prefix is not None:
            items += self._draw(f"prefix {planned.prefix}", self.prefix_tokens)
        size = max(1, round(TRACE_BLOCK * self.scale))
        end = len(items) + planned.prompt
        for block in planned.blocks:
            items += self._draw(f"block {block}", min(size, end - len(items)))
        items += self._draw(f"request {planned.number}", end - len(items))
        return _joined(items)

    def _draw(self, what: str, count: int) -> Sequence[str | int]:
        if count <= 0:
            return []
        # The draw goes on in the same order whatever the count: a block cut short begins like the whole one.
        return random.Random(f"{self.seed} {what}").choices(self.vocabulary, k=count)


def _joined(items: Sequence[str | int]) -> str | list[int]:
    ids = [item for item in items if isinstance(item, int)]
    return ids if len(ids) == len(items) else " ".join(str(item) for item in items)
