"""A world to break the engine in: the real scheduler and paging, a simulated clock, made-up users, injected faults.

Everything that happens is a function of the seed.  Each era has an engine of its own with settings drawn anew; what
the disk tier holds outlives it.  The right answer of every request is known beforehand, since the scripted executor's
next token is a hash of the prefix as the blocks hold it.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.clock import SimulatedClock
from octavo.core.events import Finished
from octavo.core.params import SamplingParams
from octavo.core.plan import DISK, Move, Plan, Row, StepResult
from octavo.core.request import Request
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.engine.session import Call, SessionState
from octavo.errors import RequestError
from octavo.paging.audit import audit, audit_idle
from octavo.paging.kv import KV
from octavo.schedule.budget import TokenBudget
from octavo.schedule.policies import POLICIES
from octavo.sim.executors import ScriptedExecutor, mixed, prefix_hash
from octavo.sim.guesses import Guesses
from octavo.sim.oracle import VOCAB, Heard, Oracle

CONTEXT = 60
Files = dict[str, tuple[bytes, list[tuple[int, int] | None]]]


@dataclass(frozen=True)
class Settings:
    """What an era's engine is like, and how often things go wrong in it."""

    pool: int
    block_size: int
    windows: tuple[int | None, ...]
    swap: int
    disk: int
    preempt: str
    policy: str
    budget: int
    max_running: int
    prefix_cache: bool
    drafts: int
    ahead: bool
    row_errors: float
    lost_moves: float
    aborts: float
    busy: float  # arrivals a step

    @classmethod
    def drawn(cls, rng: random.Random) -> Settings:
        windows = rng.choice([(None,), (None,), (None, 8), (6,)])
        size = rng.choice([1, 3, 4, 4, 8])
        return cls(
            pool=max(6, rng.choice([24, 40, 64]) // size) * len(windows),
            block_size=size,
            windows=windows,
            swap=rng.choice([0, 1, 4, 12, 100]),
            disk=rng.choice([0, 0, 1, 10, 200]),
            preempt=rng.choice(["swap", "recompute", "mixed"]),
            policy=rng.choice(sorted(POLICIES)),
            budget=rng.choice([1, 3, 8, 64]),
            max_running=rng.choice([1, 4, 64]),
            prefix_cache=rng.random() < 0.9,
            drafts=rng.choice([0, 0, 2, 6]),
            ahead=rng.random() < 0.7,
            row_errors=rng.choice([0.0, 0.0, 0.002]),
            lost_moves=rng.choice([0.0, 0.1, 0.5]),
            aborts=rng.choice([0.0, 0.01]),
            busy=rng.choice([0.05, 0.15, 0.3, 0.6]),
        )


@dataclass
class Tally:
    """What happened, over all eras; and a digest of every plan, equal for equal seeds."""

    steps: int = 0
    times: dict[str, int] = field(default_factory=dict)
    digest: int = 0

    def add(self, what: str, times: int = 1) -> None:
        self.times[what] = self.times.get(what, 0) + times

    def __str__(self) -> str:
        happened = ", ".join(f"{self.times[k]} {k}" for k in sorted(self.times))
        return f"{self.steps} steps: {happened}; digest {self.digest:016x}"


class FaultyExecutor(ScriptedExecutor):
    """Fails rows, loses and delays moves to and from disk, all by chance."""

    def __init__(self, settings: Settings, rng: random.Random, files: Files, tally: Tally) -> None:
        self.reach = None if None in settings.windows else max(w for w in settings.windows if w is not None)
        super().__init__(
            settings.pool,
            settings.block_size,
            prefix_hash(VOCAB, self.reach),
            settings.windows,
            self._row_fails,
            settings.swap,
            self._loses,
            files,
        )
        self.settings, self.rng, self.tally = settings, rng, tally
        self.failed: dict[int, bool] = {}  # numbers of sequences that a row of was failed

    def run(self, plan: Plan) -> StepResult:
        self.plans.clear()
        for move in plan.moves:
            self._note(move.source.tier, move.source.slot, move.target.tier, move.target.slot)
        for row in plan.rows:
            self._note(row.sequence, row.start, len(row.tokens), len(row.draws))
        return super().run(plan)

    def _note(self, *values: int) -> None:
        self.tally.digest = mixed(values, self.tally.digest)

    def _row_fails(self, row: Row) -> str | None:
        if self.settings.row_errors and self.rng.random() < self.settings.row_errors:
            self.failed[row.sequence] = True
            self.tally.add("row errors")
            return "injected"
        return None

    def _loses(self, move: Move) -> bool:
        if self.settings.lost_moves and self.rng.random() < self.settings.lost_moves:
            self.tally.add("disk moves lost")
            return True
        self.tally.add("blocks written to disk" if move.target.tier == DISK else "blocks read from disk")
        return False

    def _slow_ones(self, plan: Plan) -> tuple[tuple[Move, bool], ...]:
        if plan.rows and self.rng.random() < 0.5:
            return ()
        return super()._slow_ones(plan)


@dataclass
class Asked:
    """A request in flight, what is to come of it, and what to do then."""

    request: Request
    heard: Heard
    prompt: list[int]
    most: int
    state: SessionState | None = None  # whose text it continues
    scoring: Scoring | None = None  # that it is part of
    aborted: bool = False


@dataclass
class Scoring:
    """A session's call that scores texts: a first request that computes the session, then one for each text."""

    call: Call
    texts: list[list[int]]
    left: int = 0  # texts that are being scored


class Era:
    """Owns: one engine, the users' requests and sessions, and the checks of what they get."""

    def __init__(self, rng: random.Random, files: Files, tally: Tally, audit_every: int) -> None:
        self.rng, self.tally, self.audit_every = rng, tally, audit_every
        self.settings = s = Settings.drawn(rng)
        self.kv = KV(s.pool, s.block_size, s.windows, s.prefix_cache, host_slots=s.swap, disk_slots=s.disk)
        if self.kv.disk is not None:
            self.kv.disk.adopt(list(files))
        self.executor = FaultyExecutor(s, rng, files, tally)
        self.clock = SimulatedClock()
        self.engine = Engine(
            self.executor,
            self.kv,
            policy=POLICIES[s.policy](),
            budget=TokenBudget(s.budget),
            max_running=s.max_running,
            clock=self.clock,
            swap_pays=self._swap_pays,
            drafter=Guesses(prefix_hash(VOCAB, self.executor.reach), s.drafts) if s.drafts else None,
            ahead=s.ahead,
        )
        self.intake = Intake(
            tokenizer=None,
            vocab=VOCAB + 32,  # beams draw beyond the vocabulary of the hash
            context=CONTEXT,
            longest=self.kv.longest(),
            now=self.clock.now,
            blocks=s.pool,
            beam_blocks=self.kv.beam_blocks,
        )
        self.oracle = Oracle(s.windows)
        self.asked: list[Asked] = []
        self.sessions: list[SessionState] = []
        self.heads = [self._ids(rng.randint(1, 16)) for _ in range(3)]

    def _ids(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _swap_pays(self, sequence: Any) -> bool:
        return self.settings.preempt == "swap" or (self.settings.preempt == "mixed" and self.rng.random() < 0.5)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        rng = self.rng
        burst = 8 if rng.random() < 0.005 else 1
        for _ in range(burst if rng.random() < self.settings.busy or burst > 1 else 0):
            self._arrive()
        if self.asked and rng.random() < self.settings.aborts:
            self._abort(rng.choice(self.asked))
        if rng.random() < 0.02 and self.engine.scheduler.running and self.engine.flight is None:
            self.engine.scheduler.preempt(rng.choice(self.engine.scheduler.running))
            self.tally.add("forced preemptions")
        if rng.random() < 0.001:
            self.kv.reset_cache()
            self.tally.add("cache resets")
        self._advance()

    def _advance(self) -> None:
        self.clock.advance(0.1)
        if self.engine.busy:
            self.engine.step()
            self.tally.steps += 1
            if self.tally.steps % self.audit_every == 0:
                audit(self.kv)
        else:
            self.engine.reap()
        done = [a for a in self.asked if a.heard.final is not None]  # without a step too: an abort ends a request
        if done:
            self.asked = [a for a in self.asked if a.heard.final is None]
            for asked in done:
                self._judge(asked)

    def end(self, most: int = 20_000) -> None:
        """Let everything finish, check that nothing is left, write what the disk is to remember."""
        for state in self.sessions:
            if not state.busy:
                state.close()
        steps = 0
        while self.engine.busy:
            self._advance()
            steps += 1
            if steps > most:
                raise AssertionError(f"no end after {most} steps: {self.engine.scheduler.waiting} wait")
        if self.asked:
            raise AssertionError(f"idle, but {[a.request.id for a in self.asked]} have no answer")
        for state in self.sessions:
            state.close()
        self.engine.reap()
        audit_idle(self.kv)
        counters = self.engine.counters
        names = ("preemptions", "copies", "evictions", "cached_tokens", "failed", "aborted", "finished")
        for name in (*names, "drafted_tokens", "accepted_tokens", "steps_ahead"):
            self.tally.add(name.replace("_", " "), getattr(counters, name))
        self.tally.add("swaps", self.engine.scheduler.swaps)
        self.engine.close()

    # ---- what users do ---------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        rng = self.rng
        kind = rng.random()
        try:
            if kind < 0.1:
                self._ask_beams()
            elif kind < 0.3:
                self._use_session()
            else:
                self._ask()
        except RequestError:
            self.tally.add("refused")

    def _prompt(self) -> list[int]:
        return self.rng.choice(self.heads) + self._ids(self.rng.randint(0, 6))

    def _params(self, most: int, n: int = 1) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=most,
            n=n,
            seed=rng.randrange(4),
            ignore_eos=True,
            stop_token_ids=self._ids(rng.choice([0, 0, 0, 15])),
            prompt_logprobs=rng.choice([0, 2]) if most == 0 or rng.random() < 0.05 else None,
        )

    def _ask(self) -> None:
        rng = self.rng
        prompt, most = self._prompt(), rng.choice([0, 1, 1, 3, 3, 8, 8, 20, 20])
        params, heard = self._params(most, rng.choice([1, 1, 1, 2, 4])), Heard()
        request = self.intake.request(
            prompt,
            params,
            priority=rng.randrange(3),
            user=rng.choice("abc"),
            cache_salt=rng.choice([None, None, "x"]),
            sink=heard,
        )
        self.engine.add(request)
        self.asked.append(Asked(request, heard, prompt, most))

    def _ask_beams(self) -> None:
        prompt, most, heard = self._prompt(), self.rng.choice([1, 3, 6]), Heard()
        request = self.intake.beam_search(prompt, width=self.rng.choice([1, 2, 4]), max_tokens=most, sink=heard)
        self.engine.add(request)
        self.asked.append(Asked(request, heard, prompt, most))
        self.tally.add("beam searches")

    def _use_session(self) -> None:
        """Open, append to, continue, score with, fork, rewind or close one."""
        rng = self.rng
        idle = [s for s in self.sessions if not s.busy]
        if not idle or (len(self.sessions) < 5 and rng.random() < 0.2):
            tokens = array("i", self._prompt())
            self.sessions.append(SessionState(self.engine, self.intake, tokens, b"", rng.choice("ab")))
            self.tally.add("sessions")
            return
        state = rng.choice(idle)
        what = rng.random()
        if what < 0.45 and not state.tokens:
            return
        if what < 0.1:
            self._begin_scores(state)
        elif what < 0.45:
            most, prompt, heard = rng.choice([1, 3, 8]), list(state.tokens), Heard()
            request = state.begin(self._params(most), sink=heard)
            self.asked.append(Asked(request, heard, prompt, most, state))
        elif what < 0.65:
            state.append(self._ids(rng.randint(1, 6)))
        elif what < 0.75:
            if len(self.sessions) < 8:
                self.sessions.append(state.fork())
                self.tally.add("session forks")
        elif what < 0.9:
            state.rewind(rng.randint(0, len(state.tokens)))
            self.tally.add("rewinds")
        else:
            state.close()
            self.sessions.remove(state)

    def _begin_scores(self, state: SessionState) -> None:
        texts = [self._ids(self.rng.randint(1, 4)) for _ in range(self.rng.randint(1, 3))]
        scoring, heard = Scoring(Call(state), texts), Heard()
        first = scoring.call.prefill(heard)
        if first is None:
            self._score(scoring)
        else:
            self.asked.append(Asked(first, heard, list(state.tokens), 0, scoring=scoring))
        self.tally.add("session scores")

    def _score(self, scoring: Scoring) -> None:
        heard = [Heard() for _ in scoring.texts]
        by_id: dict[str, Heard] = {}
        try:
            asked = scoring.call.score(scoring.texts, lambda event: by_id[event.request](event))
        except RequestError:
            self.tally.add("refused")
            scoring.call.end()
            return
        scoring.left = len(asked)
        for (request, ids), ear in zip(asked, heard, strict=True):
            by_id[request.id] = ear
            self.asked.append(Asked(request, ear, [*scoring.call.state.tokens, *ids], 0, scoring=scoring))

    def _go_on_scoring(self, asked: Asked, scoring: Scoring) -> None:
        """One of its requests has ended; a call that is cut short takes the others with it."""
        if asked.aborted:
            for other in self.asked:
                other.aborted |= other.scoring is scoring
            scoring.call.end()
        elif not scoring.left:
            self._score(scoring)
        else:
            scoring.left -= 1
            if not scoring.left:
                scoring.call.end()

    def _abort(self, asked: Asked) -> None:
        asked.aborted = True
        self.engine.abort(asked.request)

    # ---- checks ----------------------------------------------------------------------------------------------------

    def _judge(self, asked: Asked) -> None:
        """Every request ends with its right answer, or with the fault that was injected into it."""
        request, heard = asked.request, asked.heard
        if asked.state is not None:
            asked.state.end(request)
        if asked.scoring is not None:
            self._go_on_scoring(asked, asked.scoring)
        if request.beams is None and sorted(heard.reasons) != sorted(s.branch for s in request.branches):
            raise AssertionError(f"{request.id}: heard of the ends of branches {heard.reasons} of {request.branches}")
        if request.error is not None:
            if request.error != "injected" or heard.final != Finished(request.id, "injected"):
                raise AssertionError(f"{request.id} failed: {request.error}; heard {heard.final}")
            return
        if request.beams is not None:
            if not asked.aborted:
                search = request.beams.search
                got = [(h.tokens, h.score) for h in search.finished]
                want = self.oracle.beams(asked.prompt, search.width, asked.most)
                if got != want:
                    raise AssertionError(f"{request.id}: beams {got} are not {want}")
            return
        for sequence in request.branches:
            want_tokens = self.oracle.answer(asked.prompt, asked.most, request.params, sequence.branch)
            tokens = list(sequence.output()) if asked.state is None else self._of_session(asked)
            if tokens != want_tokens[: len(tokens)] or (len(tokens) < len(want_tokens) and not asked.aborted):
                raise AssertionError(f"{request.id}, branch {sequence.branch}: {tokens} is not {want_tokens}")
            told = heard.tokens.get(sequence.branch, [])
            if told != tokens and not (asked.state is not None and asked.aborted):  # a session cut short goes back
                raise AssertionError(f"{request.id}, branch {sequence.branch}: {tokens}, but told {told}")
        best = request.params.prompt_logprobs
        if best is not None and not asked.aborted:
            scores = self.oracle.scores(asked.prompt, request.score_from + 1, best)
            if request.scores != scores:
                raise AssertionError(f"{request.id}: scores {request.scores} are not {scores}")
            self.tally.add("scored")
        if not asked.aborted and len(request.branches) != request.params.branches:
            raise AssertionError(f"{request.id}: {len(request.branches)} branches of {request.params.branches}")

    def _of_session(self, asked: Asked) -> list[int]:
        assert asked.state is not None
        tokens = list(asked.state.tokens)
        if tokens[: len(asked.prompt)] != asked.prompt:
            raise AssertionError(f"{asked.request.id}: the session's text before it changed")
        return tokens[len(asked.prompt) :]


def simulate(
    steps: int,
    seed: int,
    audit_every: int = 1,
    era: int = 400,
    told: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Run so many steps or a few more.  A fault's AssertionError names the seed and the era to replay it with."""
    tally = Tally()
    stores: dict[tuple[int, tuple[int | None, ...]], Files] = {}
    number = 0
    while tally.steps < steps:
        rng = random.Random(f"{seed}-{number}")
        settings = "not drawn"
        try:
            world = Era(rng, {}, tally, audit_every)
            settings = str(world.settings)
            files = stores.setdefault((world.settings.block_size, world.settings.windows), {})
            world.executor.disk = files
            if world.kv.disk is not None:
                world.kv.disk.adopt(list(files))
            for _ in range(era):
                world.step()
            world.end()
        except Exception as error:
            raise AssertionError(f"seed {seed}, era {number} ({settings}), step {tally.steps}: {error}") from error
        number += 1
        if len(files) > 2000:
            files.clear()
        told(tally)
    return tally
