"""Text in, text out, under random cuts: detokenizer, stop strings, tokenizer round trips (R21, R23, R56)."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.decode.stop import StopChecker
from octavo.text.detokenize import Detokenizer
from octavo.text.sentencepiece import SPACE
from octavo.text.tokenizer import Tokenizer, Vocabulary
from texts import byte_level, byte_level_gguf, sentencepiece_gguf, sentencepiece_model

steady = settings(max_examples=300, deadline=None)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40) | st.text("ab \n'1é\u0301日👍🏽\u200d", max_size=40)


@cache
def tokenizer(kind: str) -> Tokenizer:
    if kind == "pieces":
        return Tokenizer.from_gguf(sentencepiece_gguf(sentencepiece_model()))
    return Tokenizer.from_gguf(byte_level_gguf(byte_level(None, single_digits=True), "smollm"))


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *sorted(min(c, len(data)) for c in cuts), len(data)]
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def of_tokens(tokens: list[bytes], strips_space: bool = False) -> Tokenizer:
    """A tokenizer whose token ``i`` adds the bytes ``tokens[i]``."""
    return Tokenizer(
        Vocabulary(len(tokens), lambda text: [], tokens.__getitem__, frozenset(), strips_space=strips_space)
    )


@steady
@given(TEXT, st.lists(st.integers(0, 120), max_size=30), st.booleans())
def test_text_cut_at_any_bytes_streams_as_the_text(text: str, cuts: list[int], strips: bool) -> None:
    tokens = of_tokens(cut(text.encode(), cuts), strips)
    detokenizer = Detokenizer(tokens)
    parts = [detokenizer.push(i) for i in range(tokens.vocab_size)]
    want = text.removeprefix(" ") if strips else text
    assert "".join(parts) == want  # nothing is left for flush
    assert detokenizer.flush() == ""
    assert tokens.decode(range(tokens.vocab_size)) == want


@steady
@given(st.lists(st.binary(max_size=5), max_size=12), st.booleans())
def test_any_bytes_stream_as_they_decode_at_once(data: list[bytes], strips: bool) -> None:
    """Broken bytes too, and text that was given is never taken back."""
    tokens = of_tokens(data, strips)
    detokenizer = Detokenizer(tokens)
    so_far = ""
    for i in range(len(data)):
        so_far += detokenizer.push(i)
        assert tokens.decode(range(i + 1)).startswith(so_far)
    assert so_far + detokenizer.flush() == tokens.decode(range(len(data)))


@steady
@given(TEXT, st.sampled_from(["bytes", "pieces"]))
def test_round_trip_and_stream_of_real_tokens(text: str, kind: str) -> None:
    ours = tokenizer(kind)
    ids = ours.encode(text)
    detokenizer = Detokenizer(ours)
    streamed = detokenizer.push_all(ids) + detokenizer.flush()
    assert streamed == ours.decode(ids)
    if kind == "bytes":
        assert streamed == text
    elif not any(token in text for token in ("<s>", "</s>", "<unk>")):
        assert streamed == text.replace(SPACE, " ")


@steady
@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 30), max_size=8),
    st.integers(0, 9),
    st.booleans(),
)
def test_stop_checker_equals_a_search_in_the_whole_text(
    text: str, stops: list[str], cuts: list[int], min_tokens: int, include: bool
) -> None:
    tokens = [part.decode() for part in cut(text.encode(), cuts)]
    found = earliest(text, tokens, stops, min_tokens)
    start, stop = found or (len(text), None)
    want = text[: start + len(stop or "")] if include else text[:start]
    checker = StopChecker(stops, min_tokens, include)
    shown = ""
    for count, token in enumerate(tokens, start=1):
        shown += checker.push(token, count).text
        assert want.startswith(shown)  # no letter of the stop, ever
    assert (shown + checker.flush(), checker.stop) == (want, stop)


def earliest(text: str, tokens: list[str], stops: list[str], min_tokens: int) -> tuple[int, str] | None:
    """Where the first stop string begins that counts, by trying every end from the left and the longest first."""
    owner = [count for count, token in enumerate(tokens, start=1) for _ in token]
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop) and owner[end - 1] >= min_tokens:
                return end - len(stop), stop
    return None
