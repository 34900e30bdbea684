"""Bringing published blocks back from disk: into the host tier first, while the sequence waits for them."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.core.plan import DISK, HOST, Move, Place
from octavo.core.sequence import Sequence
from octavo.paging.disk import Arrival, DiskTier, Flight, file_name, label_of
from octavo.paging.holding import Match
from octavo.paging.kv import KV
from octavo.paging.prefix import Node

MOST = 64  # blocks a flight


def frontier(kv: KV, sequence: Sequence, match: Match | None) -> tuple[Node | None, int]:
    """The chain's last node that is in memory, and how many blocks lead to it."""
    if match is not None:
        return (match.nodes[-1], match.start // kv.block_size + len(match.nodes)) if match.nodes else (None, 0)
    holding = kv.holdings.get(sequence.number)
    if holding is None:
        return kv.index.known_root(sequence.salt), 0
    if holding.closed or holding.published * kv.block_size != sequence.computed:
        return None, 0
    return holding.node, holding.published


def fetchable(kv: KV, sequence: Sequence, match: Match | None, room: int, coming: Mapping[bytes, bool]) -> int:
    """How many blocks beyond a hit lie on disk, up to what a flight takes and the host tier has ``room`` for.

    -1 if the next one is on its way already, or is among those ``coming`` by key that this step asks for.
    """
    disk = kv.disk
    if disk is None or kv.host is None or sequence.scoring or (match is not None and match.saved is not None):
        return 0
    _, depth = frontier(kv, sequence, match)
    if match is None and sequence.computed % kv.block_size:
        return 0
    most = min((len(sequence.tokens) - 1) // kv.block_size, depth + MOST)
    found = 0
    while depth + found < most:
        key = kv.keys(sequence, depth + found + 1)[depth + found + 1]
        names = [file_name(key, g) for g in range(kv.groups)]
        if key in coming or any(name in disk.flying for name in names):
            return found or -1
        if depth < disk.asked.get(sequence.number, 0):
            return 0  # asked for before and lost again: better computed than asked for without end
        if found >= room or not all(name in disk.slots for name in names):
            break
        found += 1
    return found


def fetched_keys(kv: KV, sequence: Sequence, match: Match | None, blocks: int) -> list[bytes]:
    """Keys of the next ``blocks`` blocks of the sequence's chain beyond a hit."""
    _, depth = frontier(kv, sequence, match)
    return kv.keys(sequence, depth + blocks)[depth + 1 : depth + blocks + 1]


def fetch(kv: KV, sequence: Sequence, match: Match | None, blocks: int) -> list[Move]:
    """Ask for the next ``blocks`` blocks of the sequence's chain; its moves are slow ones."""
    disk, host = kv.disk, kv.host
    assert disk is not None and host is not None
    parent, depth = frontier(kv, sequence, match)
    if parent is None:
        parent, depth = kv.index.root(sequence.salt), 0
    if parent not in kv.index:  # given up since the decision
        return []
    parent.pins += 1  # until all has landed
    size = kv.block_size
    moves: list[Move] = []
    flight = Flight(parent, [])
    disk.asked[sequence.number] = depth + blocks
    keys = kv.keys(sequence, depth + blocks)
    for b in range(depth, depth + blocks):
        tokens = sequence.tokens[b * size : (b + 1) * size].tobytes()
        for g in range(kv.groups):
            name = file_name(keys[b + 1], g)
            if not host.pool.free or name not in disk.slots or name in disk.flying:
                continue
            from_slot = disk.slots[name]
            disk.pool.hold(from_slot)  # first: taking a host slot may push another block to disk
            slot = host.pool.take()
            moves += host.emitted()
            disk.flying[name] = True
            flight.arrivals.append(Arrival(keys[b + 1], tokens, g, slot, from_slot))
            label = label_of(keys[b + 1], keys[b], g, tokens)
            moves.append(Move(Place(DISK, from_slot), Place(HOST, slot), name, label))
    if flight.arrivals:
        disk.flights.append(flight)
    else:
        parent.pins -= 1
        kv.index.prune(parent)
    return moves


def landed(kv: KV, move: Move, ok: bool) -> None:
    """A slow move has ended."""
    disk = kv.disk
    assert disk is not None
    if move.target.tier == DISK:
        disk.stored(move.target.slot, ok)
        return
    for flight in disk.flights:
        for arrival in flight.arrivals:
            if arrival.slot == move.target.slot and arrival.ok is None:
                arrival.ok = ok
                disk.fetched(arrival.disk, ok)
                if flight.landed:
                    _land(kv, disk, flight)
                return
    raise RuntimeError(f"a move ended that nobody waits for: {move}")


def _land(kv: KV, disk: DiskTier, flight: Flight) -> None:
    """Name what has arrived, block after block; from the first gap on it is of no use."""
    host = kv.host
    assert host is not None
    node: Node | None = flight.parent
    for arrival in flight.arrivals:
        found = None
        if node is not None and arrival.ok:
            if arrival.key == node.key and node is not flight.parent:
                found = node  # the same block in a further group
            else:
                found = kv.index.add_bytes(node, arrival.key, arrival.tokens)
        if found is not None and found.hosts[arrival.group] < 0:
            host.pool.name(arrival.slot, (found, arrival.group))
            found.hosts[arrival.group] = arrival.slot
        host.pool.drop(arrival.slot)
        del disk.flying[file_name(arrival.key, arrival.group)]
        node = found
    disk.flights.remove(flight)
    flight.parent.pins -= 1
    kv.index.prune(flight.parent)
