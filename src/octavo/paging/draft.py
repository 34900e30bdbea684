"""Counts as they would be after a decision: lets the scheduler decide exactly without touching a block."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from octavo.core.sequence import Sequence
from octavo.paging.holding import Match
from octavo.paging.kv import KV
from octavo.paging.table import BlockTable


class Draft:
    """Owns: how far counts would differ from the pool's, and how many blocks and slots of the host tier would be free.

    Promises: never says that something fits which a commit (all hits pinned, then all fetches, all releases, all
    attaches, all extends, each in the order of the draft) could not do.  A hit that lies in the free list costs the
    block it revives, so nothing is counted as free and as present at once.
    """

    def __init__(self, kv: KV) -> None:
        self.kv = kv
        self.free = kv.pool.free
        self.host_free = kv.host.pool.free if kv.host is not None else 0
        self._pinned: dict[int, bool] = {}  # slots of the host tier that were free before a hit pinned them
        self._delta: dict[int, int] = {}

    def count(self, block: int) -> int:
        return self.kv.pool.counts[block] + self._delta.get(block, 0)

    def extend_cost(self, sequence: Sequence, start: int, stop: int, attached: int = 0) -> int:
        """Blocks to take so that start..stop-1 can be written; ``attached`` blocks a group come from a hit."""
        missing, copies = self._needs(sequence, start, stop, attached)
        return missing + len(copies)

    def extend(self, sequence: Sequence, start: int, stop: int, attached: int = 0) -> None:
        missing, copies = self._needs(sequence, start, stop, attached)
        self.free -= missing + len(copies)
        for table, b in copies:
            self._change(table.ids[b], -1)

    def lengthen(self, stop: int, end: int) -> int:
        """Let a row that ends at ``stop``, the end of its sequence's blocks, go on to ``end`` or as far as blocks are
        free; returns how far."""
        size, groups = self.kv.block_size, self.kv.groups
        have = -(-stop // size)
        blocks = min(-(-end // size) - have, self.free // groups)
        self.free -= blocks * groups
        return min(end, (have + blocks) * size)

    def _needs(
        self, sequence: Sequence, start: int, stop: int, attached: int
    ) -> tuple[int, Seq[tuple[BlockTable, int]]]:
        """How many blocks to append in all groups, and which ones to copy."""
        kv = self.kv
        want = -(-stop // kv.block_size)
        holding = kv.holdings.get(sequence.number)
        if attached or holding is None:
            return kv.groups * max(0, want - attached), ()
        missing = want - len(holding.tables[0].ids)
        return kv.groups * missing if missing > 0 else 0, kv.to_copy(sequence.number, start, stop, self.count)

    def attach_cost(self, sequence: Sequence, match: Match) -> int:
        """Blocks fewer to be free after attaching a hit; negative if windows pass more than the hit revives."""
        trial = Draft(self.kv)
        trial._delta = dict(self._delta)
        trial.attach(sequence, match)
        return self.kv.pool.free - trial.free

    def pinnable(self, match: Match) -> bool:
        """Whether the fetches so far leave the host tier's part of a hit where it is."""
        return len(self._to_pin(match)) <= self.host_free

    def _to_pin(self, match: Match) -> list[int]:
        host = self.kv.host
        if host is None:
            return []
        slots = [node.hosts[group] for node, group in self.kv.attached_nodes(match) if node.blocks[group] < 0]
        return [slot for slot in slots if host.pool.counts[slot] == 0 and slot not in self._pinned]

    def fetch(self, blocks: int) -> None:
        """So many blocks of each group come from disk into the host tier."""
        self.host_free -= blocks * self.kv.groups

    def attach(self, sequence: Sequence, match: Match) -> None:
        for slot in self._to_pin(match):
            self._pinned[slot] = True
            self.host_free -= 1
        for node, group in self.kv.attached_nodes(match):
            block = node.blocks[group]
            if block < 0:  # in the host tier: it comes back into a free block
                self.free -= 1
                continue
            self.free -= self.count(block) == 0
            self._change(block, 1)
        if match.saved is not None:
            self.free -= len(match.saved.held())
        if sequence.number in self.kv.holdings:
            self._drop(self.kv.passed_blocks(sequence.number, match.length))

    def release(self, sequence: Sequence) -> None:
        for table in self.kv.holdings[sequence.number].tables:
            self._drop(table.live())

    def _drop(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._change(block, -1)
            self.free += self.count(block) == 0

    def _change(self, block: int, by: int) -> None:
        self._delta[block] = self._delta.get(block, 0) + by
