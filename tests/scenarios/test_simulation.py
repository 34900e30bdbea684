"""The simulation: 100,000 steps of made-up users and injected faults, each answer checked, each block recounted.

Millions of steps: ``python -m octavo.sim.run --steps 10000000``.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from octavo.core.events import Delta, Finished
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.engine.engine import Engine
from octavo.paging.draft import Draft
from octavo.paging.host import HostTier
from octavo.paging.kv import KV
from octavo.sim import run
from octavo.sim.world import Era, Tally, simulate

SEEDS = (1, 2, 3, 4)
WANTED = (
    "aborted", "beam searches", "blocks read from disk", "blocks written to disk", "cache resets", "cached tokens",
    "copies", "disk moves lost", "evictions", "failed", "finished", "forced preemptions", "preemptions", "refused",
    "rewinds", "row errors", "scored", "session forks", "session scores", "sessions", "swaps",
    "accepted tokens", "drafted tokens", "steps ahead",
)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_25000_steps(seed: int) -> None:
    """Four of these: nothing lost, nothing wrong, no step without progress; the seed in the message replays it."""
    tally = simulate(25_000, seed)
    print(f"seed {seed}: {tally}")
    assert tally.steps >= 25_000
    few = {name: tally.times.get(name, 0) for name in WANTED if tally.times.get(name, 0) < 3}
    assert not few, f"hardly ever happened: {few}"
    assert tally.times["finished"] > 1000 and tally.times["preemptions"] > 200


def test_a_seed_replays() -> None:
    first, second, other = simulate(2000, 9), simulate(2000, 9), simulate(2000, 10)
    assert (first.digest, first.times) == (second.digest, second.times)
    assert first.digest != other.digest


@pytest.mark.parametrize("kind", ["_ask", "_ask_beams", "_use_session"])
def test_an_abort_that_leaves_the_engine_idle_is_an_answer(kind: str) -> None:
    """It ends the request at once, without a step, be it the last thing that happens in an era."""
    era = Era(random.Random(5), {}, Tally(), 1)
    era._use_session()  # there is one to continue
    while not era.asked:
        getattr(era, kind)()
    (asked,) = era.asked
    heard = asked.heard
    assert era.engine.busy and heard.final is None
    era._abort(asked)
    assert not era.engine.busy and heard.final == Finished(asked.request.id)
    era._advance()
    assert era.asked == [] and era.tally.steps == 0
    assert asked.state is None or not asked.state.busy
    era.end()


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--steps", "500", "--seed", "7"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 7\n") and re.search(r"^\d+ steps: .*digest [0-9a-f]{16}$", out, re.M)
    assert run.main(["--steps", "300", "--audit-every", "10"]) == 0
    assert re.match(r"seed \d+\n", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        run.main(["--steps", "0"])


def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation that finds nothing is worth something only if it finds what is broken."""
    save = HostTier.save

    def wrong_slot(self: HostTier, block: int) -> Any:
        slot, moves = save(self, block)
        return slot, moves[:-1]  # the block's bytes are never copied

    def keeps_blocks(self: KV, number: int) -> None:
        self.forget_saved(number)
        self._keys.pop(number, None)

    def no_copy(self: KV, number: int, start: int, stop: int, count: Any) -> Any:
        return ()

    def for_nothing(self: Draft, sequence: Sequence, match: Any) -> int:
        return 0

    close, tell = Engine._close, Engine._tell

    def without_a_word(self: Engine, request: Request) -> None:
        request.sink = None
        close(self, request)

    def ends_twice(self: Engine, request: Request) -> None:
        close(self, request)
        assert request.sink is not None
        request.sink(Finished(request.id))

    def tells_twice(self: Engine, request: Request, sequence: Sequence, *rest: Any) -> None:
        tell(self, request, sequence, *rest)
        if len(sequence.output()) == 2 and request.sink is not None and sequence.finish_reason is None:
            request.sink(Delta(request.id, sequence.branch, (0,), ""))

    for owner, name, broken in (
        (Engine, "_close", without_a_word),
        (Engine, "_close", ends_twice),
        (Engine, "_tell", tells_twice),
        (HostTier, "save", wrong_slot),
        (KV, "close", keeps_blocks),
        (KV, "to_copy", no_copy),
        (Draft, "attach_cost", for_nothing),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(AssertionError, match=r"seed 1, era \d+ \(Settings"):
                simulate(12_000, 1)
