"""The simulation: 100,000 steps of made-up users and injected faults, each answer checked, each block recounted.

Millions of steps: ``python -m octavo.sim.run --steps 10000000``.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from octavo.core.sequence import Sequence
from octavo.paging.draft import Draft
from octavo.paging.host import HostTier
from octavo.paging.kv import KV
from octavo.sim import run
from octavo.sim.world import simulate

SEEDS = (1, 2, 3, 4)
WANTED = (
    "aborted", "accepted tokens", "beam searches", "blocks read from disk", "blocks written to disk", "cache resets",
    "cached tokens", "copies", "disk moves lost", "drafted tokens", "evictions", "failed", "finished",
    "forced preemptions", "preemptions", "refused", "rewinds", "row errors", "session forks", "sessions", "swaps",
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

    for owner, name, broken in (
        (HostTier, "save", wrong_slot),
        (KV, "close", keeps_blocks),
        (KV, "to_copy", no_copy),
        (Draft, "attach_cost", for_nothing),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with pytest.raises(AssertionError, match=r"seed 1, era \d+ \(Settings"):
                simulate(12_000, 1)
