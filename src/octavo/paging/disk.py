"""The disk tier: which published blocks lie in files, found by key, and what is on its way back."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.plan import DISK, Move, Place
from octavo.paging.pool import BlockPool
from octavo.paging.prefix import Node


def file_name(key: bytes, group: int) -> str:
    return f"{key.hex()}-{group}"


def label_of(key: bytes, parent: bytes, group: int, tokens: bytes) -> bytes:
    """What a block is, to the last token; a file that says otherwise is not believed."""
    return parent + key + group.to_bytes(4, "little") + tokens


@dataclass
class Arrival:
    """One block on its way from disk into a host slot."""

    key: bytes
    tokens: bytes
    group: int
    slot: int  # of the host tier
    disk: int
    ok: bool | None = None


@dataclass
class Flight:
    """Successive blocks of one chain that were asked for together; ``parent`` is pinned until they have landed."""

    parent: Node
    arrivals: list[Arrival]

    @property
    def landed(self) -> bool:
        return all(a.ok is not None for a in self.arrivals)


class DiskTier:
    """Owns: slot ids of the disk tier and the name of the block in each; oldest go first when it is full.

    Promises: a slot that is being read or written is not given to another block.
    """

    def __init__(self, slots: int) -> None:
        self.pool = BlockPool(slots, self._forgotten)
        self.slots: dict[str, int] = {}
        self.flights: list[Flight] = []
        self.flying: dict[str, bool] = {}  # names of blocks on their way back
        self.asked: dict[int, int] = {}  # sequence number -> how many blocks of its chain have been asked for
        self.written = self.read = self.failed = 0

    def adopt(self, names: list[str]) -> list[tuple[int, str]]:
        """Take over the newest of the files that an earlier process left, given oldest first."""
        out = []
        for name in names[-self.pool.size :]:
            slot = self.pool.take()
            self.pool.name(slot, name)
            self.slots[name] = slot
            self.pool.drop(slot)
            out.append((slot, name))
        return out

    def demote(self, source: Place, node: Node, group: int) -> Move | None:
        """Keep a block; None if it is here already or every slot is in transit."""
        name = file_name(node.key, group)
        if name in self.slots or not self.pool.free or node.parent is None:
            return None
        slot = self.pool.take()
        self.pool.name(slot, name)
        self.slots[name] = slot
        label = label_of(node.key, node.parent.key, group, node.tokens)
        return Move(source, Place(DISK, slot), name, label)

    def stored(self, slot: int, ok: bool) -> None:
        """A write has ended."""
        self.pool.drop(slot)
        if ok:
            self.written += 1
        else:
            self.failed += 1
            self.pool.forget(slot)

    def fetched(self, slot: int, ok: bool) -> None:
        """A read has ended; a file that could not be used is forgotten."""
        self.pool.drop(slot)
        if ok:
            self.read += 1
        else:
            self.failed += 1
            self.pool.forget(slot)

    def _forgotten(self, slot: int, name: str) -> None:
        del self.slots[name]
