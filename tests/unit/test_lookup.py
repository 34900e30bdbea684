"""Prompt lookup: where drafts come from, how many are made, and when none are."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence as Run

import pytest

from octavo.core.params import SamplingParams
from octavo.core.sequence import Sequence
from octavo.decode.lookup import COST, LEVELS, SIZES, Lookup, PromptLookup

RUN = list(range(100, 140))


def sequence(tokens: Run[int], prompt: int | None = None, number: int = 1) -> Sequence:
    params = SamplingParams(max_tokens=9)
    return Sequence(number, number, 0, array("i", tokens), prompt or len(tokens), params, 10_000)


def played(prompt: Run[int], answer: Run[int], most: int = 8, rows: int = 1) -> tuple[int, int, int]:
    """An answer that comes whatever is drafted: (steps, drafts, right ones)."""
    lookup, going = PromptLookup(most), sequence(prompt)
    left = list(answer)
    steps = drafted = right = 0
    while left:
        drafts = lookup.drafts(going, len(left) - 1, rows) if len(going.tokens) > len(prompt) else array("i")
        good = next((i for i, d in enumerate(drafts) if d != left[i]), len(drafts))
        going.tokens.extend(left[: good + 1])
        del left[: good + 1]
        steps, drafted, right = steps + 1, drafted + len(drafts), right + good
    return steps, drafted, right


def test_what_followed_before_is_drafted() -> None:
    lookup = PromptLookup(4)
    assert lookup.drafts(sequence([*RUN, 1, 2, *RUN[5:25]], 42), 9, 1).tolist() == RUN[25:29]
    assert lookup.drafts(sequence([*RUN, 1, 2, 3], 41, 2), 9, 1).tolist() == []


def test_the_longest_run_counts_then_the_latest() -> None:
    """1 2 3 4 came before 50; 2 3 4 came before 60 later on: four tokens say more than three."""
    early, late = [1, 2, 3, 4, 50, 51], [9, 2, 3, 4, 60, 61]
    assert Lookup_of([*early, *late, 7, 1, 2, 3, 4]).drafts(array("i"), 1, 0.0).tolist() == [50]
    assert Lookup_of([*early, *late, 7, 8, 2, 3, 4]).drafts(array("i"), 1, 0.0).tolist() == [60]
    assert Lookup_of([*early, 5, 1, 2, 3, 4, 70, 7, 1, 2, 3, 4]).drafts(array("i"), 1, 0.0).tolist() == [70]


class Lookup_of:
    """A lookup that has read tokens, and drafts behind them."""

    def __init__(self, tokens: Run[int], prompt: int | None = None) -> None:
        self.tokens = array("i", tokens)
        self.lookup = Lookup()
        self.lookup.read(self.tokens, len(tokens) if prompt is None else prompt)

    def drafts(self, more: array[int], most: int, floor: float) -> array[int]:
        self.tokens.extend(more)
        self.lookup.read(self.tokens, 0)
        return self.lookup.drafts(self.tokens, most, floor)


def test_a_text_that_repeats_its_own_end_goes_on_repeating() -> None:
    """What was found ends where the drafts begin: they are read on themselves."""
    found = Lookup_of([9, *([1, 2, 3] * 9)]).drafts(array("i"), 10, 0.0)
    assert found.tolist() == [1, 2, 3, 1, 2, 3, 1, 2, 3, 1]


def test_reading_in_pieces_is_reading_at_once() -> None:
    """Drafts do not depend on how often was asked, as long as the tokens are the same."""
    rng = random.Random(3)
    for _ in range(200):
        prompt = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        answer = [rng.randrange(4) for _ in range(rng.randint(1, 30))]
        whole, pieces = Lookup(), Lookup()
        tokens = array("i", prompt)
        for token in answer:
            if rng.random() < 0.5:
                pieces.read(tokens, len(prompt))
            tokens.append(token)
        whole.read(tokens, len(prompt))
        pieces.read(tokens, len(prompt))
        assert whole.drafts(tokens, 9, 0.05) == pieces.drafts(tokens, 9, 0.05)
        assert whole._chances == pieces._chances and whole._seen == pieces._seen


def test_a_copied_prompt_takes_few_steps() -> None:
    prompt = [random.Random(1).randrange(5000) for _ in range(300)]
    steps, drafted, right = played(prompt, prompt[40:240])
    assert steps < 200 / 4 and right > 0.95 * drafted


def test_an_edited_prompt_takes_few_steps() -> None:
    """Every 15th token is another one."""
    rng = random.Random(2)
    prompt = [rng.randrange(5000) for _ in range(300)]
    answer = [rng.randrange(5000) if i % 15 == 14 else token for i, token in enumerate(prompt)]
    steps, drafted, right = played(prompt, answer)
    cost = steps + COST * drafted
    assert cost < 300 / 1.5


@pytest.mark.parametrize("words", [8, 40, 400, 40_000])
def test_what_does_not_repeat_is_soon_left_alone(words: int) -> None:
    """Random tokens of a small vocabulary, where short runs are found again all the time and mean nothing."""
    rng = random.Random(words)
    prompt, answer = ([rng.randrange(words) for _ in range(n)] for n in (500, 600))
    steps, drafted, _ = played(prompt, answer)
    assert steps + COST * drafted < 1.03 * len(answer), f"{steps} steps, {drafted} drafts"


def test_it_comes_back_when_text_begins_to_repeat() -> None:
    """No drafts have to be wasted to find that out: what they would have been is compared all along."""
    rng = random.Random(5)
    prompt = [rng.randrange(9) for _ in range(200)] + [1000 + i for i in range(200)]
    rambling = [rng.randrange(9) for _ in range(300)]
    steps, drafted, right = played(prompt, rambling + prompt[200:])
    assert steps < 300 + 200 / 3 and right > 150 and drafted - right < 30


def test_more_rows_want_better_chances() -> None:
    """A token more costs the same in a step of four rows, but a row's share of that step is smaller."""
    text = sequence([*RUN, 1, 2, *RUN[:20]], 42)
    counts = [len(PromptLookup(64, few=100).drafts(text, 64, rows)) for rows in (1, 2, 4, 16, 100)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2] > counts[-1]
    assert len(PromptLookup(64).drafts(text, 64, 5)) == 0, "five rows are more than a few"


def test_most_is_kept() -> None:
    text = sequence([*RUN, 1, 2, *RUN[:20]], 42)
    assert [len(PromptLookup(k).drafts(text, most, 1)) for k, most in ((3, 9), (9, 3), (1, 1))] == [3, 3, 1]


def test_forgotten_is_forgotten() -> None:
    lookup = PromptLookup(4)
    lookup.drafts(sequence([*RUN, *RUN[:9]], 40), 9, 1)
    lookup.forget(1)
    lookup.forget(2)
    assert not lookup._lookups
    assert lookup.drafts(sequence([1, 2, 3], 2), 9, 1).tolist() == []


def test_a_token_takes_constant_time() -> None:
    """8,000 tokens of one letter and of noise are read in well under a second, and then a token in microseconds."""
    for tokens in ([7] * 8000, [random.Random(1).randrange(9) for _ in range(8000)]):
        lookup, going = PromptLookup(8), sequence(tokens)
        began = time.perf_counter()
        lookup.drafts(going, 8, 1)
        assert time.perf_counter() - began < 1.0
        began = time.perf_counter()
        for i in range(1000):
            going.tokens.append(i)
            lookup.drafts(going, 8, 1)
        assert time.perf_counter() - began < 0.5


def test_levels_are_in_order() -> None:
    lengths = [length for length, _ in LEVELS]
    assert lengths == sorted(lengths) and lengths[0] == min(SIZES) and list(SIZES) == sorted(SIZES, reverse=True)
