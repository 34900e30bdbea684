"""Every verb of KV against an oracle, with ``audit`` after each operation (see kv_machine.py).

Hypothesis draws short histories and shrinks what fails; the long random walks reach states that take many operations.
A million operations: ``python tests/property/kv_machine.py --operations 1000000``.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from kv_machine import SETUPS, Machine, Setup, drive

NUMBER = st.integers(0, 15)
TOKENS = st.integers(0, 8)


class KVMachine(RuleBasedStateMachine):
    """Hypothesis draws the operations; the machine checks each."""

    machine: Machine

    @initialize(setup=st.sampled_from(SETUPS))
    def begin(self, setup: Setup) -> None:
        self.machine = Machine(setup)

    @rule(family=st.integers(0, 2), length=st.integers(0, 30), twist=st.integers(0, 2), salt=st.integers(0, 1))
    def arrive(self, family: int, length: int, twist: int, salt: int) -> None:
        self.machine.arrive(family, length, twist, salt)

    @rule(which=NUMBER)
    def admit(self, which: int) -> None:
        self.machine.admit(which)

    @rule(which=NUMBER)
    def rematch(self, which: int) -> None:
        self.machine.rematch(which)

    @rule(which=NUMBER, count=st.integers(0, 12))
    def compute(self, which: int, count: int) -> None:
        self.machine.compute(which, count)

    @rule(which=NUMBER, back=st.integers(0, 8))
    def rewrite(self, which: int, back: int) -> None:
        self.machine.rewrite(which, back)

    @rule(which=NUMBER)
    def publish(self, which: int) -> None:
        self.machine.publish(which)

    @rule(which=NUMBER)
    def slide(self, which: int) -> None:
        self.machine.slide(which)

    @rule(which=NUMBER, count=st.integers(0, 12))
    def draft(self, which: int, count: int) -> None:
        self.machine.draft(which, count)

    @rule(which=NUMBER, token=TOKENS)
    def append(self, which: int, token: int) -> None:
        self.machine.append(which, token)

    @rule(which=NUMBER, tokens=TOKENS)
    def fork(self, which: int, tokens: int) -> None:
        self.machine.fork(which, tokens)

    @rule(which=NUMBER, loser=NUMBER, tokens=TOKENS)
    def replace(self, which: int, loser: int, tokens: int) -> None:
        self.machine.replace(which, loser, tokens)

    @rule(which=NUMBER)
    def preempt(self, which: int) -> None:
        self.machine.preempt(which)

    @rule(which=NUMBER)
    def close(self, which: int) -> None:
        self.machine.close(which)

    @rule()
    def reset(self) -> None:
        self.machine.reset()

    @rule(seed=st.integers(0, 2**16))
    def step(self, seed: int) -> None:
        self.machine.step(seed)

    def teardown(self) -> None:
        if hasattr(self, "machine"):
            self.machine.finish()


TestKV = KVMachine.TestCase
TestKV.settings = settings(
    max_examples=120,
    stateful_step_count=80,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("number", range(len(SETUPS)))
def test_long_walks(number: int) -> None:
    """3,000 operations on each kind of pool, in which everything that can happen does happen."""
    seen: dict[str, int] = {}
    for seed in range(3):
        machine = Machine(SETUPS[number])
        drive(machine, 1000, random.Random(f"{number}/{seed}"))
        machine.finish()
        for what, times in machine.seen.items():
            seen[what] = seen.get(what, 0) + times
    wanted = {"copy", "no room", "preempted in a step", "drafted"}
    if SETUPS[number].prefix_cache:
        wanted |= {"hit", "eviction", "hit in a step"}
    assert wanted <= seen.keys(), f"never happened: {wanted - seen.keys()}"
