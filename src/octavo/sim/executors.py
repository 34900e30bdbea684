"""Executors that compute no model but check everything that a real one would read."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from octavo.core.plan import (
    DEVICE,
    DISK,
    HOST,
    Draw,
    Move,
    Plan,
    Row,
    RowResult,
    StepResult,
    TokenLogprobs,
    drawn,
    filled,
    waits,
)

Next = Callable[[Sequence[int], Draw], int]


def mixed(prefix: Sequence[int], salt: int = 0) -> int:
    """A 64-bit mix of a whole prefix: any token read wrong changes it."""
    h = 0xCBF29CE484222325 ^ salt
    for token in prefix:
        h = ((h ^ (token & 0xFFFFFFFF)) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
        h ^= h >> 29
    return h


def _allowed(draw: Draw) -> Callable[[int], bool]:
    banned = {t for t, b in draw.bias if b == float("-inf")}
    if draw.mask is None:
        return lambda token: token not in banned
    bits = draw.mask.bits()
    return lambda token: token not in banned and token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)


def prefix_hash(vocab: int, reach: int | None = None) -> Next:
    """A next token that depends on every token of the prefix (the last ``reach`` ones, where windows forget the rest),
    and on seed and branch when not greedy."""

    def choose(prefix: Sequence[int], draw: Draw) -> int:
        salt = 0 if draw.temperature == 0 else mixed((draw.seed & 0x7FFFFFFF, draw.branch))
        allowed = _allowed(draw)
        token = mixed(prefix[-reach:] if reach else prefix, salt) % vocab
        while not allowed(token):
            token = (token + 1) % vocab
        return token

    return choose


def script(answers: Mapping[tuple[int, ...], Sequence[int]], end: int = 0) -> Next:
    """Next tokens read from a script for each prompt; ``end`` when it has run out.

    A banned token (``min_tokens`` holding back an end, say) is passed over for the next one of the script.
    """

    def choose(prefix: Sequence[int], draw: Draw) -> int:
        key = tuple(prefix)
        for prompt, answer in answers.items():
            n = len(prompt)
            if key[:n] == prompt:
                allowed = _allowed(draw)
                rest = [t for t in answer[len(key) - n :] if allowed(t)]
                return rest[0] if rest else end
        raise KeyError(f"no script for a prompt that begins {key[:8]}")

    return choose


def logprobs_of(prefix: Sequence[int], token: int, best: int) -> TokenLogprobs:
    """Made up, but a function of the whole prefix; the token itself is the best one."""
    value = -(mixed(prefix) % 1000) / 100
    return TokenLogprobs(token, value, 1, tuple((token + i, value - i) for i in range(best)))


class ScriptedExecutor:
    """Owns: the token ids that "K and V" hold, slot by slot, in place of bytes.

    ``slots[block][slot]`` is the (position, token) written there last, or None; ``host`` the same of the host tier.

    Promises: a row reads its prefix out of the blocks that its tables name, and fails if a slot was never written or
    if layer groups disagree, so that wrong tables, early publishing and lost copies show as errors.
    """

    ahead = False

    def __init__(
        self,
        blocks: int,
        block_size: int,
        choose: Next,
        windows: Sequence[int | None] = (None,),
        fail: Callable[[Row], str | None] = lambda row: None,
        host_slots: int = 0,
        lose: Callable[[Move], bool] = lambda move: False,
        disk: dict[str, tuple[bytes, list[tuple[int, int] | None]]] | None = None,
    ) -> None:
        self.block_size = block_size
        self.windows = tuple(windows)
        self._choose = choose
        self._fail = fail
        self.slots: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(blocks)]
        self.host: list[list[tuple[int, int] | None]] = [[None] * block_size for _ in range(host_slots)]
        self.disk = {} if disk is None else disk
        self._lose = lose  # whether a move to or from disk fails
        self._slow: list[tuple[Move, list[tuple[int, int] | None] | None]] = []
        self.plans: list[Plan] = []
        self._drawn: list[int] = []  # by the latest plan

    def submit(self, plan: Plan) -> StepResult:
        return self.run(plan)

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket

    def run(self, plan: Plan) -> StepResult:
        self.plans.append(plan)
        if waits(plan.rows):
            plan = replace(plan, rows=filled(plan.rows, self._drawn))
        for move in plan.moves:
            self._move(move)
        moved = self._slow_ones(plan)
        written: dict[tuple[int, int], int] = {}
        for row in plan.rows:
            self._write(row, written)
        rows = tuple(self._row(row) for row in plan.rows)
        self._drawn = drawn(plan.rows, rows)
        return StepResult(plan.step, rows, moved)

    def flush(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._move(move)

    def close(self) -> None:
        self.slots = []

    def _move(self, move: Move) -> None:
        if move.target.tier == DISK:
            source = self.slots if move.source.tier == DEVICE else self.host
            self._slow.append((move, list(source[move.source.slot])))
            return
        if move.source.tier == DISK:
            self._slow.append((move, None))
            return
        tiers = {DEVICE: self.slots, HOST: self.host}
        tiers[move.target.tier][move.target.slot] = list(tiers[move.source.tier][move.source.slot])

    def _slow_ones(self, plan: Plan) -> tuple[tuple[Move, bool], ...]:
        """Ends some of the moves to and from disk, oldest first; all of them when there is nothing else to do."""
        ended = []
        while self._slow and (not plan.rows or self._slow[0][0] not in plan.moves):
            move, block = self._slow.pop(0)
            ok = not self._lose(move)
            if block is None:
                found = self.disk.get(move.name)
                ok = ok and found is not None and found[0] == move.label
                if ok and found is not None:
                    self.host[move.target.slot] = list(found[1])
            elif ok:
                self.disk[move.name] = (move.label, block)
            ended.append((move, ok))
        return tuple(ended)

    def _write(self, row: Row, written: dict[tuple[int, int], int]) -> None:
        for table in row.tables:
            for i, token in enumerate(row.tokens):
                position = row.start + i
                block, slot = table[position // self.block_size], position % self.block_size
                if written.setdefault((block, slot), row.sequence) != row.sequence:
                    raise AssertionError(f"two rows of step write slot {slot} of block {block}")
                self.slots[block][slot] = (position, token)

    def _row(self, row: Row) -> RowResult:
        error = self._fail(row)
        if error:
            return RowResult(error=error)
        last = row.start + len(row.tokens) - 1
        # All draws are from the last token, or one each from the token before the drafts and from every draft.
        places = range(last - row.drafts, last + 1) if row.drafts else [last] * len(row.draws)
        prefixes = {at: self._prefix(row, at) for at in places}
        tokens = tuple(self._choose(prefixes[at], draw) for at, draw in zip(places, row.draws, strict=True))
        logprobs = tuple(
            logprobs_of(prefixes[at], token, draw.logprobs) if draw.logprobs >= 0 else None
            for at, token, draw in zip(places, tokens, row.draws, strict=True)
        )
        scores = tuple(
            logprobs_of(self._prefix(row, row.start + i), token, row.score) for i, token in enumerate(row.targets)
        )
        return RowResult(tokens, logprobs, scores)

    def _prefix(self, row: Row, last: int) -> Sequence[int]:
        """Tokens 0..last as the blocks hold them; -1 where every group's window has slid on."""
        found: array[int] = array("i")
        for position in range(last + 1):
            values = []
            for window, table in zip(self.windows, row.tables, strict=True):
                if window is not None and position <= last - window:
                    continue
                block = table[position // self.block_size]
                if block < 0:
                    raise AssertionError(f"sequence {row.sequence}: position {position} is needed but freed")
                values.append(self.slots[block][position % self.block_size])
            if not values:
                found.append(-1)
                continue
            if values[0] is None or any(v != values[0] for v in values) or values[0][0] != position:
                raise AssertionError(f"sequence {row.sequence}: position {position} holds {values}")
            found.append(values[0][1])
        return found
