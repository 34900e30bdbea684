"""SentencePiece BPE, run straight from pieces and scores, as GGUF files and ``tokenizer.model`` carry them.

A list of merges is what a JSON tokenizer needs; making one for Gemma's 262,144 pieces takes seconds at every start.
Scores say the same (Kudo and Richardson 2018, section 3.1): of all neighbours whose concatenation is a piece, the pair
with the best score is joined first.  So nothing is built here beyond one dict, and loading is a matter of 0.1 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Any

from octavo.errors import ModelError

SPACE = "\u2581"  # the visible block that stands for a space inside pieces

# Piece types, the same numbers in GGUF's tokenizer.ggml.token_type and in SentencePiece's own file.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece vocabulary as data; ``tokens[i]`` has score ``scores[i]`` and type ``types[i]``."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    add_space_prefix: bool = True
    remove_extra_whitespaces: bool = False


class AddedTokens:
    """Owns the tokens that are cut out of raw text before anything else (control and user-defined ones).

    Promises: leftmost match, the longest at one place, in time linear in the text however many tokens there are.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = dict(ids)
        lengths: dict[str, set[int]] = {}
        for token in self._ids:
            lengths.setdefault(token[0], set()).add(len(token))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        firsts = "".join(re.escape(first) for first in self._lengths)
        self._first = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterable[str | int]:
        """Yields pieces of text (never empty) and ids of added tokens, in order."""
        start = at = 0
        while self._first is not None and (match := self._first.search(text, at)):
            at = match.start()
            for length in self._lengths[match.group()]:
                found = self._ids.get(text[at : at + length])
                if found is not None:
                    if start < at:
                        yield text[start:at]
                    yield found
                    start = at = at + length
                    break
            else:
                at += 1
        if start < len(text):
            yield text[start:]


class SentencePieceBPE:
    """Owns one vocabulary's pieces.

    Promises: the ids that the original tokenizer gives as Hugging Face runs it: control and user-defined tokens are
    recognised in the text, every other stretch is normalised, cut into characters and joined by score.
    """

    def __init__(self, pieces: Pieces) -> None:
        tokens, types = pieces.tokens, pieces.types
        self._prefix = pieces.add_space_prefix
        self._squeeze = pieces.remove_extra_whitespaces
        self._ids: dict[str, int] = dict(zip(tokens, range(len(tokens)), strict=True))
        self._scores = list(pieces.scores)
        self.bytes_of: dict[int, bytes] = {}
        self.special: set[int] = set()
        self.unk_id: int | None = None
        added: dict[str, int] = {}
        for i in [i for i, kind in enumerate(types) if kind != NORMAL]:
            token, kind = tokens[i], types[i]
            if kind == BYTE or (kind == UNUSED and _BYTE_PIECE.match(token)):
                self._take_byte(i, token)
            elif kind == USER_DEFINED and token and not token.replace(SPACE, " ").strip(" "):
                # Runs of spaces reach the text as SPACE, after the normaliser, so they are joined, not looked up: the
                # scores in files are placeholders, and a run has to form before any word may take its last space.
                run = token.replace(" ", SPACE)
                self._rename(i, token, run)
                added.setdefault(run, i)  # the block itself, written out by a user, is a token of its own
                self._scores[i] = float("inf")
            elif kind in (CONTROL, USER_DEFINED, UNKNOWN):
                if token:
                    added.setdefault(token, i)
                if kind != USER_DEFINED:
                    self.special.add(i)
                if kind == UNKNOWN:
                    self.unk_id = i
                self._ids.pop(token, None)
            else:
                self._ids.pop(token, None)  # unused: never formed
        self._added = AddedTokens(added)
        self._byte_ids = [-1] * 256
        for i, raw in self.bytes_of.items():
            self._byte_ids[raw[0]] = i
        self._byte_fallback = min(self._byte_ids) >= 0
        self._words = self._word_pattern()
        self._short = lru_cache(maxsize=16384)(self._join)

    def _take_byte(self, i: int, token: str) -> None:
        match = _BYTE_PIECE.match(token)
        if match is None:
            raise ModelError(f"tokenizer: token {i} is typed as a byte but is written {token!r}, not <0xNN>.")
        self.bytes_of[i] = bytes([int(match.group(1), 16)])
        self._ids.pop(token, None)  # reached through its byte only, not by spelling "<0xNN>"

    def _rename(self, i: int, old: str, new: str) -> None:
        if old != new:
            self._ids.pop(old, None)
            self._ids[new] = i

    def _word_pattern(self) -> re.Pattern[str]:
        """Where text may be cut without changing a join: before a space whose left neighbour no piece joins to it."""
        joined = set(re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(self._ids)))
        kept = "".join(re.escape(char) for char in sorted(joined))
        return re.compile(f"(?={SPACE})(?<=[^{SPACE}{kept}])")

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, with special tokens that are spelled in it recognised, without BOS or EOS."""
        out: list[int] = []
        for part in self._added.split(text):
            if isinstance(part, int):
                out.append(part)
            else:
                self._encode_plain(part, out)
        return out

    def _encode_plain(self, text: str, out: list[int]) -> None:
        if self._squeeze:
            text = re.sub(" {2,}", " ", text.lstrip(" "))
        text = text.replace(" ", SPACE)
        if self._prefix and text:
            text = SPACE + text
        if self._squeeze:
            text = text.rstrip(SPACE)
        if not text:
            return
        before = len(out)
        for word in self._words.split(text):
            ids = self._short(word) if len(word) <= 32 else self._join(word)
            if ids[0] == self.unk_id and len(out) > before and out[-1] == self.unk_id:
                ids = ids[1:]  # neighbouring unknowns are one, also across words
            out.extend(ids)

    def _join(self, word: str) -> tuple[int, ...]:
        """Joins neighbours, the best score first; of equal scores the longer left part, then the leftmost pair.

        The second rule is how Hugging Face's merges order the several ways to split one piece.  ``parts`` is a linked
        list: a part that was swallowed by its left neighbour is "", and ``after[i]``, ``before[i]`` skip it.
        """
        ids, scores = self._ids, self._scores
        if word in ids and len(word) == 1:
            return (ids[word],)
        parts = list(word)
        end = len(parts)
        after, before = list(range(1, end + 1)), list(range(-1, end - 1))
        heap: list[tuple[float, int, int, int, int]] = []

        def offer(left: int, right: int) -> tuple[float, int, int, int, int] | None:
            found = ids.get(parts[left] + parts[right])
            if found is None:
                return None
            return (-scores[found], -len(parts[left]), -len(parts[right]), left, right)

        heap = [pair for i in range(end - 1) if (pair := offer(i, i + 1))]
        heapify(heap)
        while heap:
            _, left_size, right_size, left, right = heappop(heap)
            # A pair is stale once either side has grown or is gone.
            if len(parts[left]) != -left_size or len(parts[right]) != -right_size or after[left] != right:
                continue
            parts[left] += parts[right]
            parts[right] = ""
            follower = after[left] = after[right]
            if follower < end:
                before[follower] = left
                if pair := offer(left, follower):
                    heappush(heap, pair)
            if before[left] >= 0 and (pair := offer(before[left], left)):
                heappush(heap, pair)
        return tuple(self._ids_of(part for part in parts if part))

    def _ids_of(self, parts: Iterable[str]) -> Iterable[int]:
        """A part without a piece (a single character) becomes its UTF-8 bytes, or one unknown for a whole run."""
        last = -1
        for part in parts:
            found = self._ids.get(part)
            if found is not None:
                last = found
                yield found
            elif self._byte_fallback:
                last = -1
                for byte in part.encode("utf-8", "surrogatepass"):
                    yield self._byte_ids[byte]
            elif self.unk_id is not None and last != self.unk_id:
                last = self.unk_id
                yield self.unk_id


def read_model_file(data: bytes, name: str) -> tuple[Pieces, dict[str, int]]:
    """Reads SentencePiece's ``tokenizer.model`` (a protobuf): its pieces, and the ids named unk, bos, eos and pad.

    Raises ``ModelError`` naming the file when it is cut off, or of another kind than BPE.
    """
    tokens: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _fields(data):
            if field == 1:
                piece = dict(_fields(value))
                tokens.append(piece.get(1, b"").decode("utf-8"))
                scores.append(_float(piece.get(2, b"\0\0\0\0")))
                types.append(piece.get(3, NORMAL))
            elif field == 2:
                trainer = dict(_fields(value))
            elif field == 3:
                normalizer = dict(_fields(value))
    except (IndexError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{name}: not a readable SentencePiece model ({error}); get the file again.") from None
    if not tokens:
        raise ModelError(f"{name}: holds no SentencePiece pieces; get the file again.")
    kind = trainer.get(3, 1)
    if kind != 2:
        names = {1: "unigram", 3: "word", 4: "char"}
        raise ModelError(f"{name}: is a SentencePiece model of type {names.get(kind, kind)}; only BPE is supported.")
    if normalizer.get(1, b"") not in (b"", b"identity") and normalizer.get(2):
        rule = normalizer[1].decode("utf-8", "replace")
        raise ModelError(f"{name}: normalises text by the rule {rule!r}; only identity is supported.")
    pieces = Pieces(tokens, scores, types, bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1)))
    # Defaults of trainer_spec: unk 0, bos 1, eos 2, pad -1 (none); negative numbers come as 64-bit two's complement.
    ids = {"unk": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2), "pad": trainer.get(43, -1)}
    return pieces, {name: i for name, i in ids.items() if 0 <= i < len(tokens)}


def _fields(data: bytes) -> Iterable[tuple[int, Any]]:
    """The (field number, value) pairs of one protobuf message; length-delimited and fixed values stay bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + size > len(data):
            raise ValueError("cut off")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if shift > 63:
            raise ValueError(f"number too long at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _float(raw: bytes) -> float:
    from struct import unpack

    (value,) = unpack("<f", raw)
    return float(value)
