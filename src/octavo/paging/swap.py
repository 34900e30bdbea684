"""Preemption by swap: a sequence's own blocks to the host tier, and back before its next row."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from octavo.core.plan import DEVICE, HOST, Move, Place
from octavo.core.sequence import Sequence
from octavo.paging.holding import Match
from octavo.paging.host import HostTier, Saved
from octavo.paging.prefix import Node
from octavo.paging.table import HOLE

if TYPE_CHECKING:
    from octavo.paging.kv import KV


def swap_out(kv: KV, sequence: Sequence) -> bool:
    """Save the blocks that cannot be found by content; then give back all.  False: no room, only given back."""
    holding, host = kv.holdings[sequence.number], kv.host
    first, done = holding.published, False
    if host is not None:
        own = [table.ids[max(first, table.head) :] for table in holding.tables]
        blocks = {b: True for ids in own for b in ids}
        if host.pool.free >= len(blocks):
            kv.saved[sequence.number] = Saved(
                sequence.computed,
                first,
                tuple(
                    array("i", [HOLE] * (max(first, table.head) - first) + [_save(kv, host, b) for b in ids])
                    for table, ids in zip(holding.tables, own, strict=True)
                ),
            )
            done = True
    kv.release(sequence.number)
    return done


def _save(kv: KV, host: HostTier, block: int) -> int:
    slot, moves = host.save(block)
    kv.request(moves)
    return slot


def resumed(kv: KV, sequence: Sequence, saved: Saved) -> Match | None:
    """All that a swapped-out sequence had, if its published blocks are still to be found in some tier."""
    size = kv.block_size
    node = kv.index.known_root(sequence.salt)
    keys = kv.keys(sequence, saved.first)
    nodes: list[Node] = []
    for b in range(saved.first):
        found = node and kv.index.find(node, keys[b + 1], sequence.tokens[b * size : (b + 1) * size])
        if found is None:
            return None
        for g, window in enumerate(kv.windows):
            if b >= kv.first_needed(window, saved.computed) and found.blocks[g] < 0 and found.hosts[g] < 0:
                return None
        nodes.append(found)
        node = found
    return Match(0, saved.computed, tuple(nodes), -(-saved.computed // size), saved)


def restore(kv: KV, sequence: Sequence, saved: Saved) -> None:
    """A sequence's own blocks back from the host tier."""
    for table, slots in zip(kv.holdings[sequence.number].tables, saved.slots, strict=True):
        for slot in slots:
            if slot < 0:
                table.ids.append(HOLE)
                table.head = len(table)
                continue
            block = kv.pool.take()
            kv.request([Move(Place(HOST, slot), Place(DEVICE, block))])
            table.ids.append(block)
    kv.forget_saved(sequence.number)
