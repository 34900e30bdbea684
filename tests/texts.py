"""Texts on which rebuilt tokenizers go wrong first, and small tokenizers to try them on."""

from __future__ import annotations

import io
import pydoc_data.topics
import random
import unicodedata
from functools import cache
from typing import Any

PROSE = "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
MORE = (
    "Übergrößenträger, naïve café, señor, ça va? 日本語の文章です。 中文字符很多。 한국어 문장. Русский текст. "
    "ελληνικά عربي עברית हिन्दी ไทย 👍🏽 🏳️‍🌈 👩‍👩‍👧‍👦 ½ ² Ⅷ ǅ ʰ 1234567890 don't I'LL we've"
    "\n\tdef f(x):\r\n\t\treturn x\n\n"
) * 20

_PIECES = [
    *[
        "",
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        "\x00",
        "\x1f",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u200d",
        "\ufeff",
    ],
    *[
        "a",
        "the",
        "Word",
        "ing",
        "'s",
        "'S",
        "don't",
        "I'LL",
        "x=",
        "==",
        "--",
        "...",
        "!?",
        "/",
        "</s>",
        "<",
        ">",
        "_",
    ],
    *["0", "7", "42", "123", "1234567890123456789", "3.14", "½", "²", "Ⅷ", "٣", "१"],
    *["é", "e\u0301", "ñ", "n\u0303", "Å", "ä\u0301", "한국", "日本語", "中", "ไทย", "हिन्दी", "ß", "ǅ", "ʰ", "İ", "ı"],
    *["👍", "👍🏽", "🏳️‍🌈", "👩‍👩‍👧‍👦", "🇩🇪", "\u0378", "\U0001fadf", "\U0010ffff", "\ue000", "▁", "▁▁", "Ġ", "Ċ"],
]


@cache
def hard_strings() -> tuple[str, ...]:
    """More than 300 strings: each piece alone and with spaces, the accents in both normal forms, and random chains."""
    dice = random.Random(54)
    texts = [form for piece in _PIECES for form in (piece, " " + piece, piece + " a")]
    texts += ["   indented", "trailing   ", " " * 40 + "x" + " " * 33, "a" * 50, "=" * 30, "\n" * 35, "\t" * 9 + "y"]
    texts += [unicodedata.normalize(form, MORE[:240]) for form in ("NFC", "NFD", "NFKD")]
    texts += ["".join(dice.choices(_PIECES, k=dice.randrange(1, 25))) for _ in range(150)]
    texts += [PROSE[at : at + 200] for at in dice.sample(range(len(PROSE) - 200), 40)]
    return tuple(texts)


@cache
def byte_level(
    pattern: str | None, nfc: bool = False, single_digits: bool = False, specials: tuple[str, ...] = ()
) -> Any:
    """A trained byte-level BPE tokenizer put together from the parts that published tokenizer.json files have."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    hf = Tokenizer(models.BPE())
    if nfc:
        hf.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    hf.pre_tokenizer = pre_tokenizers.Sequence(steps)
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, special_tokens=list(specials))
    hf.train_from_iterator([PROSE[:200_000], MORE], trainer)
    return hf


def byte_level_gguf(hf: Any, pre: str | None, **more: Any) -> dict[str, Any]:
    """What a converter to GGUF writes of such a tokenizer."""
    import json

    model = json.loads(hf.to_str())["model"]
    tokens = sorted(hf.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    added = hf.get_added_tokens_decoder()
    types = [1 if i not in added else 3 if added[i].special else 4 for _, i in tokens]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [token for token, _ in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


@cache
def sentencepiece_model(prefix: bool = True, squeeze: bool = False, user: tuple[str, ...] = ()) -> bytes:
    """A trained SentencePiece BPE model with byte fallback: Llama 2's settings, or with other spaces."""
    import sentencepiece

    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((PROSE[:120_000] + MORE).splitlines()),
        model_writer=out,
        model_type="bpe",
        vocab_size=1200,
        character_coverage=0.995,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=squeeze,
        add_dummy_prefix=prefix,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        user_defined_symbols=list(user),
        num_threads=1,
        minloglevel=2,
    )
    return out.getvalue()


def sentencepiece_gguf(model: bytes, **more: Any) -> dict[str, Any]:
    """What a converter to GGUF writes of a SentencePiece model, through the sentencepiece package."""
    import numpy as np
    import sentencepiece

    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = sp.get_piece_size()

    def kind(i: int) -> int:
        if sp.is_unknown(i):
            return 2
        if sp.is_control(i):
            return 3
        return 6 if sp.is_byte(i) else 5 if sp.is_unused(i) else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": np.array([sp.get_score(i) for i in range(size)], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in range(size)], np.int32),
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in more.items()}
