"""The step loop: decide, commit, run, fold the result back, tell what is new."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from octavo.clock import Clock, RealClock
from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.plan import NO_TOKENS, Draw, Row, RowResult, StepResult, TokenLogprobs
from octavo.core.request import Request
from octavo.core.sequence import Sequence, State
from octavo.decode.branching import beam_draws, draft_draws, draws
from octavo.engine.ahead import Flight, follow
from octavo.engine.beams import Beams
from octavo.engine.drafting import Drafter, agreed, note_drafts
from octavo.engine.reader import Reader
from octavo.engine.stats import Counters, Stats
from octavo.execute.executor import Executor
from octavo.paging.audit import audit
from octavo.paging.fetch import landed
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget
from octavo.schedule.policies import Policy
from octavo.schedule.scheduler import Decision, Scheduler
from octavo.text.tokenizer import Tokenizer

log = logging.getLogger("octavo.engine")


class Engine:
    """Owns: the requests in flight, the scheduler, and through it the blocks.

    Promises: one final event a request; every step with work advances the best-ranked sequence; a request's failure
    is its own.  Not thread-safe: one thread steps it.

    ``ahead``: a step is submitted while the one before runs, where it can be (``ahead.py``); no answer depends on it.
    """

    def __init__(
        self,
        executor: Executor,
        kv: KV,
        *,
        tokenizer: Tokenizer | None = None,
        eos_ids: tuple[int, ...] = (),
        policy: Policy | None = None,
        budget: TokenBudget | None = None,
        max_running: int = 256,
        most_logits: int = 1024,
        clock: Clock | None = None,
        audited: bool = False,
        block_bytes: int = 0,
        swap_pays: Callable[[Sequence], bool] = lambda sequence: True,
        drafter: Drafter | None = None,
        ahead: bool = False,
    ) -> None:
        self.executor = executor
        self.kv = kv
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.budget = budget or TokenBudget(report=log.info)
        self.scheduler = Scheduler(kv, policy, max_running, most_logits, swap_pays)
        self.clock = clock or RealClock()
        self.audited = audited
        self.block_bytes = block_bytes
        self.drafter = drafter
        self.ahead = ahead
        self.flight: Flight | None = None  # submitted, to be folded in by the next step
        self.counters = Counters()
        self.requests: dict[int, Request] = {}  # in flight, by number
        self._owners: dict[int, Request] = {}  # by sequence number
        self._sequences = 0
        self._peak = 0
        self.orphans: deque[Sequence] = deque()  # of sessions that were dropped, in whatever thread
        self.orphaned: Callable[[], None] = lambda: None  # to be told of it

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: Request, parent: Sequence | None = None) -> None:
        """Take a request that intake has found able to run; ``parent``: a session's sequence to start from."""
        self.requests[request.number] = request  # first of all: should anything fail from here on, it is heard of
        self.reap()
        self.counters.prompt_tokens += len(request.prompt)
        sequence = self._branch(request, 0, request.prompt[:])
        if request.beams is not None:
            request.beams.sequences = [sequence]
        if parent is None:
            self.scheduler.add(sequence)
            return
        self.scheduler.add_fork(parent, sequence)
        sequence.scored = max(sequence.scored, request.score_from)
        # At least the last token is computed for its logits, and from where scores are owed.
        latest = min(len(sequence.tokens) - 1, request.score_from if sequence.scoring else len(sequence.tokens))
        if sequence.computed > latest:
            tail = sequence.tokens[latest:]
            self.scheduler.rewind(sequence, latest)
            sequence.tokens.extend(tail)

    def rest(self, tokens: array[int], salt: bytes, user: str, parent: Sequence | None = None) -> Sequence:
        """A sequence for a session to rest in, on the blocks of ``parent`` if given."""
        self._sequences += 1
        params = SamplingParams().filled({}, 0)
        sequence = Sequence(self._sequences, self._sequences, 0, tokens, len(tokens), params, 2**31, salt, user=user)
        sequence.parked = sequence.idle = True
        if parent is None:
            self.scheduler.add(sequence)
        else:
            self.scheduler.add_fork(parent, sequence)
        return sequence

    def reap(self) -> None:
        """Give back what sessions hold that nobody has any more."""
        while self.orphans:
            sequence = self.orphans.popleft()
            if sequence.state is not State.FINISHED:
                self.scheduler.remove(sequence)

    def abort(self, request: Request) -> None:
        """End a request now; call between steps.  Its blocks are back when this returns."""
        if request.finished:
            return
        self._end_branches(request, "abort")
        self.counters.aborted += 1
        self._close(request)

    def close(self) -> None:
        """Keep what the disk tier is to remember, and let the executor's memory go."""
        flight, self.flight = self.flight, None
        try:
            if flight is not None:
                self._landed(self.executor.collect(flight.ticket))
            self.executor.flush(self.kv.flush())
        except Exception:  # whoever waited has been told by now; a device that failed gives nothing back
            log.exception("the engine could not keep what it had")
        self.executor.close()

    @property
    def sequences(self) -> int:
        """How many there have been so far; the latest has this number."""
        return self._sequences

    @property
    def busy(self) -> bool:
        return self.flight is not None or not self.scheduler.idle

    def _branch(self, request: Request, index: int, tokens: array[int]) -> Sequence:
        self._sequences += 1
        sequence = request.branch(self._sequences, index, tokens)
        request.readers.append(Reader(self.tokenizer, request.params))
        if request.form is not None:
            held = 2**62 if request.params.ignore_eos else request.params.min_tokens  # end tokens
            request.matchers.append(request.matchers[0].fork() if index else request.form.matcher(held))
        self._owners[sequence.number] = request
        return sequence

    # ---- one step --------------------------------------------------------------------------------------------------

    def step(self) -> int:
        """Fold one step in, begun by the call before or now; returns how many tokens it computed, 0 if there is
        nothing to do."""
        self.reap()
        if not self.busy:
            return 0
        began = self.clock.now()
        flight, self.flight = self.flight or self._begin(began), None
        if self.ahead and self.drafter is None:
            self.flight = self._follow(flight, began)
        result = self._collect(flight)
        self._landed(result)
        plan = flight.plan
        self._count(plan.tokens)
        now = self.clock.now()
        for (sequence, start, stop, row), outcome in zip(flight.rows(), result.rows, strict=True):
            self._fold(sequence, start, stop, row, outcome, now)
        if self.audited:
            audit(self.kv)
        elapsed = self.clock.now() - began
        self.counters.step_seconds += elapsed
        if 2 * plan.prompt_tokens >= plan.tokens:  # a step of decodes says little about how fast prompts are read
            self.budget.measured(plan.tokens, elapsed)
        self._log(flight.decision)
        return plan.tokens

    def _begin(self, now: float) -> Flight:
        if self.drafter is not None:
            note_drafts(self.drafter, self.scheduler.running, self._owners)
        decision = self.scheduler.decide(now, self.budget.step(self.scheduler.computing))
        plan = self.scheduler.commit(decision, self.counters.steps, self._draws)
        if not plan.rows and not (self.kv.disk and self.kv.disk.flights):
            raise RuntimeError(f"a step without progress: {self.scheduler.running} run, {self.scheduler.waiting} wait")
        return Flight(decision, plan, self.executor.submit(plan) if self.ahead else None)

    def _follow(self, flight: Flight, now: float) -> Flight | None:
        """The step after one that runs, submitted too; None if it has to wait."""
        budget = self.budget.step(self.scheduler.computing)
        found = follow(flight, self.scheduler, self._owners, now, budget, self._draws)
        if found is None:
            return None
        decision, plan = found
        self.counters.steps_ahead += 1
        return Flight(decision, plan, self.executor.submit(plan))

    def _collect(self, flight: Flight) -> StepResult:
        try:
            if flight.ticket is None:
                return self.executor.run(flight.plan)
            return self.executor.collect(flight.ticket)
        except BaseException:
            self.flight = None  # it goes on from what nobody knows
            raise

    def _landed(self, result: StepResult) -> None:
        for move, ok in result.moved:
            landed(self.kv, move, ok)

    def _draws(self, sequence: Sequence, drafts: array[int]) -> tuple[Draw, ...]:
        request = self._owners[sequence.number]
        if drafts:
            return tuple(draft_draws(sequence, request.rules, drafts))
        if request.beams is not None:
            return beam_draws(sequence, request.beams.search.kept)
        mask = request.matchers[sequence.branch].mask() if request.matchers else None
        return draws(sequence, request.rules, mask)

    def _fold(self, sequence: Sequence, start: int, stop: int, row: Row, outcome: RowResult, now: float) -> None:
        request = self._owners.get(sequence.number)
        if request is None:  # it ended while this ran, or its request failed by another branch of this very step
            self.scheduler.policy.served(sequence, 0, row.drafts - len(row.draws))  # nobody gets what it drew
            return
        if outcome.error is not None:
            self._fail(request, outcome.error)
            return
        if row.drafts:
            self._verify(request, sequence, row, outcome)
            return
        self._computed(sequence, stop)
        if outcome.scores:
            request.add_scores(start, outcome.scores)
        if stop < len(sequence.tokens):
            return
        if not row.draws:  # a request that is only scored
            for branch in self._fork(request, sequence, sequence.forks + 1):
                self._end(request, branch, "length")
            self._settle(request)
            return
        if request.first_token is None:
            request.first_token = now
            request.cached, request.miss = sequence.cached or 0, sequence.miss
            self.counters.cached_tokens += request.cached
        if request.beams is not None:
            scored = outcome.logprobs[0]
            assert scored is not None
            if request.beams.add(sequence, scored.best):
                self._next_beams(request, request.beams)
            return
        branches = self._fork(request, sequence, len(outcome.tokens)) if sequence.forks else (sequence,)
        ended = False
        for branch, token, logprobs in zip(branches, outcome.tokens, outcome.logprobs, strict=True):
            ended |= self._accept(request, branch, token, logprobs)
        if ended:
            self._settle(request)

    def _computed(self, sequence: Sequence, stop: int) -> None:
        sequence.computed = stop
        self.kv.publish(sequence, stop)
        self.kv.slide(sequence.number, stop)

    def _verify(self, request: Request, sequence: Sequence, row: Row, outcome: RowResult) -> None:
        """Take the drafts that were drawn, and the token drawn after them, one by one as steps of a token would."""
        right = agreed(row, outcome)
        known, ended = len(sequence.tokens), False
        for token, logprobs in zip(outcome.tokens[: right + 1], outcome.logprobs, strict=False):
            if not ended:
                self._computed(sequence, len(sequence.tokens))
                ended = self._accept(request, sequence, token, logprobs)
        right = len(sequence.tokens) - known - 1  # an end among them leaves out the rest
        self.scheduler.verified(sequence, right)
        self.counters.drafted_tokens += row.drafts
        self.counters.accepted_tokens += right
        if ended:
            self._settle(request)

    def _fork(self, request: Request, sequence: Sequence, count: int) -> list[Sequence]:
        """The sequence and the branches that start here, on the same blocks."""
        out = [sequence]
        for index in range(sequence.branch + 1, sequence.branch + count):
            child = self._branch(request, index, sequence.tokens[:])
            self.scheduler.add_fork(sequence, child)
            out.append(child)
        sequence.forks = 0
        return out

    def _accept(self, request: Request, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> bool:
        """Append a drawn token; whether it ends the branch."""
        params = request.params
        sequence.tokens.append(token)
        self.counters.generated_tokens += 1
        reader = request.readers[sequence.branch]
        if logprobs is not None:
            reader.logprobs.append(logprobs)
        count = len(sequence.tokens) - sequence.prompt_length
        reason = self._ended_by_token(request, sequence, token, count)
        text, stop = "", None
        # The text of a token that ends the output is no part of it, unless asked for.
        if reason is None or params.include_stop_str_in_output:
            text, stop = reader.push(token, count)
        if reason is None and stop is not None:
            reason, sequence.stop_reason = "stop", stop
        elif reason is None and len(sequence.tokens) >= sequence.limit:
            reason = "length"
        if reason is None:
            if request.matchers:
                request.matchers[sequence.branch].advance(token)
            self._tell(request, sequence, (token,), text, logprobs)
            return False
        if stop is None:
            text += reader.flush(count)
        self._end(request, sequence, reason, (token,), text, logprobs)
        return True

    def _ended_by_token(self, request: Request, sequence: Sequence, token: int, count: int) -> str | None:
        """ "stop" if the token is an end of the model's or of the request's."""
        params = request.params
        if request.form is not None and token in self.eos_ids:
            return "stop"  # its mask holds end tokens back
        if count < params.min_tokens:
            return None
        if token in self.eos_ids and not params.ignore_eos:
            return "stop"
        if token in params.stop_token_ids:
            sequence.stop_reason = token
            return "stop"
        return None

    # ---- beams -----------------------------------------------------------------------------------------------------

    def _next_beams(self, request: Request, beams: Beams) -> None:
        """All beams have their candidates: fork those with several children, drop those with none."""
        children = beams.advance()
        old = beams.sequences
        heirs: dict[int, bool] = {}
        new = []
        for child in children:
            if child.parent in heirs:
                new.append(self._fork_beam(request, beams, old[child.parent]))
            else:
                heirs[child.parent] = True
                new.append(old[child.parent])
        for i, sequence in enumerate(old):
            if i not in heirs:
                self._drop(request, sequence)
        for child, sequence in zip(children, new, strict=True):
            sequence.tokens.append(child.token)
            sequence.parked = False
        beams.sequences, request.branches = new, list(new)
        self.counters.generated_tokens += len(children)
        if beams.search.done:
            self.counters.finished += 1
            self._close(request)

    def _fork_beam(self, request: Request, beams: Beams, parent: Sequence) -> Sequence:
        beams.born += 1
        self._sequences += 1
        child = request.branch(self._sequences, beams.born, parent.tokens[:])
        self._owners[child.number] = request
        self.scheduler.add_fork(parent, child)
        return child

    def _drop(self, request: Request, sequence: Sequence) -> None:
        """A sequence ends without a word: its blocks go back at once."""
        request.dropped_preemptions += sequence.preemptions
        self.scheduler.remove(sequence)
        self._disown(sequence)

    # ---- endings ---------------------------------------------------------------------------------------------------

    def _end(
        self,
        request: Request,
        sequence: Sequence,
        reason: str,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: TokenLogprobs | None = None,
    ) -> None:
        if request.keep:
            self.scheduler.rest(sequence)
            if self.flight is not None and sequence.number in self.flight.stops:
                self.kv.trim(sequence.number, sequence.computed)  # room for a token that will not be its own
        else:
            self.scheduler.remove(sequence)
        self._disown(sequence)
        sequence.finish_reason = reason
        if reason in ("abort", "error"):
            count = len(sequence.tokens) - sequence.prompt_length
            text += request.readers[sequence.branch].flush(count)
        self._tell(request, sequence, tokens, text, logprobs)

    def _disown(self, sequence: Sequence) -> None:
        del self._owners[sequence.number]
        sequence.drafts = NO_TOKENS
        if self.drafter is not None:
            self.drafter.forget(sequence.number)

    def _end_branches(self, request: Request, reason: str) -> None:
        for sequence in request.branches:
            if sequence.state is State.FINISHED or sequence.idle:
                continue
            if request.beams is not None:
                self._drop(request, sequence)
            else:
                self._end(request, sequence, reason)

    def _fail(self, request: Request, error: str) -> None:
        log.error("request %s failed: %s", request.id, error)
        request.error = error
        self._end_branches(request, "error")
        self.counters.failed += 1
        self._close(request)

    def _settle(self, request: Request) -> None:
        if request.done and not request.finished:
            self.counters.finished += 1
            self._close(request)

    def _close(self, request: Request) -> None:
        request.finished = True
        del self.requests[request.number]
        if request.sink is not None:
            request.sink(Finished(request.id, request.error))

    def _tell(
        self,
        request: Request,
        sequence: Sequence,
        tokens: tuple[int, ...],
        text: str,
        logprobs: TokenLogprobs | None,
    ) -> None:
        if request.sink is None:
            return
        entries = (logprobs,) if logprobs is not None else ()
        request.sink(
            Delta(request.id, sequence.branch, tokens, text, entries, sequence.finish_reason, sequence.stop_reason)
        )

    # ---- counting --------------------------------------------------------------------------------------------------

    def _count(self, tokens: int) -> None:
        c = self.counters
        c.steps += 1
        c.computed_tokens += tokens
        c.sequence_steps += len(self.scheduler.running)
        c.preemptions = self.scheduler.preemptions
        c.swaps, c.recomputes = self.scheduler.swaps, self.scheduler.recomputes
        if self.kv.host is not None:
            c.demoted = self.kv.host.demoted
        if self.kv.disk is not None:
            c.disk_written, c.disk_read, c.disk_failed = self.kv.disk.written, self.kv.disk.read, self.kv.disk.failed
        c.copies, c.evictions = self.kv.copies, self.kv.evictions
        used = self.kv.pool.size - self.kv.pool.free
        self._peak = max(self._peak, used)

    def _log(self, decision: Decision) -> None:
        for sequence in self.scheduler.running:
            held, filled = self.kv.slots(sequence.number, self.reached(sequence))
            self.counters.covered_slots += held
            self.counters.token_slots += filled
            self.counters.logical_blocks += held // self.kv.block_size
        self.counters.physical_blocks += self.kv.pool.size - self.kv.pool.free
        if decision.victims and log.isEnabledFor(logging.DEBUG):
            log.debug("preempted %s", [s.number for s in decision.victims])

    def reached(self, sequence: Sequence) -> int:
        """How far a sequence is computed, with the step that is on its way."""
        if self.flight is None or sequence.number not in self._owners:
            return sequence.computed
        return self.flight.stops.get(sequence.number, sequence.computed)

    def stats(self) -> Stats:
        pool = self.kv.pool
        return Stats(
            counters=replace(self.counters),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks=pool.size,
            block_size=self.kv.block_size,
            block_bytes=self.block_bytes,
            blocks_used=pool.size - pool.free,
            blocks_cached=pool.cached,
            blocks_free=pool.free - pool.cached,
            blocks_peak=self._peak,
            blocks_shared=pool.size - pool.counts.count(0) - pool.counts.count(1),
            token_budget=self.budget.tokens,
        )
