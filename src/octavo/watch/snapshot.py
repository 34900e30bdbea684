"""The pool at one moment, copied between two steps; and such moments as small frames of bytes.

A frame says what has changed since the frame before it, or, if it is a *key*, everything::

    u32   bytes that follow
    u32   serial number of the frame; bit 31 set in a key
    f64   Unix time
    f64   figures, in the order of FIGURES
    ...   zlib stream of:
            u32    length of the JSON, a multiple of 4 (spaces at its end)
            JSON   {"sequences": [[number, request, branch, state, tokens, computed, prompt tokens,
                                   [[head, kept, more], for each layer group]], ...],
                    "requests": {number: id} of requests that the frame before did not have}
            u8     a byte for each block of the pool, then for each slot of the host tier,
                   in all frames but a key XORed with that of the frame before
            i32    the tables' new entries, table after table in the order of the JSON

All numbers are little-endian.  A table is its first ``kept`` entries of the frame before, then ``more`` new ones; those
before ``head`` are holes.  A running sequence's entries are blocks, a swapped one's (state 2) slots of the host tier.
A byte of the pool is how many tables hold the block, 127 at most, + 128 if it has content that a prompt can hit: so 0
is free, 128 cached.  A byte of the host tier is one of EMPTY, CACHED, OWN and MOVING.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.core.sequence import Sequence, State
from octavo.paging.kv import KV
from octavo.paging.table import HOLE

FIGURES = (
    "steps", "generated_tokens", "computed_tokens", "prompt_tokens", "cached_tokens", "finished", "aborted", "failed",
    "preemptions", "swaps", "copies", "evictions", "running", "waiting", "blocks_live", "blocks_cached",
    "disk_slots", "disk_used", "disk_moving",
)  # fmt: skip
WAITING, RUNNING, SWAPPED, RESTING = range(4)
STATES = ("waiting", "running", "swapped", "resting")
EMPTY, CACHED, OWN, MOVING = range(4)
SLOTS = ("empty", "cached", "own", "moving")
MOST_WAITING = 256  # waiting sequences listed; all are counted

KEY = 1 << 31
HEAD = struct.Struct(f"<Id{len(FIGURES)}d")
LENGTH = struct.Struct("<I")


class Held(NamedTuple):
    """One sequence and its tables: raw int32 entries of each layer group, and where each one's holes end."""

    number: int
    request: int
    branch: int
    state: int
    tokens: int
    computed: int
    prompt: int
    tables: tuple[bytes, ...]
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Copies of the pool's arrays and of the tables; nothing in here changes when the engine goes on."""

    time: float
    counts: bytes
    named: bytes
    host_counts: bytes
    host_named: bytes
    moving: tuple[int, ...]  # host slots that a read from disk is filling
    sequences: tuple[Held, ...]
    requests: Mapping[int, str]
    figures: Mapping[str, float]

    def device(self) -> npt.NDArray[np.uint8]:
        """A byte for each block, as in a frame."""
        counts = np.minimum(np.frombuffer(self.counts, np.int32), 127).astype(np.uint8)
        marks: npt.NDArray[np.uint8] = np.frombuffer(self.named, np.uint8) * np.uint8(128)
        return counts | marks

    def host(self) -> npt.NDArray[np.uint8]:
        """One of EMPTY, CACHED, OWN, MOVING for each slot of the host tier."""
        held = np.frombuffer(self.host_counts, np.int32) > 0
        named = np.frombuffer(self.host_named, np.uint8) > 0
        states = np.where(named, CACHED, np.where(held, OWN, EMPTY)).astype(np.uint8)
        states[list(self.moving)] = MOVING
        return states

    def shows_the_same(self, other: Snapshot) -> bool:
        """Whether only time has passed between the two."""
        return (
            self.figures == other.figures
            and self.sequences == other.sequences
            and self.counts == other.counts
            and self.named == other.named
            and self.host_counts == other.host_counts
            and self.host_named == other.host_named
            and self.moving == other.moving
            and self.requests == other.requests
        )


def snapshot(
    kv: KV,
    running: Iterable[Sequence],
    waiting: Iterable[Sequence],
    requests: Mapping[int, str],
    figures: Mapping[str, float],
    time: float,
) -> Snapshot:
    """Copy what there is to see; to be called between steps by the thread that steps.  Copies bytes, builds little."""
    held = [_held(kv, sequence) for sequence in running]
    for sequence, _ in zip(waiting, range(MOST_WAITING), strict=False):
        held.append(_held(kv, sequence))
    pool, host, disk = kv.pool, kv.host, kv.disk
    moving: tuple[int, ...] = ()
    figures = {**figures, "blocks_live": pool.size - pool.free, "blocks_cached": pool.cached}
    if disk is not None:
        moving = tuple(a.slot for flight in disk.flights for a in flight.arrivals if a.ok is None)
        figures["disk_slots"] = disk.pool.size
        figures["disk_used"] = len(disk.slots)
        figures["disk_moving"] = disk.pool.size - disk.pool.free
    return Snapshot(
        time,
        pool.counts.tobytes(),
        bytes(pool.named),
        host.pool.counts.tobytes() if host is not None else b"",
        bytes(host.pool.named) if host is not None else b"",
        moving,
        tuple(held),
        requests,
        figures,
    )


def _held(kv: KV, s: Sequence) -> Held:
    holding = kv.holdings.get(s.number)
    if holding is not None:
        tables = tuple([table.ids.tobytes() for table in holding.tables])
        heads = tuple([table.head for table in holding.tables])
        state = RESTING if s.idle else RUNNING
    elif (saved := kv.saved.get(s.number)) is not None:
        # A hole in here is a block that is found by content, or that a window has passed.
        hole = HOLE.to_bytes(4, "little", signed=True)
        tables = tuple([saved.first * hole + slots.tobytes() for slots in saved.slots])
        heads = (saved.first,) * len(tables)
        state = SWAPPED
    else:
        tables, heads = (b"",) * kv.groups, (0,) * kv.groups
        state = WAITING if s.state is State.WAITING and not s.idle else RESTING
    return Held(s.number, s.request, s.branch, state, len(s.tokens), s.computed, s.prompt_length, tables, heads)


def encode(now: Snapshot, before: Snapshot | None, serial: int) -> bytes:
    """One frame; a key without ``before``, the snapshot of the frame with the serial number just below."""
    known = {} if before is None else {s.number: s for s in before.sequences}
    rows: list[list[Any]] = []
    tails: list[bytes] = []
    for s in now.sequences:
        past = known.get(s.number)
        groups = []
        for g, table in enumerate(s.tables):
            old = past.tables[g] if past is not None and past.state == s.state else b""
            kept = _kept(table, old, s.heads[g])
            groups.append([s.heads[g], kept, len(table) // 4 - kept])
            tails.append(table[4 * kept :])
        rows.append([*s[:7], groups])
    fresh = {n: id for n, id in now.requests.items() if before is None or n not in before.requests}
    head = json.dumps({"sequences": rows, "requests": fresh}, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 4)
    states = np.concatenate([now.device(), now.host()])
    if before is not None:
        states ^= np.concatenate([before.device(), before.host()])
    body = zlib.compress(b"".join([LENGTH.pack(len(head)), head, states.tobytes(), *tails]), 1)
    mark = serial | (KEY if before is None else 0)
    front = HEAD.pack(mark, now.time, *(now.figures.get(name, 0.0) for name in FIGURES))
    return LENGTH.pack(len(front) + len(body)) + front + body


def _kept(now: bytes, before: bytes, head: int) -> int:
    """How many entries at the front are as before; holes do not count."""
    if now.startswith(before):
        return len(before) // 4
    a, b = np.frombuffer(now, np.int32), np.frombuffer(before, np.int32)
    both = min(len(a), len(b))
    differ = np.flatnonzero(a[head:both] != b[head:both])
    return head + int(differ[0]) if len(differ) else both
