"""All verbs of KV against a small oracle that knows what every slot holds.

The oracle shares no code with ``octavo.paging``: it names each prefix by a number of its own, simulates the writes and
the moves slot by slot, keeps its own list of what has been published, and works out for itself which hits there are,
what a step costs and which blocks may be reused.  After each operation everything is compared, and ``audit`` recounts.

    python tests/property/kv_machine.py --operations 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import random
from array import array
from dataclasses import dataclass, field

from octavo.core.params import SamplingParams
from octavo.core.plan import DEVICE, Move
from octavo.core.sequence import Sequence, State
from octavo.paging.audit import audit, audit_idle
from octavo.paging.draft import Draft
from octavo.paging.holding import Match
from octavo.paging.kv import KV
from octavo.paging.prefix import chain_hash

PARAMS = SamplingParams(max_tokens=1)
MOST_LIVE = 10
NEVER = -1  # a slot that nobody has written


def six_bits(parent: bytes, tokens: bytes) -> bytes:
    """A hash so weak that prefixes collide all the time."""
    return bytes([chain_hash(parent, tokens)[0] & 63])


@dataclass
class Setup:
    blocks: int = 12
    block_size: int = 2
    windows: tuple[int | None, ...] = (None,)
    weak: bool = False
    prefix_cache: bool = True


SETUPS = (
    Setup(),
    Setup(blocks=24, block_size=3),
    Setup(blocks=9, block_size=1),
    Setup(blocks=24, windows=(None, 3)),
    Setup(blocks=30, block_size=4, windows=(9, 9, None)),
    Setup(blocks=6, block_size=4, windows=(2,)),
    Setup(blocks=20, block_size=2, windows=(1, None, 5)),
    Setup(blocks=16, weak=True),
    Setup(blocks=24, block_size=3, windows=(4, None), weak=True),
    Setup(blocks=12, prefix_cache=False),
)


@dataclass
class Twin:
    """What the oracle knows of a sequence besides its tokens."""

    published: int = 0  # blocks whose content it has told, or got by a hit
    prefixes: list[int] = field(default_factory=list)  # number of the prefix that ends in each token


class Machine:
    """Owns a KV and its oracle.  Each operation takes any numbers and does nothing where it does not apply."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.size, self.windows = setup.block_size, setup.windows
        hash = six_bits if setup.weak else chain_hash
        self.kv = KV(setup.blocks, self.size, self.windows, setup.prefix_cache, hash)
        self.slots = [[NEVER] * self.size for _ in range(setup.blocks)]
        self.sequences: list[Sequence] = []
        self.twins: dict[int, Twin] = {}
        self.named: dict[tuple[int, int], int] = {}  # (group, prefix) -> the block that can be hit
        self.names: dict[int, tuple[int, int]] = {}  # the same the other way round
        self.freed = [0] * setup.blocks  # when each block was last given back
        self.time = 0
        self.seen: dict[str, int] = {}  # how often what really happened
        self._prefixes: dict[tuple[int, int], int] = {}
        self._started = 0

    # ---- operations ------------------------------------------------------------------------------------------------

    def arrive(self, family: int, length: int, twist: int, salt: int) -> None:
        """A sequence whose first tokens are those of a family, so that prefixes meet again and again."""
        if len(self.sequences) >= MOST_LIVE:
            return
        most = max(1, min(self.kv.longest(), 6 * self.size + 3) - 2)
        tokens = array("i", [(family % 3 + i * i) % 5 for i in range(1 + length % most)])
        if twist % 3 == 0:
            tokens[-1] = 7
        self._start(tokens, bytes([salt % 2]))

    def _start(self, tokens: array[int], salt: bytes) -> Sequence:
        self._started += 1
        sequence = Sequence(self._started, self._started, 0, tokens, len(tokens), PARAMS, 10**6, salt)
        self.sequences.append(sequence)
        self.twins[sequence.number] = Twin()
        return sequence

    def admit(self, which: int) -> None:
        sequence = self._pick(which, State.WAITING)
        if sequence is None:
            return
        match = self.kv.match(sequence)
        self._check_match(sequence, match)
        before = self._tables()
        self._open(sequence)
        self._done(before)
        if match is not None:
            self._attach(sequence, match)

    def rematch(self, which: int) -> None:
        """A running prompt asks for what others have published meanwhile."""
        sequence = self._pick(which, State.RUNNING)
        if sequence is None or sequence.pending < 2:
            return
        match = self.kv.match(sequence)
        self._check_match(sequence, match)
        if match is not None:
            self._attach(sequence, match)

    def compute(self, which: int, count: int) -> None:
        sequence = self._pick(which, State.RUNNING)
        if sequence is None or not sequence.pending:
            return
        stop = min(len(sequence.tokens), sequence.computed + 1 + count % (3 * self.size))
        self._write(sequence, sequence.computed, stop)

    def rewrite(self, which: int, back: int) -> None:
        """Write once more what is computed already: into shared and published blocks, which have to be copied."""
        sequence = self._pick(which, State.RUNNING)
        if sequence is None or not sequence.computed:
            return
        heads = [t.head for t in self.kv.holdings[sequence.number].tables]
        start = max(sequence.computed - 1 - back % (2 * self.size), max(heads) * self.size)
        if start < sequence.computed:
            self._write(sequence, start, sequence.computed)

    def publish(self, which: int) -> None:
        sequence = self._pick(which, State.RUNNING)
        if sequence is None:
            return
        before = self._tables()
        self.kv.publish(sequence, sequence.computed)
        self._published(sequence)
        self._done(before)

    def slide(self, which: int) -> None:
        sequence = self._pick(which, State.RUNNING)
        if sequence is None:
            return
        before = self._tables()
        self.kv.slide(sequence.number, sequence.computed)
        self._done(before, sequence)
        for window, table in zip(self.windows, self.kv.tables(sequence.number), strict=True):
            reach = 0 if window is None else max(0, sequence.computed - window + 1)
            kept = sum(block >= 0 for block in table)
            wanted = max(0, len(table) - reach // self.size)
            assert kept == wanted, f"{kept} blocks are kept of a window of {window}, {wanted} are in reach"

    def draft(self, which: int, count: int) -> None:
        """What may turn out wrong is written behind a sequence's tokens, and given back."""
        sequence = self._pick(which, State.RUNNING)
        if sequence is None or sequence.pending:
            return
        start, stop = sequence.computed, sequence.computed + 1 + count % (3 * self.size)
        before = self._tables()
        free = self._free(before)
        try:
            self.kv.extend(sequence, start, stop)
        except RuntimeError:
            self._done(before)
            return
        moves = self.kv.drain()
        self._taken(before, free)
        self._move(moves)
        for table in self.kv.tables(sequence.number):
            for position in range(start, stop):
                assert table[position // self.size] not in self.names, "a draft is written into what can be hit"
                self.slots[table[position // self.size]][position % self.size] = NEVER
        self._done(before, sequence)
        before = self._tables()
        self.kv.trim(sequence.number, start)
        assert {len(t) for t in self.kv.tables(sequence.number)} == {-(-start // self.size)}
        self._done(before, sequence)
        self._saw("drafted")

    def append(self, which: int, token: int) -> None:
        sequence = self._pick(which, State.RUNNING)
        if sequence is not None and not sequence.pending and len(sequence.tokens) < self.kv.longest():
            sequence.tokens.append(token % 3)

    def fork(self, which: int, tokens: int) -> None:
        """A branch; both go on with a token of their own, sometimes the same one."""
        parent = self._pick(which, State.RUNNING)
        if parent is None or parent.pending or len(self.sequences) >= MOST_LIVE:
            return
        if len(parent.tokens) >= self.kv.longest():
            return
        before = self._tables()
        child = self._start(parent.tokens[:], parent.salt)
        self.kv.fork(parent, child)
        child.become(State.RUNNING)
        child.computed = parent.computed
        self.twins[child.number] = Twin(self.twins[parent.number].published)
        assert self.kv.tables(child.number) == before[parent.number], "a fork names other blocks than its parent"
        self._done(before, child)
        parent.tokens.append(tokens % 3)
        child.tokens.append(tokens // 3 % 3)

    def replace(self, which: int, loser: int, tokens: int) -> None:
        """A branch is given up for another one's continuation, as a beam step does it."""
        if self._pick(loser, State.RUNNING) is not self._pick(which, State.RUNNING):
            self.close(loser, running=True)
            self.fork(which, tokens)

    def preempt(self, which: int) -> None:
        sequence = self._pick(which, State.RUNNING)
        if sequence is None:
            return
        before = self._tables()
        self.kv.release(sequence.number)
        self._waits(sequence)
        self._done(before, sequence)

    def close(self, which: int, running: bool = False) -> None:
        sequence = self._pick(which, State.RUNNING) if running else self._pick(which)
        if sequence is None:
            return
        before = self._tables()
        self.kv.close(sequence.number)
        self.sequences.remove(sequence)
        del self.twins[sequence.number]
        self._done(before, sequence)

    def reset(self) -> None:
        before = self._tables()
        self.kv.reset_cache()
        self.named.clear()
        self.names.clear()
        assert self.kv.pool.cached == 0
        self._done(before)

    def step(self, seed: int) -> None:
        """Several sequences at once, decided on a draft's counts and then committed, as the scheduler does it."""
        rng = random.Random(seed)
        draft = Draft(self.kv)
        order = [s for s in self.sequences if s.pending]
        rng.shuffle(order)
        attached: list[tuple[Sequence, Match]] = []
        rows: list[tuple[Sequence, int, int]] = []
        victims: list[Sequence] = []
        for sequence in list(order):
            if sequence in victims:
                continue
            match = self.kv.match(sequence)
            if match is not None and draft.attach_cost(sequence, match) > draft.free:
                match = None
            start, hit = (match.length, match.length // self.size) if match else (sequence.computed, 0)
            stop = min(len(sequence.tokens), start + 1 + rng.randrange(2 * self.size))
            if match is not None:
                draft.attach(sequence, match)
                attached.append((sequence, match))
            served = {s.number for s, _, _ in rows} | {s.number for s, _ in attached} | {sequence.number}
            left = [s for s in order if s.state is State.RUNNING and s.number not in served and s not in victims]
            while draft.extend_cost(sequence, start, stop, hit) > draft.free and left:
                victims.append(left.pop())
                draft.release(victims[-1])
            if draft.extend_cost(sequence, start, stop, hit) <= draft.free:
                draft.extend(sequence, start, stop, hit)
                rows.append((sequence, start, stop))
        self._commit(victims, attached, rows, draft)

    # ---- parts of operations ---------------------------------------------------------------------------------------

    def _commit(
        self,
        victims: list[Sequence],
        attached: list[tuple[Sequence, Match]],
        rows: list[tuple[Sequence, int, int]],
        draft: Draft,
    ) -> None:
        before = self._tables()
        for victim in victims:
            self.kv.release(victim.number)
            self._waits(victim)
        self._done(before, *victims)
        for sequence in dict.fromkeys([s for s, _ in attached] + [s for s, _, _ in rows]):
            if sequence.state is State.WAITING:
                self._open(sequence)
        for sequence, match in attached:
            self._attach(sequence, match)
        before = self._tables()
        free = self._free(before)
        for sequence, start, stop in rows:
            self.kv.extend(sequence, start, stop)
        moves = self.kv.drain()
        assert self.kv.pool.free == draft.free, f"the draft counted {draft.free} free, {self.kv.pool.free} are"
        self._taken(before, free)
        self._move(moves)
        for sequence, start, stop in rows:
            self._fill(sequence, start, stop)
        self._done(before, *(s for s, _, _ in rows))
        before = self._tables()
        for sequence, _, _ in rows:
            self.kv.publish(sequence, sequence.computed)
            self._published(sequence)
            self.kv.slide(sequence.number, sequence.computed)
        self._done(before, *(s for s, _, _ in rows))
        self._saw("preempted in a step", len(victims))
        self._saw("hit in a step", len(attached))

    def _open(self, sequence: Sequence) -> None:
        self.kv.open(sequence)
        sequence.become(State.RUNNING)

    def _waits(self, sequence: Sequence) -> None:
        sequence.become(State.WAITING)
        self.twins[sequence.number].published = 0

    def _attach(self, sequence: Sequence, match: Match) -> None:
        before = self._tables()
        self.kv.pin(match)
        self.kv.attach(sequence, match)
        sequence.computed = match.length
        self.twins[sequence.number].published = match.length // self.size
        self._saw("hit")
        self._done(before, sequence)

    def _write(self, sequence: Sequence, start: int, stop: int) -> None:
        before = self._tables()
        free = self._free(before)
        counts = self._counts(before)
        need = 0
        for table in before[sequence.number]:
            for b in range(start // self.size, -(-stop // self.size)):
                held = b < len(table)
                need += not held or counts[table[b]] > 1 or table[b] in self.names
        if need > len(free):
            refused = False
            try:
                self.kv.extend(sequence, start, stop)
            except RuntimeError:
                refused = True
            assert refused, f"{need} blocks were taken of {len(free)}"
            self._done(before)
            self._saw("no room")
            return
        self.kv.extend(sequence, start, stop)
        moves = self.kv.drain()
        self._saw("copy", len(moves))
        self._taken(before, free)
        self._move(moves)
        self._fill(sequence, start, stop)
        self._done(before, sequence)

    def _move(self, moves: list[Move]) -> None:
        for move in moves:
            assert move.source.tier == move.target.tier == DEVICE
            self.slots[move.target.slot] = list(self.slots[move.source.slot])

    def _fill(self, sequence: Sequence, start: int, stop: int) -> None:
        """Write positions start..stop-1 of a row; each block must be the sequence's alone, and without a name."""
        prefixes = self._prefixes_of(sequence)
        counts = self._counts(self._tables())
        for table in self.kv.tables(sequence.number):
            for position in range(start, stop):
                block = table[position // self.size]
                assert block >= 0 and counts[block] == 1, f"{sequence} writes block {block}, held {counts[block]} times"
                assert block not in self.names, f"{sequence} writes block {block}, which can be hit"
                self.slots[block][position % self.size] = prefixes[position]
        sequence.computed = max(sequence.computed, stop)

    def _published(self, sequence: Sequence) -> None:
        twin = self.twins[sequence.number]
        if self.setup.weak or not self.setup.prefix_cache:  # a colliding chain is not told on
            self.named = {}
            for block, content in enumerate(self.kv.pool.content):
                if content is not None:
                    self.named[content[1], self.slots[block][-1]] = block
            self.names = {block: name for name, block in self.named.items()}
            return
        prefixes = self._prefixes_of(sequence)
        for b in range(twin.published, sequence.computed // self.size):
            for g, table in enumerate(self.kv.tables(sequence.number)):
                name = (g, prefixes[(b + 1) * self.size - 1])
                if table[b] >= 0 and name not in self.named and table[b] not in self.names:
                    self.named[name] = table[b]
                    self.names[table[b]] = name
        twin.published = max(twin.published, sequence.computed // self.size)

    def _taken(self, before: dict[int, tuple[array[int], ...]], free: list[int]) -> None:
        """What an extension took: empty blocks first, then those that were given back longest ago."""
        old = {block for tables in before.values() for table in tables for block in table}
        taken = {b for tables in self._tables().values() for t in tables for b in t if b >= 0} - old
        assert taken <= set(free)
        empty = {block for block in free if block not in self.names}
        cached = taken - empty
        if cached:
            assert empty <= taken, "a cached block was given up while there were empty ones"
            rest = set(free) - taken
            assert not rest or max(self.freed[b] for b in cached) <= min(self.freed[b] for b in rest), "not the oldest"
            self._saw("eviction", len(cached))
        for block in cached:
            self.named.pop(self.names.pop(block), None)

    # ---- what must hold --------------------------------------------------------------------------------------------

    def _check_match(self, sequence: Sequence, match: Match | None) -> None:
        """A hit holds what it says, and no longer one was to be had."""
        prefixes = self._prefixes_of(sequence)
        start, most = sequence.computed, (len(sequence.tokens) - 1) // self.size * self.size
        found = match.length if match is not None else start
        assert found <= max(most, start) and (match is None or (match.start == start and found > start))
        exact = not self.setup.weak and any(w is None or w > 1 for w in self.windows)
        usable = self.setup.prefix_cache and start % self.size == 0
        if not self.setup.weak:  # under colliding keys a chain may be told less far than it is computed
            usable = usable and self.twins[sequence.number].published * self.size == start
        assert match is None or usable
        if match is not None:
            assert all(self.named.get(name) is not None for name in self._wanted(prefixes, start, found)), "no such hit"
        if usable and exact:
            for length in range(found + self.size, most + 1, self.size):
                names = list(self._wanted(prefixes, start, length))
                assert not all(name in self.named for name in names), f"a hit of {length} was missed, {found} found"

    def _wanted(self, prefixes: list[int], start: int, length: int) -> list[tuple[int, int]]:
        """Names of the blocks that a hit of ``length`` needs beyond what is computed."""
        return [
            (g, prefixes[(b + 1) * self.size - 1])
            for g, window in enumerate(self.windows)
            for b in range(start // self.size, length // self.size)
            if window is None or (b + 1) * self.size - 1 > length - window
        ]

    def _done(self, before: dict[int, tuple[array[int], ...]], *changed: Sequence) -> None:
        """After an operation: others' tables are as before, every slot holds what its readers expect, counts agree."""
        self.time += 1
        audit(self.kv)
        after = self._tables()
        numbers = {s.number for s in changed}
        for number, tables in before.items():
            if number not in numbers:
                assert after[number] == tables, f"the tables of sequence {number} changed behind its back"
        held = {block for tables in after.values() for table in tables for block in table}
        for block in {b for tables in before.values() for t in tables for b in t} - held - {-1}:
            self.freed[block] = self.time
        for sequence in self.sequences:
            if sequence.state is State.RUNNING:
                self._check_slots(sequence)
        if not self.setup.weak and self.setup.prefix_cache:
            content = {b: (c[1]) for b, c in enumerate(self.kv.pool.content) if c is not None}
            assert content == {block: name[0] for block, name in self.names.items()}, "not the blocks that can be hit"

    def _check_slots(self, sequence: Sequence) -> None:
        prefixes = self._prefixes_of(sequence)
        for window, table in zip(self.windows, self.kv.tables(sequence.number), strict=True):
            assert len(table) >= -(-sequence.computed // self.size)
            for position in range(sequence.computed):
                block = table[position // self.size]
                if block < 0:
                    assert window is not None and position <= sequence.computed - window, f"{position} is gone too soon"
                    continue
                held = self.slots[block][position % self.size]
                assert held == prefixes[position], f"{sequence}: position {position} holds another prefix"

    def finish(self) -> None:
        """Close everything: the idle invariant, and no memory of the sequences is left."""
        while self.sequences:
            self.close(0)
        audit_idle(self.kv)
        self.reset()
        assert not self.kv.index.nodes() and not self.kv.index.roots()

    # ---- reading ---------------------------------------------------------------------------------------------------

    def _pick(self, which: int, state: State | None = None) -> Sequence | None:
        found = [s for s in self.sequences if state is None or s.state is state]
        return found[which % len(found)] if found else None

    def _tables(self) -> dict[int, tuple[array[int], ...]]:
        return {number: self.kv.tables(number) for number in self.kv.holdings}

    def _counts(self, tables: dict[int, tuple[array[int], ...]]) -> list[int]:
        counts = [0] * self.setup.blocks
        for groups in tables.values():
            for table in groups:
                for block in table:
                    if block >= 0:
                        counts[block] += 1
        return counts

    def _free(self, tables: dict[int, tuple[array[int], ...]]) -> list[int]:
        return [block for block, count in enumerate(self._counts(tables)) if not count]

    def _prefixes_of(self, sequence: Sequence) -> list[int]:
        """Numbers that stand for (salt, tokens 0..i), one for each position."""
        out = self.twins[sequence.number].prefixes
        for token in sequence.tokens[len(out) :]:
            parent = out[-1] if out else -1 - sequence.salt[0]
            out.append(self._prefixes.setdefault((parent, token), len(self._prefixes)))
        return out

    def _saw(self, what: str, times: int = 1) -> None:
        self.seen[what] = self.seen.get(what, 0) + times


# name of an operation -> how often it is drawn, and how many numbers it takes
OPERATIONS = {
    "arrive": (4, 4), "admit": (6, 1), "rematch": (2, 1), "compute": (10, 2), "rewrite": (1, 2), "publish": (6, 1),
    "slide": (3, 1), "append": (6, 2), "fork": (3, 2), "replace": (1, 3), "preempt": (2, 1), "close": (3, 1),
    "step": (8, 1), "draft": (2, 2),
}  # fmt: skip


def drive(machine: Machine, operations: int, rng: random.Random) -> None:
    """Draw operations at random."""
    names = [name for name, (weight, _) in OPERATIONS.items() for _ in range(weight)]
    for _ in range(operations):
        name = rng.choice(names) if rng.random() > 0.005 else "reset"
        numbers = [] if name == "reset" else [rng.randrange(1000) for _ in range(OPERATIONS[name][1])]
        getattr(machine, name)(*numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rounds, each = max(1, args.operations // 1000), min(1000, args.operations)
    seen: dict[str, int] = {}
    for i in range(rounds):
        machine = Machine(SETUPS[i % len(SETUPS)])
        try:
            drive(machine, each, random.Random(f"{args.seed}/{i}"))
            machine.finish()
        except BaseException:
            print(f"round {i} of seed {args.seed}: {machine.setup}")
            raise
        for what, times in machine.seen.items():
            seen[what] = seen.get(what, 0) + times
        if (i + 1) % 50 == 0:
            print(f"{(i + 1) * each} operations: {seen}", flush=True)
    print(f"{rounds * each} operations, all accounted for: {seen}")


if __name__ == "__main__":
    main()
