"""Logical to physical blocks of one sequence in one layer group."""

from __future__ import annotations

from array import array

HOLE = -1


class BlockTable:
    """Owns: which physical block holds each logical block.

    Promises: grows at the tail; holes (freed blocks that a window has slid past) only at the head::

        logical   0     1     2     3     4
        ids     [HOLE, HOLE,  17,    4,    9 ]
                 `--- head ---'     computed tokens end somewhere in here
    """

    __slots__ = ("ids", "head")

    def __init__(self, ids: array[int] | None = None, head: int = 0) -> None:
        self.ids: array[int] = array("i") if ids is None else ids
        self.head = head

    def __len__(self) -> int:
        return len(self.ids)

    def live(self) -> array[int]:
        return self.ids[self.head :]

    def copy(self) -> BlockTable:
        return BlockTable(self.ids[:], self.head)
