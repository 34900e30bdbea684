"""The token budget of a step: fixed, or following measured steps slowly and in powers of two."""

from __future__ import annotations

import pytest

from octavo.schedule.budget import FIRST, HIGHEST, LOWEST, TokenBudget


def test_a_fixed_budget_never_changes() -> None:
    told: list[str] = []
    budget = TokenBudget(7, report=told.append)
    for _ in range(20):
        budget.measured(7, 1e-6)
        budget.measured(7, 1e6)
    assert budget.tokens == 7 and not told


@pytest.mark.parametrize("rate", [10.0, 900.0, 3000.0, 15_000.0, 1e9])
def test_it_settles_near_the_target(rate: float) -> None:
    """On a machine of a steady speed the step takes about the target time, and then nothing changes any more."""
    told: list[str] = []
    budget = TokenBudget(target=0.2, report=told.append)
    assert budget.tokens == FIRST
    for _ in range(30):
        budget.measured(budget.tokens, budget.tokens / rate)
    settled, changes = budget.tokens, len(told)
    for _ in range(30):
        budget.measured(budget.tokens, budget.tokens / rate)
    assert budget.tokens == settled and len(told) == changes
    wanted = min(HIGHEST, max(LOWEST, rate * 0.2))
    assert wanted / 2.2 <= settled <= wanted / 0.7 and settled & (settled - 1) == 0
    assert all(str(round(rate)) in line or "tokens/s" in line for line in told)
    assert (changes > 0) == (settled != FIRST)


def test_noise_does_not_make_it_swing() -> None:
    budget = TokenBudget(target=0.2)
    seen = set()
    for i in range(100):
        budget.measured(512, 512 / (2560 * (1.25 if i % 2 else 0.8)))
        seen.add(budget.tokens)
    assert seen == {512}


def test_small_or_impossible_measurements_say_nothing() -> None:
    budget = TokenBudget()
    for tokens, seconds in ((1, 10.0), (LOWEST - 1, 10.0), (512, 0.0), (512, -1.0), (0, 0.0)):
        budget.measured(tokens, seconds)
    assert budget.tokens == FIRST and budget.rate == 0


def test_a_slower_machine_is_noticed() -> None:
    budget = TokenBudget(target=0.2)
    for _ in range(10):
        budget.measured(budget.tokens, budget.tokens / 20_000)
    fast = budget.tokens
    for _ in range(40):
        budget.measured(budget.tokens, budget.tokens / 1000)
    assert fast == 2048 and 128 <= budget.tokens <= 256


def test_a_chosen_budget_leaves_room_for_every_decode() -> None:
    """However slow the machine, running decodes do not take turns for the sake of a prompt's chunk."""
    budget = TokenBudget()
    for _ in range(50):
        budget.measured(512, 100.0)
    assert budget.tokens == 64
    assert budget.step(300) == 364
    assert TokenBudget(16).step(300) == 16
