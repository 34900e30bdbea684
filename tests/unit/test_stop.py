"""Stop strings that span tokens, hide in one, or begin each other (R20, R21, R51)."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.decode.stop import StopChecker
from octavo.errors import RequestError


def run(checker: StopChecker, tokens: list[str]) -> list[str]:
    """What each token lets out, and at last what was held."""
    out = [checker.push(token, count).text for count, token in enumerate(tokens, start=1)]
    return [*out, checker.flush()]


def test_stop_over_several_tokens_leaks_no_letter() -> None:
    """R21."""
    checker = StopChecker(["DEFGHIJ"])
    assert run(checker, ["ABC", "DEF", "G", "HI", "J", "KL"]) == ["ABC", "", "", "", "", "", ""]
    assert checker.stop == "DEFGHIJ"


def test_what_only_looked_like_a_stop_arrives_whole() -> None:
    """R21: and as soon as it is certain."""
    checker = StopChecker(["DEFGHIJ"])
    assert run(checker, ["ABC", "DEF", "GX"]) == ["ABC", "", "DEFGX", ""]
    assert checker.stop is None
    assert run(StopChecker(["DEFGHIJ"]), ["ABC", "DEF"]) == ["ABC", "", "DEF"]


def test_stop_inside_one_token_drops_what_follows() -> None:
    """R21."""
    checker = StopChecker(["b"])
    assert checker.push("abc", 1) == ("a", "b")
    assert checker.push("more", 2) == ("", "b")
    assert checker.flush() == ""


@pytest.mark.parametrize("tokens", [["xabcd"], ["x", "a", "b", "c", "d"], ["xab", "cd"]])
@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["ab", "abc"], "x", "ab"),  # the shorter begins the longer: it is complete first
        (["abc", "ab"], "x", "ab"),
        (["bc", "abcd"], "xa", "bc"),  # complete first, though it began later
        (["bc", "abc"], "x", "abc"),  # complete together: the one that began first
        (["c", "d"], "xab", "c"),
    ],
)
def test_earliest_match_wins_however_tokens_cut(tokens: list[str], stops: list[str], text: str, stop: str) -> None:
    """R21."""
    checker = StopChecker(stops)
    assert "".join(run(checker, tokens)) == text
    assert checker.stop == stop


def test_stop_of_characters_with_several_bytes() -> None:
    """R21."""
    checker = StopChecker(["🏳️‍🌈!"])
    assert run(checker, ["日本🏳️", "‍🌈", "!", "z"]) == ["日本", "", "", "", ""]
    assert checker.stop == "🏳️‍🌈!"


def test_a_stop_that_repeats_its_own_beginning() -> None:
    checker = StopChecker(["aab"])
    assert run(checker, ["a", "a", "a", "b"]) == ["", "", "a", "", ""]
    assert checker.stop == "aab"


def test_stop_may_be_included() -> None:
    checker = StopChecker(["</a>"], include_stop=True)
    assert run(checker, ["x<", "/a> y"]) == ["x", "</a>", ""]
    assert checker.stop == "</a>"


def test_min_tokens_lets_early_matches_pass() -> None:
    """R20: the text of an early match is shown; the first match from there on ends the output."""
    tokens = [*"aSbbbbSc"]
    checker = StopChecker(["S"], min_tokens=5)
    assert "".join(run(checker, tokens)) == "aSbbbb"
    assert checker.stop == "S"
    checker = StopChecker(["S"], min_tokens=2)
    assert "".join(run(checker, tokens)) == "a"


def test_min_tokens_counts_where_a_match_is_complete() -> None:
    checker = StopChecker(["b", "abcd"], min_tokens=3)
    assert "".join(run(checker, ["ab", "x", "abc", "d"])) == "abxa"
    assert checker.stop == "b"
    checker = StopChecker(["STOP"], min_tokens=2)
    assert "".join(run(checker, ["xST", "OP"])) == "x"


def test_no_stops_hold_nothing_back() -> None:
    """R51: no stop strings is no stop, not an empty answer."""
    assert run(StopChecker([]), ["a", "b"]) == ["a", "b", ""]


@pytest.mark.parametrize("stops", [[""], ["a", ""], "text", [1], [None]])
def test_nonsense_is_refused_with_the_field(stops: Any) -> None:
    """R51."""
    with pytest.raises(RequestError) as error:
        StopChecker(stops)
    assert error.value.field == "stop"
