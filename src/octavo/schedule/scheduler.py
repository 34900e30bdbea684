"""Decides what the next step computes, then commits it to blocks.

There are no phases: a sequence has ``len(tokens) - computed`` tokens to compute, one while it decodes, more while it
reads its prompt or comes back after preemption.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.core.plan import NO_TOKENS, Draw, Plan, Row
from octavo.core.sequence import Sequence, State
from octavo.paging.draft import Draft
from octavo.paging.fetch import fetch, fetchable, fetched_keys
from octavo.paging.holding import Match
from octavo.paging.kv import KV
from octavo.paging.miss import explain
from octavo.paging.swap import swap_out
from octavo.schedule.policies import Policy, Rank

Draws = Callable[[Sequence, "array[int]"], tuple[Draw, ...]]  # of a sequence's end, and of drafts behind it


@dataclass(slots=True)
class Decision:
    """What a step will do, in counts and names only; nothing has changed yet."""

    victims: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    attached: list[tuple[Sequence, Match]] = field(default_factory=list)
    rows: list[tuple[Sequence, int, int]] = field(default_factory=list)  # sequence, first position, end with drafts
    fetches: list[tuple[Sequence, Match | None, int]] = field(default_factory=list)  # blocks to bring from disk
    deferred: int = 0  # sequences that wait for a block which another row computes in this step


class Scheduler:
    """Owns: the running and the waiting sequences, and the policy that orders them.

    Promises: ``decide`` is pure; ``commit`` cannot fail; the best-ranked unfinished sequence is in every step; memory
    is taken from the worst rank and never from a sequence that this step serves; no plan is undone; no step is larger
    than :class:`octavo.core.plan.LargestStep` says.
    """

    def __init__(
        self,
        kv: KV,
        policy: Policy | None = None,
        max_running: int = 256,
        most_logits: int = 1024,
        swap_pays: Callable[[Sequence], bool] = lambda sequence: True,
    ) -> None:
        self.kv = kv
        self.policy = policy or Policy()
        self.max_running = max_running
        self.most_logits = most_logits  # logits rows of the scored chunks of one step
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.swap_pays = swap_pays  # whether moving a victim's blocks is cheaper than computing them again
        self.preemptions = self.swaps = self.recomputes = 0

    # ---- queues ----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.policy.arrived(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=lambda s: self.policy.rank(s, 0.0))

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """A branch starts from its parent's blocks; or empty-handed, when as many run as may."""
        self.policy.arrived(child)
        if parent.state is State.RUNNING and len(self.running) < self.max_running:
            self.kv.fork(parent, child)
            child.become(State.RUNNING)
            child.computed = parent.computed
            insort(self.running, child, key=lambda s: self.policy.rank(s, 0.0))
        else:
            self._wait(child)

    def rest(self, sequence: Sequence) -> None:
        """A session's sequence has nothing to do for now: it keeps its blocks until somebody else needs them."""
        sequence.parked = sequence.idle = True
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
                insort(queue, sequence, key=lambda s: self.policy.rank(s, 0.0))

    def rewind(self, sequence: Sequence, to: int) -> None:
        """Forget a sequence's tokens from position ``to`` on, and their blocks."""
        del sequence.tokens[to:]
        if sequence.state is State.RUNNING and not self.kv.rewind(sequence, min(to, sequence.computed)):
            self.kv.release(sequence.number)
            self.running.remove(sequence)
            sequence.become(State.WAITING)
            self._wait(sequence)
        elif sequence.state is State.WAITING:
            self.kv.forget_saved(sequence.number)
        self.kv.retokenise(sequence.number, to)
        sequence.computed = min(sequence.computed, to)

    def remove(self, sequence: Sequence) -> None:
        """A sequence finished, failed or was aborted: its blocks go back at once."""
        (self.running if sequence.state is State.RUNNING else self.waiting).remove(sequence)
        sequence.become(State.FINISHED)
        self.policy.left(sequence)
        self.kv.close(sequence.number)

    @property
    def idle(self) -> bool:
        """Whether nobody has anything to compute; sessions may rest here all the same."""
        return all(s.parked for s in self.running) and all(s.parked for s in self.waiting)

    # ---- deciding --------------------------------------------------------------------------------------------------

    @property
    def computing(self) -> int:
        """How many of those that run may have a row in one step.  Sessions at rest and parked beams run beside them."""
        return min(len(self.running), self.max_running)

    def decide(self, now: float, budget: int) -> Decision:
        return _Round(self, now, budget).decide()

    # ---- committing ------------------------------------------------------------------------------------------------

    def commit(self, decision: Decision, step: int, draws: Draws) -> Plan:
        """Fetches, releases, attaches, extends, each in the order of the decision; the draft has counted it all."""
        kv = self.kv
        for _, match in decision.attached:  # first: a victim's blocks that go to the host tier push others out of it
            kv.pin(match)
        for sequence, found, blocks in decision.fetches:  # before victims save in the host tier what finds room there
            kv.request(fetch(kv, sequence, found, blocks))
        for victim in decision.victims:
            self.preempt(victim)
        restored = {s.number: True for s, match in decision.attached if match.saved is not None}
        for sequence in decision.admitted:
            kv.open(sequence)
            if sequence.number not in restored:  # what it had saved is no use without what came before
                kv.forget_saved(sequence.number)
            sequence.become(State.RUNNING)
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda s: self.policy.rank(s, 0.0))
        for sequence, match in decision.attached:
            kv.attach(sequence, match)
            if sequence.cached is None:
                sequence.cached = 0
            if not sequence.preemptions:  # blocks that it computed itself before are no hits
                sequence.cached += match.length - match.start
            sequence.computed = match.length
        rows = []
        for sequence, start, stop in decision.rows:
            kv.extend(sequence, start, stop)
            if sequence.served < 0:
                sequence.cached = sequence.cached or 0
                sequence.miss = explain(kv, sequence, start)
            sequence.served = step
            row = self._row(sequence, start, stop, draws)
            self.policy.served(sequence, stop - start - row.drafts, len(row.draws) - row.drafts)
            rows.append(row)
        return Plan(step, kv.drain(), tuple(rows))

    def verified(self, sequence: Sequence, right: int) -> None:
        """A step is over that let a sequence verify drafts: ``right`` of them are its tokens now."""
        self.policy.served(sequence, right, right)
        if sequence.state is State.RUNNING:
            self.kv.trim(sequence.number, sequence.computed)

    def preempt(self, victim: Sequence) -> None:
        """Take a running sequence's blocks; it waits for its turn by rank."""
        self.running.remove(victim)
        if self.swap_pays(victim) and swap_out(self.kv, victim):
            self.swaps += 1
        else:
            if victim.number in self.kv.holdings:
                self.kv.release(victim.number)
            self.recomputes += 1
        victim.become(State.WAITING)
        victim.preemptions += 1
        self.preemptions += 1
        self._wait(victim)

    def _row(self, sequence: Sequence, start: int, stop: int, draws: Draws) -> Row:
        tokens = sequence.tokens
        if stop - start == 1 and stop == len(tokens) and not sequence.scoring:  # a decode, as most rows are
            tables = self.kv.tables(sequence.number)
            return Row(sequence.number, start, tokens[start:], tables, draws(sequence, NO_TOKENS))
        drafts = sequence.drafts[: max(0, stop - len(tokens))]
        last = stop >= len(tokens)
        targets, score = NO_TOKENS, -1
        if sequence.scoring:
            targets = tokens[start + 1 : min(stop + 1, sequence.prompt_length)]
            score = sequence.params.prompt_logprobs or 0
        return Row(
            sequence.number,
            start,
            tokens[start:stop] + drafts,
            self.kv.tables(sequence.number),
            draws(sequence, drafts) if last else (),
            targets,
            score,
            len(drafts),
        )


class _Round:
    """One decision in the making: a cursor over all sequences by rank, and a draft of the counts."""

    def __init__(self, scheduler: Scheduler, now: float, budget: int) -> None:
        self.scheduler = scheduler
        self.kv = scheduler.kv
        self.draft = Draft(scheduler.kv)
        self.decision = Decision()
        rank = scheduler.policy.rank
        self.rank: Callable[[Sequence], Rank] = lambda s: rank(s, now)
        moving = scheduler.policy.moving
        self.running = sorted(scheduler.running, key=self.rank) if moving else scheduler.running[:]
        self.next = 0  # cursor into `running`: served or skipped before it
        self.end = len(self.running)  # victims have been taken from here on
        self.active = sum(not s.parked for s in self.running)  # before `end`, those that compute
        self.left = budget
        self.scores = scheduler.most_logits  # logits that scored chunks may still want
        self.computing: dict[bytes, bool] = {}  # keys of the blocks that this step's rows compute
        self.coming: dict[bytes, bool] = {}  # keys of the blocks that this step asks the disk for
        self.awaiting = 0  # deferred ones that will want to run when the blocks are there
        self.promised = 0  # blocks that admitted prompts will still need
        self.decoding = sum(s.decoding for s in self.running)  # decodes at or after the cursor
        self.resting = self._resting(budget)

    def _resting(self, budget: int) -> dict[int, bool]:
        """When there are more decodes than budget, those served last sit this one out; the best-ranked never does."""
        first = next((s for s in self.running if not s.parked), None)
        if first is None:
            return {}
        keep = budget if first.decoding else budget - 1  # the best-ranked gets a token of its prompt at least
        if self.decoding <= keep:
            return {}
        decoding = [s for s in self.running if s.decoding]
        decoding.sort(key=lambda s: (s is not first, s.served))
        return {s.number: True for s in decoding[keep:]}

    def decide(self) -> Decision:
        """Walk running and waiting sequences merged by rank."""
        queue = self.scheduler.waiting
        if self.scheduler.policy.moving:
            queue = sorted(queue, key=self.rank)
        waiting = 0
        open_ = True  # admission closes at the first sequence that does not fit: nobody overtakes it
        while self.next < self.end or (open_ and waiting < len(queue)):
            if open_ and waiting < len(queue):
                if self.next >= self.end or self.rank(queue[waiting]) < self.rank(self.running[self.next]):
                    open_ = self._admit(queue[waiting])
                    waiting += 1
                    continue
            sequence = self.running[self.next]
            self.next += 1
            if sequence.decoding:
                self.decoding -= 1
            self._continue(sequence)
        self._take_drafts()
        return self.decision

    # ---- running sequences -----------------------------------------------------------------------------------------

    def _continue(self, sequence: Sequence) -> None:
        if sequence.parked or sequence.number in self.resting or not self._room():
            return
        start, limit, attached = sequence.computed, len(sequence.tokens), 0
        if limit - start == 1 and self.kv.writable(sequence.number, start, limit):  # a decode within its last block
            self.left -= 1
            self.decision.rows.append((sequence, start, limit))
            return
        if limit - start > 1:
            match = self.kv.match(sequence)
            if match is not None and self.draft.attach_cost(sequence, match) > self.draft.free:
                match = None
            start = match.length if match else start
            if self._on_disk(sequence, match) or (match is not None and not self.draft.pinnable(match)):
                return
            if self._computed_elsewhere(sequence, start):
                self.decision.deferred += 1
                return
            limit = self._limit(sequence, start)
            if limit <= start:
                return
            if match is not None:
                self.draft.attach(sequence, match)
                self.decision.attached.append((sequence, match))
                attached = match.blocks
        stop = self._fitting(sequence, start, limit, attached)
        while stop <= start and self._take_victim():
            stop = self._fitting(sequence, start, limit, attached)
        if stop > start:
            self._serve(sequence, start, stop, attached)

    def _take_drafts(self) -> None:
        """Decodes verify drafts with the tokens and blocks that nobody else has asked for in this step."""
        if self.decision.victims:
            return
        for i, (sequence, start, stop) in enumerate(self.decision.rows):
            if sequence.drafts and sequence.decoding and self.left > 0:
                end = self.draft.lengthen(stop, stop + min(len(sequence.drafts), self.left))
                self.left -= end - stop
                self.decision.rows[i] = sequence, start, end

    def _room(self) -> bool:
        """Whether budget is left and another row may be; the first row of a step always has it."""
        rows = len(self.decision.rows)
        return not rows or (self.left > 0 and rows < self.scheduler.max_running)  # beams may be more, once unparked

    def _limit(self, sequence: Sequence, start: int) -> int:
        """The furthest end that the token budget allows; decodes behind the cursor keep their token."""
        stop = len(sequence.tokens)
        if stop - start == 1:
            return stop
        share = self.left - self.decoding
        if not self.decision.rows:
            share = max(share, 1)
        if sequence.scoring:
            share = min(share, self.scores)
        return min(stop, start + share)

    def _fitting(self, sequence: Sequence, start: int, limit: int, attached: int) -> int:
        """The furthest end up to ``limit`` that the free blocks allow; ``start`` if nothing fits."""
        cost = self.draft.extend_cost(sequence, start, limit, attached)
        if cost <= self.draft.free:
            return limit
        # Whole blocks that still fit, the same number in each group, after a possible copy of the tail.
        size, groups = self.kv.block_size, self.kv.groups
        missing = -(-(cost - self.draft.free) // groups)
        stop = (-(-limit // size) - missing) * size
        if stop > start and self.draft.extend_cost(sequence, start, stop, attached) <= self.draft.free:
            return stop
        return start

    def _take_victim(self) -> bool:
        """Preempt the worst-ranked running sequence behind the cursor; False if there is none."""
        victim = self._parked_ahead()
        if self.end > self.next:
            self.end -= 1
            victim = self.running[self.end]
        if victim is None:
            return False
        if victim.decoding:
            self.decoding -= 1
        self.active -= not victim.parked
        self.draft.release(victim)
        self.decision.victims.append(victim)
        return True

    def _parked_ahead(self) -> Sequence | None:
        """A better-ranked beam that only waits for others, to be taken by the first one served when all else is gone.

        Without it, beams that no longer share blocks could fill the pool and wait for one that finds no room.
        """
        if self.decision.rows:
            return None
        ahead = self.running[: self.next]
        return next((s for s in reversed(ahead) if s.parked and s not in self.decision.victims), None)

    def _serve(self, sequence: Sequence, start: int, stop: int, attached: int) -> None:
        self.draft.extend(sequence, start, stop, attached)
        self.left -= stop - start
        self.scores -= stop - start if sequence.scoring else 0
        self.decision.rows.append((sequence, start, stop))
        length = len(sequence.tokens)
        if length - start > 1 and self.kv.prefix_cache:
            self._note_computing(sequence, start, stop)
        if stop < length:
            self.promised += max(0, self.kv.blocks_for(length, 1) - self.kv.blocks_for(stop, 1))

    # ---- prefixes that another row computes ------------------------------------------------------------------------

    def _computed_elsewhere(self, sequence: Sequence, start: int) -> bool:
        """Whether the block at ``start`` is being computed by a row of this step, to be hit in the next one."""
        size = self.kv.block_size
        b = start // size
        if start % size or not self.computing or sequence.scoring:
            return False
        if (b + 1) * size >= len(sequence.tokens):  # a hit has to leave one token to compute
            return False
        return self.kv.keys(sequence, b + 1)[b + 1] in self.computing

    def _on_disk(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether what follows a hit is on disk or on its way from there; then the sequence waits for it."""
        room = self.draft.host_free // self.kv.groups
        blocks = fetchable(self.kv, sequence, match, room, self.coming)
        if blocks > 0:
            self.decision.fetches.append((sequence, match, blocks))
            self.draft.fetch(blocks)
            for key in fetched_keys(self.kv, sequence, match, blocks):
                self.coming[key] = True
        return blocks != 0

    def _note_computing(self, sequence: Sequence, start: int, stop: int) -> None:
        size = self.kv.block_size
        full = len(sequence.tokens) // size
        last = min(full, -(-stop // size))
        keys = self.kv.keys(sequence, last)
        for b in range(start // size, last):
            self.computing[keys[b + 1]] = True

    # ---- waiting sequences -----------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence its first row if it fits.  False closes admission for this step."""
        if sequence.parked:
            return True
        victims = self.decision.victims
        if victims and self.rank(victims[-1]) < self.rank(sequence):
            return False  # nobody takes the place of one that has just lost it
        if self._full(self.awaiting) and not self._outranks_running(sequence):
            return False
        if not self._room() or (self.decision.rows and self.left <= self.decoding):
            return False
        if sequence.scoring and self.scores <= 0:
            return False
        match = self.kv.match(sequence)
        start = match.length if match else 0
        if self._on_disk(sequence, match):
            self.awaiting += 1
            return True
        if match is not None and not self.draft.pinnable(match):
            return False  # a fetch of this step takes its place in the host tier
        if self._computed_elsewhere(sequence, start):
            self.decision.deferred += 1
            self.awaiting += 1
            return True
        while (full := self._full()) or not self._admissible(sequence, match):
            outranks = self._outranks_running if full else self._outranks_victim
            if not (outranks(sequence) and self._take_victim()):
                return False
        attached = 0
        if match is not None:
            self.draft.attach(sequence, match)
            attached = match.blocks
        stop = self._fitting(sequence, start, self._limit(sequence, start), attached)
        if stop <= start:
            raise RuntimeError(f"{sequence!r} was found to fit but does not: {self.draft.free} blocks free")
        self.decision.admitted.append(sequence)
        if match is not None:
            self.decision.attached.append((sequence, match))
        self._serve(sequence, start, stop, attached)
        return True

    def _full(self, awaiting: int = 0) -> bool:
        """Whether as many sequences compute as may."""
        return self.active + len(self.decision.admitted) + awaiting >= self.scheduler.max_running

    def _outranks_running(self, sequence: Sequence) -> bool:
        """Whether the sequence may take the place of the worst one that computes; parked ones have none to give."""
        behind = self.running[self.next : self.end]
        worst = next((s for s in reversed(behind) if not s.parked), None)
        return worst is not None and self._outranks(sequence, worst)

    def _outranks_victim(self, sequence: Sequence) -> bool:
        """Whether the sequence may push out the worst running one behind the cursor."""
        if self.end <= self.next:
            return self._parked_ahead() is not None
        return self._outranks(sequence, self.running[self.end - 1])

    def _outranks(self, sequence: Sequence, victim: Sequence) -> bool:
        if not self.decision.rows and all(s.parked for s in self.running[: self.next]):
            return True  # the best-ranked of all that have something to compute
        level = self.scheduler.policy.level
        return level(sequence) < level(victim)

    def _admissible(self, sequence: Sequence, match: Match | None) -> bool:
        """Whether all its known tokens fit beside a spare block for each that runs; alone, whether a token fits."""
        kv = self.kv
        alone = self.active == 0 and not self.decision.admitted
        start, attached = (match.length, match.blocks) if match else (0, 0)
        hit = self.draft.attach_cost(sequence, match) if match else 0
        if alone:
            stop = min(len(sequence.tokens), (start // kv.block_size + 1) * kv.block_size)
            return hit + self.draft.extend_cost(sequence, start, stop, attached) <= self.draft.free
        length = len(sequence.tokens)
        fresh = max(0, kv.blocks_for(length, 1) - (kv.blocks_for(start, 1) if start else 0))
        first = self.draft.extend_cost(sequence, start, min(length, start + kv.block_size), attached)
        spare = kv.groups * (self.active + len(self.decision.admitted))
        return hit + max(fresh, first) + spare + self.promised <= self.draft.free
