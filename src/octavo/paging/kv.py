"""The only door to the blocks: match, need, attach, extend, fork, publish, slide, release."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq

from octavo.core.plan import DEVICE, HOST, Move, Place
from octavo.core.sequence import Sequence
from octavo.paging.disk import DiskTier
from octavo.paging.holding import Holding, Match
from octavo.paging.host import HostTier, Saved
from octavo.paging.pool import BlockPool
from octavo.paging.prefix import Hash, Node, PrefixIndex, chain_hash
from octavo.paging.swap import restore, resumed
from octavo.paging.table import HOLE, BlockTable


class KV:
    """Owns: the pool, the tables, the prefix index.  Emits :class:`Move` s, never bytes.

    Promises: a block is written only while one table names it and it has no content; content is published only for
    tokens that are computed; a verb either does all of its work or raises before it changed anything.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        windows: Seq[int | None] = (None,),
        prefix_cache: bool = True,
        hash: Hash = chain_hash,
        host_slots: int = 0,
        disk_slots: int = 0,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.block_size = block_size
        self.windows = tuple(windows)
        self.groups = len(self.windows)
        self.index = PrefixIndex(self.groups, hash)
        self.pool = BlockPool(blocks, self._forgotten)
        self.host = HostTier(host_slots, self.index) if host_slots else None
        self.disk = DiskTier(disk_slots) if disk_slots and self.host else None
        if self.host is not None:
            self.host.disk = self.disk
        self.saved: dict[int, Saved] = {}  # by number of a swapped-out sequence
        self._moves: list[Move] = []  # in the order in which they must be done
        self.prefix_cache = prefix_cache
        self.holdings: dict[int, Holding] = {}
        self._keys: dict[int, list[bytes]] = {}
        self.copies = 0  # copy-on-write copies so far
        self.evictions = 0  # cached blocks whose content was given up

    # ---- questions -------------------------------------------------------------------------------------------------

    def blocks_for(self, length: int, chunk: int = 1) -> int:
        """Most blocks that one sequence of ``length`` tokens holds at a time, computed ``chunk`` tokens a step."""
        full = -(-length // self.block_size)
        total = 0
        for window in self.windows:
            if window is None:
                total += full
            else:
                # A step computing tokens [p, p+chunk) reads from p-window+1 on: that span, wherever it starts in a
                # block, touches at most this many blocks.
                span = window - 1 + chunk
                total += min(full, (span + self.block_size - 2) // self.block_size + 1)
        return total

    def beam_blocks(self, prompt: int, output: int, width: int) -> int:
        """Most blocks that ``width`` beams hold at a time: they share the prompt's full blocks, no others for sure."""
        shared = prompt // self.block_size * sum(w is None for w in self.windows) if width > 1 else 0
        return shared + width * (self.blocks_for(prompt + output) - shared)

    def longest(self) -> int:
        """Most tokens that one sequence can have in this pool, computed token by token."""
        low, high = 0, 2**31 - 1
        if self.blocks_for(high) <= self.pool.size:  # windows everywhere: no bound but the model's own
            return high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.blocks_for(middle) <= self.pool.size else (low, middle)
        return low

    def tables(self, number: int) -> tuple[array[int], ...]:
        """Copies of a sequence's tables, for a plan; the same ones until the tables change."""
        holding = self.holdings[number]
        if holding.planned is None:
            holding.planned = tuple([table.ids[:] for table in holding.tables])
        return holding.planned

    def writable(self, number: int, start: int, stop: int) -> bool:
        """Whether it is known that a sequence can write start..stop-1 without taking or copying a block."""
        holding = self.holdings[number]
        return holding.since <= start and holding.published * self.block_size <= start and stop <= holding.until

    def slots(self, number: int, computed: int) -> tuple[int, int]:
        """Token slots of a sequence's blocks in all groups; and how many of them hold one of its computed tokens."""
        tables = self.holdings[number].tables
        blocks = heads = 0
        for table in tables:
            blocks += len(table.ids)
            heads += table.head
        return (blocks - heads) * self.block_size, len(tables) * computed - heads * self.block_size

    def keys(self, sequence: Sequence, blocks: int) -> list[bytes]:
        """Chain keys of (at least) the sequence's first ``blocks`` full blocks."""
        keys = self._keys.get(sequence.number)
        if keys is None:
            keys = self._keys[sequence.number] = [self.index.root_key(sequence.salt)]
        size = self.block_size
        for b in range(len(keys) - 1, blocks):
            keys.append(self.index.key(keys[b], sequence.tokens[b * size : (b + 1) * size]))
        return keys

    def match(self, sequence: Sequence) -> Match | None:
        """The longest hit that goes beyond what is computed and leaves at least one token to compute.

        In a windowed group only the blocks that the window still reaches are needed.
        """
        size = self.block_size
        start = sequence.computed
        most = (len(sequence.tokens) - 1) // size
        saved = self.saved.get(sequence.number)
        if saved is not None and sequence.number not in self.holdings:
            whole = resumed(self, sequence, saved)
            if whole is not None:
                return whole
        if not self.prefix_cache or start % size or most <= start // size or sequence.scoring:
            return None
        holding = self.holdings.get(sequence.number)
        node: Node | None
        if holding is None:
            node, depth = self.index.known_root(sequence.salt), 0
            if node is None:
                return None
        elif holding.closed or holding.published * size != start:
            return None
        else:
            node, depth = holding.node, holding.published
        return self._walk(sequence, node, depth, most)

    def _walk(self, sequence: Sequence, node: Node, depth: int, most: int) -> Match | None:
        size, first = self.block_size, depth
        keys = self.keys(sequence, depth + 1)
        runs = [depth] * self.groups  # how many blocks up to here the group has in a row; its own ones count
        nodes: list[Node] = []
        best = 0
        while depth < most:
            if len(keys) <= depth + 1:
                keys = self.keys(sequence, depth + 1)
            found = self.index.find(node, keys[depth + 1], sequence.tokens[depth * size : (depth + 1) * size])
            if found is None:
                break
            nodes.append(found)
            node, depth = found, depth + 1
            for g in range(self.groups):
                runs[g] = runs[g] + 1 if found.blocks[g] >= 0 or found.hosts[g] >= 0 else 0
            if any(w is None and runs[g] < depth for g, w in enumerate(self.windows)):
                break
            if all(
                runs[g] >= depth - self.first_needed(w, depth * size)
                for g, w in enumerate(self.windows)
                if w is not None
            ):
                best = len(nodes)
        if not best:
            return None
        return Match(first * size, (first + best) * size, tuple(nodes[:best]), first + best)

    def first_needed(self, window: int | None, position: int) -> int:
        """The first logical block that the token at ``position`` reads."""
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def attached_nodes(self, match: Match) -> list[tuple[Node, int]]:
        """(node, group) of the blocks that attaching a match would hold, group by group."""
        first = match.start // self.block_size
        out = []
        for g, window in enumerate(self.windows):
            need = max(self.first_needed(window, match.length), first)
            out += [(node, g) for node in match.nodes[need - first :]]
        return out

    def passed_blocks(self, number: int, computed: int) -> list[int]:
        """The physical blocks of a sequence that no window reaches from position ``computed`` on."""
        out: list[int] = []
        for window, table in zip(self.windows, self.holdings[number].tables, strict=True):
            if window is not None:
                out += table.ids[table.head : max(table.head, self.first_needed(window, computed))]
        return out

    def to_copy(self, number: int, start: int, stop: int, count: Callable[[int], int]) -> Seq[tuple[BlockTable, int]]:
        """Where writing positions start..stop-1 must copy a block first: (table, logical block).

        It must where another table holds the block too, ``count`` says how many do, and where it is published (a
        rewind may lead back into such a block).
        """
        tables, size, content = self.holdings[number].tables, self.block_size, self.pool.content
        first, have = start // size, len(tables[0].ids)
        if first >= have:
            return ()
        end, found = min(-(-stop // size), have), []
        for table in tables:
            for b in range(max(first, table.head), end):
                block = table.ids[b]
                if content[block] is not None or count(block) > 1:
                    found.append((table, b))
        return found

    # ---- verbs -----------------------------------------------------------------------------------------------------

    def open(self, sequence: Sequence) -> None:
        """An empty-handed sequence gets empty tables."""
        if sequence.number in self.holdings:
            raise RuntimeError(f"{sequence!r} holds blocks already")
        root = self.index.root(sequence.salt)
        root.pins += 1
        self.holdings[sequence.number] = Holding(self.groups, root)

    def pin(self, match: Match) -> None:
        """Hold all places of a hit, so that nothing taken before it is attached can give them up."""
        nodes = self.attached_nodes(match)
        if any(node.blocks[g] < 0 and node.hosts[g] < 0 for node, g in nodes):
            raise RuntimeError("a hit has been evicted since it was found")
        for node, g in nodes:
            if node.blocks[g] >= 0:
                self.pool.hold(node.blocks[g])
            elif self.host is not None:
                self.host.pool.hold(node.hosts[g])

    def attach(self, sequence: Sequence, match: Match) -> None:
        """Name the blocks of a pinned hit in the sequence's tables; it then has ``match.length`` computed tokens.

        What is in the host tier only is brought back into free blocks.
        """
        holding = self.holdings[sequence.number]
        holding.changed()
        first = match.start // self.block_size
        for g, (window, table) in enumerate(zip(self.windows, holding.tables, strict=True)):
            need = self.first_needed(window, match.length)
            self._free_head(table, min(need, first))
            if need > first:  # the window is past what the table held so far, and past the first nodes of the hit
                holes = min(need, first + len(match.nodes)) - first
                table.ids.extend([HOLE] * holes)
                table.head = first + holes
            table.ids.extend([self._present(node, g) for node in match.nodes[max(need - first, 0) :]])
        if match.nodes:
            self._move_pin(holding, match.nodes[-1])
        holding.published = first + len(match.nodes)
        if match.saved is not None:
            restore(self, sequence, match.saved)

    def _present(self, node: Node, group: int) -> int:
        """The device block of a pinned node's content, brought back if need be; held once for the caller."""
        host, block = self.host, node.blocks[group]
        slot = node.hosts[group]
        if block >= 0:
            if host is not None and slot >= 0 and host.pool.counts[slot] > 0:  # pinned there, brought back since
                host.pool.drop(slot)
                self.pool.hold(block)
            return block
        assert host is not None
        block = self.pool.take()
        self._moves.append(Move(Place(HOST, slot), Place(DEVICE, block)))
        self.pool.name(block, (node, group))
        node.blocks[group] = block
        host.pool.drop(slot)
        return block

    def forget_saved(self, number: int) -> None:
        """Drop what a swapped-out sequence left in the host tier."""
        saved = self.saved.pop(number, None)
        if saved is not None and self.host is not None:
            for slot in saved.held():
                self.host.drop(slot)

    def request(self, moves: list[Move]) -> None:
        """Have these moves done after those asked for so far."""
        self._moves += moves

    def flush(self) -> tuple[Move, ...]:
        """Moves that write every published block to disk that is not there, the one used longest ago first."""
        if self.disk is None or self.host is None:
            return ()
        for tier, pool in ((HOST, self.host.pool), (DEVICE, self.pool)):
            order = pool.free_order()
            for slot in order + [s for s in range(pool.size) if pool.counts[s]]:
                if pool.content[slot] is not None:
                    node, group = pool.content[slot]
                    move = self.disk.demote(Place(tier, slot), node, group)
                    if move is not None:
                        self.disk.pool.drop(move.target.slot)  # nothing else runs: slots may go round
                        self._moves.append(move)
        return self.drain()

    def drain(self) -> tuple[Move, ...]:
        """The moves that the verbs since the last call have asked for, in order."""
        moves, self._moves = tuple(self._moves), []
        if self.host is not None:
            self.host.settle()
        return moves

    def extend(self, sequence: Sequence, start: int, stop: int) -> None:
        """Make positions start..stop-1 writable: copy what is shared, append what is missing."""
        if self.writable(sequence.number, start, stop):
            return
        holding, pool = self.holdings[sequence.number], self.pool
        tables = holding.tables
        blocks = -(-stop // self.block_size)
        copied = self.to_copy(sequence.number, start, stop, pool.counts.__getitem__)
        missing = blocks - len(tables[0].ids)
        if len(copied) + max(0, missing) * self.groups > pool.free:
            raise RuntimeError(f"{sequence!r} cannot be extended to {stop}: {pool.free} blocks are free")
        holding.changed()
        for table, b in copied:
            block = table.ids[b]
            fresh = pool.take()
            self._moves.append(Move(Place(DEVICE, block), Place(DEVICE, fresh)))
            pool.drop(block)
            table.ids[b] = fresh
            self.copies += 1
        if missing > 0:
            for table in tables:
                table.ids.extend([pool.take() for _ in range(missing)])
        holding.since, holding.until = start // self.block_size * self.block_size, blocks * self.block_size

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child names all of the parent's blocks."""
        source = self.holdings[parent.number]
        source.changed()
        self.open(child)
        holding = self.holdings[child.number]
        holding.tables = [table.copy() for table in source.tables]
        for table in holding.tables:
            for block in table.live():
                self.pool.hold(block)
        self._move_pin(holding, source.node)
        holding.published = source.published
        holding.closed = source.closed
        if parent.number in self._keys:
            self._keys[child.number] = self._keys[parent.number][: source.published + 1]

    def publish(self, sequence: Sequence, stop: int) -> None:
        """Full blocks below position ``stop``, all of them computed, become findable by content."""
        if not self.prefix_cache:
            return
        holding = self.holdings[sequence.number]
        size = self.block_size
        while not holding.closed and (holding.published + 1) * size <= stop:
            b = holding.published
            keys = self.keys(sequence, b + 1)
            node = self.index.add(holding.node, keys[b + 1], sequence.tokens[b * size : (b + 1) * size])
            if node is None:
                holding.closed = True
                return
            for g, table in enumerate(holding.tables):
                # A block whose content somebody else published first stays this sequence's own, without a name.
                if b >= table.head and node.blocks[g] < 0 and self.pool.content[table.ids[b]] is None:
                    node.blocks[g] = table.ids[b]
                    self.pool.name(table.ids[b], (node, g))
            self._move_pin(holding, node)
            holding.published += 1

    def slide(self, number: int, computed: int) -> None:
        """Free the head blocks that no window reaches from position ``computed`` on."""
        for window, table in zip(self.windows, self.holdings[number].tables, strict=True):
            if window is not None and table.head < (first := min(self.first_needed(window, computed), len(table))):
                self._free_head(table, first)
                self.holdings[number].planned = None

    def _free_head(self, table: BlockTable, first: int) -> None:
        for b in range(table.head, first):
            self.pool.drop(table.ids[b])
            table.ids[b] = HOLE
        table.head = max(table.head, first)

    def trim(self, number: int, to: int) -> None:
        """Give back the blocks behind position ``to``, which hold drafts only: not a sequence's tokens, unpublished."""
        holding = self.holdings[number]
        tables, holding.planned = holding.tables, None
        holding.until = min(holding.until, -(-to // self.block_size) * self.block_size)
        for b in range(len(tables[0]) - 1, -(-to // self.block_size) - 1, -1):
            for table in tables:
                if b >= table.head:
                    self.pool.drop(table.ids[b])
                del table.ids[b]
                table.head = min(table.head, b)

    def rewind(self, sequence: Sequence, to: int) -> bool:
        """Forget the blocks behind position ``to``, whose tokens may become others.

        False, and nothing changed, if a window has passed blocks that the token at ``to`` would read.
        """
        holding = self.holdings[sequence.number]
        blocks = -(-to // self.block_size)
        for window, table in zip(self.windows, holding.tables, strict=True):
            if min(table.head, blocks) > self.first_needed(window, to):
                return False
        self.trim(sequence.number, to)
        holding.changed()
        full = to // self.block_size
        if holding.published > full:
            node = holding.node
            for _ in range(holding.published - full):
                assert node.parent is not None
                node = node.parent
            self._move_pin(holding, node)
            holding.published = full
        holding.closed = False
        self.retokenise(sequence.number, to)
        return True

    def retokenise(self, number: int, to: int) -> None:
        """Tokens from position ``to`` on may have changed: keys of their blocks are computed anew."""
        keys = self._keys.get(number)
        if keys is not None:
            del keys[to // self.block_size + 1 :]

    def release(self, number: int) -> None:
        """Give back every block; the tails first in all groups, so that a prefix outlives what hangs on it."""
        holding = self.holdings.pop(number)
        for b in range(len(holding.tables[0]) - 1, -1, -1):
            for table in holding.tables:
                if b >= table.head:
                    self.pool.drop(table.ids[b])
        holding.node.pins -= 1
        self.index.prune(holding.node)

    def close(self, number: int) -> None:
        """Forget a sequence that will not come back."""
        if number in self.holdings:
            self.release(number)
        self.forget_saved(number)
        if self.disk is not None:
            self.disk.asked.pop(number, None)
        self._keys.pop(number, None)

    def reset_cache(self) -> None:
        """Forget all cached content; live sequences keep their blocks."""
        host, self.host = self.host, None  # nothing is demoted meanwhile
        for block in range(self.pool.size):
            self.pool.forget(block)
        self.host = host
        if host is not None:
            for slot in range(host.pool.size):
                host.pool.forget(slot)

    def _move_pin(self, holding: Holding, node: Node) -> None:
        node.pins += 1
        old, holding.node = holding.node, node
        old.pins -= 1
        self.index.prune(old)

    def _forgotten(self, block: int, content: tuple[Node, int]) -> None:
        node, group = content
        node.blocks[group] = -1
        self.evictions += 1
        if self.host is not None:
            self._moves += self.host.demote(block, node, group)
        self.index.prune(node)
