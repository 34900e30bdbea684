"""Engines around a scripted executor, for tests of paging, scheduling and the step loop."""

from __future__ import annotations

from array import array
from typing import Any

from octavo.clock import SimulatedClock
from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.plan import Plan, RowResult, StepResult
from octavo.core.request import Request
from octavo.engine.engine import Engine
from octavo.engine.intake import Intake
from octavo.paging.audit import audit_idle
from octavo.paging.kv import KV
from octavo.paging.prefix import chain_hash
from octavo.schedule.budget import TokenBudget
from octavo.schedule.policies import POLICIES
from octavo.schedule.scheduler import Decision
from octavo.sim.executors import ScriptedExecutor, prefix_hash
from octavo.sim.guesses import Guesses

VOCAB = 97


class Pieces:
    """A tokenizer whose tokens are given byte strings; stands in for the real one where a script says what comes."""

    strips_space = False
    bos_id = None
    eos_ids: tuple[int, ...] = ()

    def __init__(self, pieces: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.special_ids = special

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def is_special(self, token: int) -> bool:
        return token in self.special_ids

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        raise AssertionError("prompts of these tests are ids")


def six_bits(parent: bytes, tokens: bytes) -> bytes:
    """A hash so weak that prefixes collide all the time."""
    return bytes([chain_hash(parent, tokens)[0] & 63])


class CheckedExecutor(ScriptedExecutor):
    """Refuses plans that write a block which another table names, or which can be hit."""

    kv: KV

    def run(self, plan: Plan) -> StepResult:
        for row in plan.rows:
            for table in row.tables:
                first, last = row.start // self.block_size, (row.start + len(row.tokens) - 1) // self.block_size
                for block in table[first : last + 1]:
                    assert self.kv.pool.counts[block] == 1, f"block {block} is written but shared"
                    assert self.kv.pool.content[block] is None, f"block {block} is written but published"
        return super().run(plan)


class BlindExecutor:
    """Draws a token from its position alone and reads nothing: for loads whose size matters, not their answers."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> StepResult:
        self.plans = [plan]
        return StepResult(
            plan.step,
            tuple(
                RowResult(tuple(draw.position % VOCAB for draw in row.draws), (None,) * len(row.draws))
                for row in plan.rows
            ),
        )

    def flush(self, moves: object) -> None:
        pass

    def close(self) -> None:
        pass


class Rig:
    """An audited engine with its intake and a simulated clock; one step takes a second.

    Checks in every step that the best-ranked sequence is served, that the token budget is kept, and that each
    sequence wastes less than a block.
    """

    def __init__(
        self,
        pool: int = 24,
        block_size: int = 4,
        *,
        windows: tuple[int | None, ...] = (None,),
        budget: int = 16,
        max_running: int = 64,
        choose: Any = None,
        context: int = 512,
        policy: str = "fcfs",
        prefix_cache: bool = True,
        hash: Any = chain_hash,
        fail: Any = lambda row: None,
        tokenizer: Any = None,
        eos_ids: tuple[int, ...] = (),
        vocab: int = VOCAB,
        defaults: dict[str, Any] | None = None,
        audited: bool = True,
        swap: int = 0,
        disk: int = 0,
        lose: Any = lambda move: False,
        files: Any = None,
        blind: bool = False,
        drafts: int = 0,
        ahead: bool = False,
    ) -> None:
        reach = None if None in windows else max(w for w in windows if w is not None)
        self.kv = KV(pool, block_size, windows, prefix_cache, hash, swap, disk)
        if self.kv.disk is not None and files:
            self.kv.disk.adopt(list(files))
        self.executor: Any = BlindExecutor()
        chosen = choose or prefix_hash(vocab, reach)
        if not blind:
            self.executor = CheckedExecutor(pool, block_size, chosen, windows, fail, swap, lose, files)
            self.executor.kv = self.kv
        self.clock = SimulatedClock()
        self.engine = Engine(
            self.executor,
            self.kv,
            tokenizer=tokenizer,
            eos_ids=eos_ids,
            policy=POLICIES[policy](),
            budget=TokenBudget(budget),
            max_running=max_running,
            clock=self.clock,
            audited=audited,
            drafter=Guesses(chosen, drafts) if drafts else None,
            ahead=ahead,
        )
        self.intake = Intake(
            tokenizer=tokenizer,
            vocab=vocab,
            context=context,
            longest=self.kv.longest(),
            eos_ids=eos_ids,
            defaults=defaults,
            now=self.clock.now,
            blocks=pool,
            beam_blocks=self.kv.beam_blocks,
        )
        self.events: dict[str, list[Delta | Finished]] = {}
        self.deferred = 0  # how often a sequence waited for a block that another row computed
        self.fetching = False  # whether the last decision asked for blocks from disk
        self._decide = self.engine.scheduler.decide
        self.engine.scheduler.decide = self._decided

    def _decided(self, now: float, budget: int) -> Decision:
        decision = self._decide(now, budget)
        assert decision == self._decide(now, budget), "deciding is not pure"
        rank = self.engine.scheduler.policy.rank
        for victim in decision.victims:
            # A parked beam only waits for others: it loses no place in a queue.
            assert victim.parked or all(rank(s, now) < rank(victim, now) for s in decision.admitted), (
                f"{victim} lost its place"
            )
        self.deferred += decision.deferred
        self.fetching = bool(decision.fetches)
        return decision

    def add(self, prompt: Any, max_tokens: int | None = 8, **given: Any) -> Request:
        """Submit a greedy request (unless told otherwise) and record its events."""
        outer = {k: given.pop(k) for k in ("priority", "user", "cache_salt") if k in given}
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **given})
        events: list[Delta | Finished] = []
        request = self.intake.request(list(prompt), params, sink=events.append, **outer)
        self.events[request.id] = events
        self.engine.add(request)
        return request

    def step(self) -> int:
        """One step, checked; returns how many tokens it computed."""
        scheduler = self.engine.scheduler
        rank = scheduler.policy.rank
        able = [s for s in (*scheduler.running, *scheduler.waiting) if not s.parked]
        best = min(able, key=lambda s: rank(s, self.clock.now()), default=None)
        flights = bool(self.kv.disk and self.kv.disk.flights)
        begun, planned = self.engine.flight, len(self.executor.plans)
        tokens = self.engine.step()
        self.clock.advance(1.0)
        known = (s.tokens[-1] >= 0 for s in (*scheduler.running, *scheduler.waiting) if s.tokens)
        assert all(known), "a token that nobody knows is left"
        # What was submitted by the step before knows nothing of who has come since.
        planned = planned if self.engine.ahead else -1
        plan = self.executor.plans[planned] if best is not None and begun is None else None
        if plan is not None and not flights and not self.fetching:
            assert best is not None
            assert any(row.sequence == best.number for row in plan.rows), f"{best} is the best-ranked, and not served"
            assert 0 < tokens <= self.engine.budget.tokens
            if not any(r.beams or r.keep for r in self.engine.requests.values()):  # these rest in between
                assert sum(not s.parked for s in scheduler.running) <= scheduler.max_running
        if self.engine.audited:
            check_index(self)
        for sequence in scheduler.running:
            held, filled = self.kv.slots(sequence.number, self.engine.reached(sequence))
            assert 0 <= held - filled < self.kv.block_size * self.kv.groups, f"{sequence} wastes a block"
        return tokens

    def steps(self, count: int) -> None:
        """Up to so many steps."""
        for _ in range(count):
            if self.engine.busy:
                self.step()

    def run(self, most: int = 100_000) -> int:
        """Steps until idle; returns how many."""
        steps = 0
        while self.engine.busy:
            self.step()
            steps += 1
            assert steps < most, "the engine does not come to an end"
        audit_idle(self.kv)
        return steps

    def computed(self) -> int:
        """Tokens that went through the model so far."""
        return sum(plan.tokens for plan in self.executor.plans)

    def streamed(self, request: Request, branch: int = 0) -> str:
        return "".join(e.text for e in self.events[request.id] if isinstance(e, Delta) and e.branch == branch)


def check_index(rig: Rig) -> None:
    """Every entry of the prefix cache leads to a block whose slots hold just the tokens that the entry stands for."""
    index, size = rig.kv.index, rig.kv.block_size
    depths: dict[int, int] = {id(root): 0 for root in index.roots()}
    entries = 0
    for node in index.nodes():
        chain = [node]
        while id(chain[-1]) not in depths:
            assert chain[-1].parent is not None
            chain.append(chain[-1].parent)
        for above, below in zip(chain[:0:-1], chain[-2::-1], strict=True):
            depths[id(below)] = depths[id(above)] + 1
        first = (depths[id(node)] - 1) * size
        want = [(first + i, token) for i, token in enumerate(array("i", node.tokens))]
        for block in node.blocks:
            if block >= 0:
                entries += 1
                assert rig.executor.slots[block] == want, f"block {block} does not hold what the index says"
    assert entries <= rig.kv.pool.size


def outputs(request: Request) -> list[list[int]]:
    return [list(s.output()) for s in request.branches]


def answer(request: Request) -> dict[str, Any]:
    """All that a user gets, to be compared whole: nothing of it may depend on how the request was run."""
    return {
        "tokens": outputs(request),
        "logprobs": [reader.logprobs for reader in request.readers],
        "text": [reader.text for reader in request.readers],
        "ends": [(s.finish_reason, s.stop_reason) for s in request.branches],
        "scores": request.scores,
        "error": request.error,
    }


def solo(prompt: Any, max_tokens: int | None = 8, **given: Any) -> Request:
    """The same request in an engine of its own with room to spare and caching off: the oracle."""
    windows, choose = given.pop("windows", (None,)), given.pop("choose", None)
    rig = Rig(pool=256 * len(windows), budget=4096, prefix_cache=False, windows=windows, choose=choose)
    request = rig.add(prompt, max_tokens, **given)
    rig.run()
    return request


_ALONE: dict[str, list[list[int]]] = {}


def alone(prompt: Any, max_tokens: int | None = 8, **given: Any) -> list[list[int]]:
    """The output tokens of the same request alone."""
    key = repr((list(prompt), max_tokens, sorted(given.items())))
    if key not in _ALONE:
        _ALONE[key] = outputs(solo(prompt, max_tokens, **given))
    return _ALONE[key]


def ids(length: int, seed: int = 0) -> list[int]:
    """A prompt of mixed token ids."""
    state, out = seed * 2654435761 + 12345, array("i")
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out.append((state >> 33) % VOCAB)
    return list(out)
