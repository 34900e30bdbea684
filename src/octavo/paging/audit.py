"""Recount everything from the tables, and say what does not add up."""

from __future__ import annotations

from octavo.paging.kv import KV
from octavo.paging.table import HOLE


def audit(kv: KV) -> None:
    """Raises AssertionError naming the first thing that is wrong.  Pure: changes nothing.

    Counts equal table entries; free and held sum to the pool; the free list holds just the blocks of count 0, those
    without content first; named blocks and nodes point at each other; holes are at the heads; tables of a sequence
    have one length; what a sequence may write without asking is nobody else's and has no name.
    """
    pool = kv.pool
    counts = [0] * pool.size
    for number, holding in kv.holdings.items():
        lengths = {len(t) for t in holding.tables}
        _check(len(lengths) == 1, f"sequence {number}: tables of different lengths {sorted(lengths)}")
        for table in holding.tables:
            for b, block in enumerate(table.ids):
                _check((block == HOLE) == (b < table.head), f"sequence {number}: hole or block at {b} out of place")
                if block != HOLE:
                    _check(0 <= block < pool.size, f"sequence {number}: block {block} is not of this pool")
                    counts[block] += 1
        for table in holding.tables:
            first = max(holding.published, holding.since // kv.block_size, table.head)
            for block in table.ids[first : holding.until // kv.block_size]:
                own = pool.counts[block] == 1 and pool.content[block] is None
                _check(own, f"sequence {number} thinks block {block} its own to write")
        if holding.planned is not None:
            same = holding.planned == tuple(t.ids for t in holding.tables)
            _check(same, f"sequence {number}: the tables kept for plans are old")
        node = holding.node
        _check(node.pins > 0, f"sequence {number}: its chain's end is not pinned")
    for block in range(pool.size):
        _check(counts[block] == pool.counts[block], f"block {block}: count {pool.counts[block]}, held {counts[block]}")
    order = pool.free_order()
    _check(len(order) == pool.free == counts.count(0), f"free list has {len(order)}, free counter {pool.free}")
    _check(all(counts[b] == 0 for b in order) and len(set(order)) == len(order), "the free list holds a held block")
    _check(list(map(bool, pool.named)) == [c is not None for c in pool.content], "content and its marks differ")
    named = [pool.content[b] is not None for b in order]
    _check(named == sorted(named), "a cached block is ahead of an empty one in the free list")
    _check(sum(named) == pool.cached, f"{sum(named)} free blocks have content, counter says {pool.cached}")
    _audit_index(kv)
    _audit_host(kv)


def _audit_host(kv: KV) -> None:
    """A slot is held by swapped-out sequences only; contents and nodes point at each other."""
    if kv.host is None:
        _check(not kv.saved, "blocks are saved, but there is no host tier")
        return
    pool = kv.host.pool
    counts = [0] * pool.size
    for saved in kv.saved.values():
        for slot in saved.held():
            counts[slot] += 1
            _check(pool.content[slot] is None, f"host slot {slot} is a sequence's own and has content")
    for flight in kv.disk.flights if kv.disk else ():
        for arrival in flight.arrivals:
            counts[arrival.slot] += 1
    _check(counts == list(pool.counts), "host slots: counts differ from what swapped-out sequences and reads hold")
    _check(len(pool.free_order()) == pool.free == counts.count(0), "host slots: the free list does not add up")
    entries = 0
    for node in kv.index.nodes():
        for group, slot in enumerate(node.hosts):
            if slot >= 0:
                entries += 1
                _check(pool.content[slot] == (node, group), f"host slot {slot} does not know the node that names it")
    _check(entries == sum(c is not None for c in pool.content), "a host slot is named by a node that is gone")


def _audit_index(kv: KV) -> None:
    nodes = kv.index.nodes()
    entries = 0
    children: dict[int, int] = {}
    pins: dict[int, int] = {}
    for holding in kv.holdings.values():
        pins[id(holding.node)] = pins.get(id(holding.node), 0) + 1
    for flight in kv.disk.flights if kv.disk else ():
        pins[id(flight.parent)] = pins.get(id(flight.parent), 0) + 1
    for node in nodes:
        _check(node.parent in kv.index, "a node whose parent is gone")
        children[id(node.parent)] = children.get(id(node.parent), 0) + 1
        _check(len(node.tokens) == 4 * kv.block_size, "a node holds a block that is not full")
        for group, block in enumerate(node.blocks):
            if block >= 0:
                entries += 1
                _check(kv.pool.content[block] == (node, group), f"block {block} does not know the node that names it")
    _check(entries == sum(c is not None for c in kv.pool.content), "a block is named by a node that is gone")
    for node in nodes + kv.index.roots():
        _check(node.pins == pins.get(id(node), 0), "a node's pins differ from the sequences that end there")
        _check(node.children == children.get(id(node), 0), "a node's child count is wrong")
        _check(node.needed(), "a node nobody needs")


def audit_idle(kv: KV) -> None:
    """With no sequence alive: nothing is held, every block is free, cached or not."""
    audit(kv)
    _check(not kv.holdings, f"{len(kv.holdings)} sequences still hold blocks")
    _check(kv.pool.free == kv.pool.size, f"{kv.pool.size - kv.pool.free} blocks are held by nobody")
    _check(not kv.saved, f"{len(kv.saved)} sequences' own blocks are left in the host tier")
    _check(not kv._keys, "chain keys of closed sequences are kept")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
