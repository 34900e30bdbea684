"""Why a prompt missed the prefix cache: what cached tokens a request had, and what ended the hit."""

from __future__ import annotations

from engines import Rig, ids

PROMPT = ids(40, 1)


def test_a_whole_hit_has_nothing_to_explain() -> None:
    rig = Rig(pool=64, budget=64)
    rig.add(PROMPT)
    rig.run()
    again = rig.add(PROMPT)
    rig.run()
    assert (again.cached, again.miss) == (36, "")


def test_the_first_token_that_differs_is_named() -> None:
    rig = Rig(pool=64, budget=64)
    first = rig.add(PROMPT)
    rig.run()
    assert first.miss == "differs at token 0"
    other = [*PROMPT[:22], (PROMPT[22] + 1) % 97, *PROMPT[23:]]
    second = rig.add(other)
    rig.run()
    assert (second.cached, second.miss) == (20, "differs at token 22")


def test_another_salt_is_named() -> None:
    rig = Rig(pool=64, budget=64)
    rig.add(PROMPT, cache_salt="a")
    rig.run()
    other = rig.add(PROMPT, cache_salt="b")
    rig.run()
    assert (other.cached, other.miss) == (0, "salt")


def test_eviction_is_named() -> None:
    rig = Rig(pool=14, budget=64)
    rig.add(PROMPT, 4)
    rig.run()
    rig.add(ids(44, 9), 4)
    rig.run()
    again = rig.add(PROMPT, 4)
    rig.run()
    assert again.cached < 36 and again.miss == "evicted"


def test_scoring_takes_no_hit_and_says_so() -> None:
    rig = Rig(pool=64, budget=64)
    rig.add(PROMPT)
    rig.run()
    scored = rig.add(PROMPT, prompt_logprobs=0)
    rig.run()
    assert (scored.cached, scored.miss) == (0, "off")
