"""Byte-level BPE rebuilt from GGUF metadata, through the ``tokenizers`` library.

GGUF keeps the vocabulary and the merges, but of the rules that cut text before the merges only a name
(``tokenizer.ggml.pre``).  The table below holds the names whose rules are known to equal the original
``tokenizer.json``; any other name is refused, because a near miss gives other ids and nobody notices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, USER_DEFINED

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into the words that merges stay inside of.

    ``pattern``: a regular expression whose matches are words; ``None``: GPT-2's.  ``single_digits``: every numeric
    character is a word, before anything else.  ``nfc``: text is composed first.  ``ignore_merges``: a word that is a
    token as it stands is that token, even where the merges would not reach it.  ``add_bos``: what holds where the
    file doesn't say.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(
    pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}", ignore_merges=True, add_bos=True
)
_QWEN2 = PreTokenizer(pattern=rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SYMBOLS_AND_SPACE}", nfc=True)
_TEKKEN = PreTokenizer(
    pattern=(
        rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    ignore_merges=True,
    add_bos=True,
)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "tekken": _TEKKEN,
}


def pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The rules that ``tokenizer.ggml.pre`` names; files from before that key are told by their architecture."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        name = "qwen2" if str(metadata.get("general.architecture", "")).startswith("qwen") else "default"
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"tokenizer.ggml.pre: the pre-tokenizer {name!r} is not supported; known are {known}.")
    return PRE_TOKENIZERS[name]


def build(tokens: Sequence[str], types: Sequence[int], merges: Sequence[str], rules: PreTokenizer) -> HFTokenizer:
    """A ``tokenizers.Tokenizer`` of these tokens: no BOS, special tokens (control, user-defined) recognised in text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    pairs = [_pair(i, merge) for i, merge in enumerate(merges)]
    try:
        model = models.BPE(vocab=vocab, merges=pairs, ignore_merges=rules.ignore_merges)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"tokenizer.ggml.merges: do not fit tokenizer.ggml.tokens ({error}).") from None
    hf = Tokenizer(model)
    if rules.nfc:
        hf.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if rules.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if rules.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(rules.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rules.pattern is None))
    hf.pre_tokenizer = pre_tokenizers.Sequence(steps)
    hf.decoder = decoders.ByteLevel()
    named = [(tokens[i], types[i]) for i, kind in enumerate(types) if kind != NORMAL and tokens[i]]
    # Raw text is searched for these, never normalised text, as in every tokenizer.json of this kind.
    hf.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in named if k in (CONTROL, UNKNOWN)])
    hf.add_tokens([AddedToken(t, normalized=False) for t, k in named if k == USER_DEFINED])
    return hf


def _pair(index: int, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise ModelError(f"tokenizer.ggml.merges: entry {index} is {merge!r}, not two tokens with a space between.")
    return left, right


@cache
def char_to_byte() -> Mapping[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the 68 others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return table


def spelled_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; one with any other character in it is text as it stands."""
    table = char_to_byte()
    try:
        return bytes(table[char] for char in token)
    except KeyError:
        return token.encode("utf-8", "replace")
