"""The host tier: where blocks go that the device pool has no room for, and from where they come back."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.plan import DEVICE, HOST, Move, Place
from octavo.paging.pool import BlockPool

if TYPE_CHECKING:
    from octavo.paging.disk import DiskTier
    from octavo.paging.prefix import Node, PrefixIndex


@dataclass(frozen=True)
class Saved:
    """What a swapped-out sequence left here for itself: its blocks that have no content to be found by.

    ``computed`` tokens were in blocks; logical blocks from ``first`` on are in ``slots[g]`` (-1 where the window had
    passed); those before are to be found by content.
    """

    computed: int
    first: int
    slots: tuple[array[int], ...]

    def held(self) -> list[int]:
        return [slot for group in self.slots for slot in group if slot >= 0]


class HostTier:
    """Owns: the ids of the host tier's slots, and what each holds: a published block, or a sequence's own one.

    Promises: a slot with content may be given up for another (oldest first); a sequence's own never, until it is
    restored or dropped.  Moves are emitted in the order in which they must be done.
    """

    def __init__(self, slots: int, index: PrefixIndex) -> None:
        self.pool = BlockPool(slots, self._forgotten)
        self._index = index
        self._mirrors: dict[int, int] = {}  # device block -> slot that holds the same bytes, until the step begins
        self.disk: DiskTier | None = None
        self.moves: list[Move] = []  # to disk, that taking slots has asked for
        self.demoted = 0
        self.evicted = 0

    def demote(self, block: int, node: Node, group: int) -> list[Move]:
        """Keep a published block that the device pool gives up; nothing if there is no slot or it is here already."""
        if node.hosts[group] >= 0 or not self.pool.free:
            return []
        node.pins += 1  # taking a slot may give up this very node's last other place
        slot = self.pool.take()
        node.pins -= 1
        self.pool.name(slot, (node, group))
        node.hosts[group] = slot
        self.pool.drop(slot)
        self.demoted += 1
        return [*self.emitted(), Move(Place(DEVICE, block), Place(HOST, slot))]

    def save(self, block: int) -> tuple[int, list[Move]]:
        """A slot with a sequence's own block; one that several sequences share moves once."""
        slot = self._mirrors.get(block)
        if slot is not None:
            self.pool.hold(slot)
            return slot, []
        slot = self.pool.take()
        self._mirrors[block] = slot
        return slot, [*self.emitted(), Move(Place(DEVICE, block), Place(HOST, slot))]

    def emitted(self) -> list[Move]:
        """Moves that have to be done before the slots taken since the last call are written."""
        moves, self.moves = self.moves, []
        return moves

    def settle(self) -> None:
        """The step begins: from here on device blocks change, and no slot mirrors one."""
        self._mirrors.clear()

    def drop(self, slot: int) -> None:
        self.pool.drop(slot)
        if self.pool.counts[slot] == 0 and self.pool.content[slot] is None:
            for block in [b for b, s in self._mirrors.items() if s == slot]:
                del self._mirrors[block]

    def _forgotten(self, slot: int, content: tuple[Node, int]) -> None:
        node, group = content
        if self.disk is not None:
            move = self.disk.demote(Place(HOST, slot), node, group)
            if move is not None:
                self.moves.append(move)
        node.hosts[group] = -1
        self.evicted += 1
        self._index.prune(node)
