"""The blocks of one tier: reference counts and an oldest-first free list."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any


class BlockPool:
    """Owns: the ids 0..n-1 of one tier: how often each is held, in which order free ones are reused, what each caches.

    Promises: take, hold and drop are O(1); a free block keeps its content until it is taken again, and blocks without
    content are taken first, then the ones that were dropped longest ago; a block's identity dies in :meth:`forget`
    alone, which tells the index.
    """

    def __init__(self, size: int, forgotten: Callable[[int, Any], None] = lambda block, content: None) -> None:
        if size < 1:
            raise ValueError(f"a pool needs at least one block, got {size}")
        self.size = size
        self.counts: array[int] = array("i", bytes(4 * size))
        self.content: list[Any] = [None] * size
        self.named = bytearray(size)  # 1 where there is content: to be copied whole by who draws the pool
        self._forgotten = forgotten
        # Doubly linked list of free blocks through one sentinel, at index `size`:
        #   sentinel -> next to be taken ... last to be taken -> sentinel
        self._next: array[int] = array("i", [*range(1, size + 1), 0])
        self._prev: array[int] = array("i", [size, *range(size)])
        self.free = size
        self.cached = 0  # free blocks with content

    def take(self) -> int:
        """The free block to be reused next, held once, its old content forgotten."""
        block = self._next[self.size]
        if block == self.size:
            raise RuntimeError("no free block")
        self.forget(block)
        self._unlink(block)
        self.counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        if self.counts[block] == 0:
            self._unlink(block)
        self.counts[block] += 1

    def drop(self, block: int) -> None:
        count = self.counts[block] - 1
        if count < 0:
            raise RuntimeError(f"block {block} dropped more often than held")
        self.counts[block] = count
        if count == 0:
            self._link(block, last=self.content[block] is not None)

    def name(self, block: int, content: Any) -> None:
        """Give a held block a content under which it can be found again."""
        if self.content[block] is not None or self.counts[block] == 0:
            raise RuntimeError(f"block {block} cannot be named: it is free, or has a content already")
        self.content[block] = content
        self.named[block] = 1

    def forget(self, block: int) -> None:
        content = self.content[block]
        if content is None:
            return
        free = self.counts[block] == 0
        if free:
            self._unlink(block)  # counts it out of the cached ones, so before the content goes
        self.content[block] = None
        self.named[block] = 0
        if free:
            self._link(block, last=False)
        self._forgotten(block, content)

    def free_order(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        out, block = [], self._next[self.size]
        while block != self.size:
            out.append(block)
            block = self._next[block]
        return out

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.free -= 1
        if self.content[block] is not None:
            self.cached -= 1

    def _link(self, block: int, last: bool) -> None:
        end = self.size
        before, after = (self._prev[end], end) if last else (end, self._next[end])
        self._next[before] = block
        self._prev[block] = before
        self._next[block] = after
        self._prev[after] = block
        self.free += 1
        if self.content[block] is not None:
            self.cached += 1
