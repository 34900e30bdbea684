"""What a sequence holds in blocks, and what it could take up from the prefix cache."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from octavo.paging.host import Saved
from octavo.paging.prefix import Node
from octavo.paging.table import BlockTable


@dataclass(frozen=True, slots=True)
class Match:
    """A usable prefix hit: ``length`` tokens in all, of which the sequence had computed ``start`` before."""

    start: int
    length: int
    nodes: tuple[Node, ...]  # the chain's nodes, from block start/B on
    blocks: int  # logical blocks that are covered once it is attached
    saved: Saved | None = None  # what follows the nodes: the sequence's own blocks in the host tier


class Holding:
    """What one sequence holds: a table for each group, and where its chain of published blocks ends.

    Also what most steps ask for and few change: which positions it may write without a thought, and its tables as the
    last plan had them.  :meth:`changed` forgets both.
    """

    __slots__ = ("tables", "node", "published", "closed", "since", "until", "planned")

    def __init__(self, groups: int, root: Node) -> None:
        self.tables = [BlockTable() for _ in range(groups)]
        self.node = root
        self.published = 0  # blocks of the chain that `node` closes
        self.closed = False  # the chain met a colliding key: nothing further is published
        self.changed()

    def changed(self) -> None:
        self.since = self.until = 0  # the blocks of these positions that are not published are this sequence's alone
        self.planned: tuple[array[int], ...] | None = None
