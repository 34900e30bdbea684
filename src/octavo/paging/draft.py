"""Counts as they would be after a decision: lets the scheduler decide exactly without touching a block."""

from __future__ import annotations

from octavo.core.sequence import Sequence
from octavo.paging.kv import KV, Match


class Draft:
    """Owns: how far counts would differ from the pool's, and how many blocks would be free.

    Promises: never says that something fits which a commit (all releases, then all attaches, then all extends, each in
    the order of the draft) could not do.  A hit that lies in the free list costs the block it revives, so nothing is
    counted as free and as present at once.
    """

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.free = kv.pool.free
        self._delta: dict[int, int] = {}

    def count(self, block: int) -> int:
        return self.kv.pool.counts[block] + self._delta.get(block, 0)

    def extend_cost(self, sequence: Sequence, start: int, stop: int, attached: int = 0) -> int:
        """Blocks to take so that start..stop-1 can be written; ``attached`` blocks a group come from a hit."""
        kv = self.kv
        want = -(-stop // kv.block_size)
        holding = kv.holdings.get(sequence.number)
        if attached or holding is None:
            return kv.groups * max(0, want - attached)
        cost = 0
        logical = start // kv.block_size
        for table in holding.tables:
            have = len(table)
            if table.head <= logical < have:
                block = table.ids[logical]
                cost += kv.shared(block, self.count(block))
            if want > have:
                cost += want - have
        return cost

    def extend(self, sequence: Sequence, start: int, stop: int, attached: int = 0) -> None:
        self.free -= self.extend_cost(sequence, start, stop, attached)
        holding = self.kv.holdings.get(sequence.number)
        if attached or holding is None:
            return
        logical = start // self.kv.block_size
        for table in holding.tables:
            if table.head <= logical < len(table):
                block = table.ids[logical]
                if self.kv.shared(block, self.count(block)):
                    self._change(block, -1)

    def attach_cost(self, match: Match) -> int:
        return sum(self.count(block) == 0 for block in self.kv.attached_blocks(match))

    def attach(self, match: Match) -> None:
        for block in self.kv.attached_blocks(match):
            self.free -= self.count(block) == 0
            self._change(block, 1)

    def release(self, sequence: Sequence) -> None:
        for table in self.kv.holdings[sequence.number].tables:
            for block in table.live():
                self._change(block, -1)
                self.free += self.count(block) == 0

    def _change(self, block: int, by: int) -> None:
        self._delta[block] = self._delta.get(block, 0) + by
