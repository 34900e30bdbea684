"""SentencePiece BPE from pieces and scores, against sentencepiece itself and against tokenizers' merges (R54, R56)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece

from octavo.errors import ModelError
from octavo.text.sentencepiece import SPACE, Pieces, SentencePieceBPE
from octavo.text.tokenizer import Tokenizer
from texts import hard_strings, sentencepiece_gguf, sentencepiece_model

# sentencepiece itself knows no special tokens in text, so those are compared with tokenizers below.
TEXTS = tuple(text for text in hard_strings() if "</s>" not in text)


def processor(model: bytes) -> Any:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("squeeze", [True, False])
def test_ids_equal_sentencepiece(prefix: bool, squeeze: bool) -> None:
    """R56: with byte fallback, spaces kept or squeezed, with and without the space in front."""
    model = sentencepiece_model(prefix, squeeze)
    metadata = sentencepiece_gguf(model, add_space_prefix=prefix, remove_extra_whitespaces=squeeze)
    ours, theirs = Tokenizer.from_gguf(metadata), processor(model)
    assert len(TEXTS) >= 300
    for text in TEXTS:
        assert ours.encode(text, add_special=False) == theirs.encode(text), text


@pytest.mark.parametrize("prefix", [True, False])
def test_round_trip_is_exact(prefix: bool) -> None:
    ours = Tokenizer.from_gguf(sentencepiece_gguf(sentencepiece_model(prefix), add_space_prefix=prefix))
    for text in TEXTS:
        # The block that stands for a space is not kept apart from one; the original doesn't either.
        assert ours.decode(ours.encode(text)) == text.replace(SPACE, " ")


def merges_of(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges as transformers makes them out of scores."""
    tokens, scores, types = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    ids = {token: i for i, token in enumerate(tokens)}
    found = []
    for token, score, kind in zip(tokens, scores, types, strict=True):
        if kind == 1:
            splits = [(token[:at], token[at:]) for at in range(1, len(token))]
            found += [(float(score), len(a), len(b), a, b) for a, b in splits if a in ids and b in ids]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(a, b) for *_, a, b in found]


def test_ids_equal_tokenizers_with_special_tokens_in_the_text() -> None:
    """R56: the Hugging Face form of a Llama 2 tokenizer: a space in front of each stretch between special tokens."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as HF

    metadata = sentencepiece_gguf(sentencepiece_model())
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    hf = HF(models.BPE(vocab, merges_of(metadata), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    hf.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    hf.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    hf.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    ours = Tokenizer.from_gguf(metadata)
    for text in (*hard_strings(), "<s>a</s> b<s></s>", "<s", "a<unk>b"):
        ids = ours.encode(text, add_special=False)
        assert ids == hf.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == hf.decode(ids, skip_special_tokens=True)


def test_runs_of_spaces_that_users_defined() -> None:
    """Gemma's vocabulary has runs of spaces and newlines as user-defined tokens with placeholder scores."""
    runs = [" " * n for n in range(2, 8)] + ["\n" * n for n in range(1, 5)]
    metadata = sentencepiece_gguf(sentencepiece_model(False), add_space_prefix=False)
    first = len(metadata["tokenizer.ggml.tokens"])
    plain = [token if set(token) != {SPACE} or len(token) == 1 else "" for token in metadata["tokenizer.ggml.tokens"]]
    metadata["tokenizer.ggml.tokens"] = [*plain, *runs]
    metadata["tokenizer.ggml.scores"] = np.append(metadata["tokenizer.ggml.scores"], [-1000.0] * len(runs))
    metadata["tokenizer.ggml.token_type"] = np.append(metadata["tokenizer.ggml.token_type"], [4] * len(runs))
    ours = Tokenizer.from_gguf(metadata)
    the = ours.encode("the", add_special=False)
    for n in range(2, 8):
        assert ours.encode(" " * n + "the", add_special=False) == [first + n - 2, *the]
    assert ours.encode("the\n\nthe", add_special=False) == [*the, first + 7, *the]
    assert ours.encode("\n" * 5, add_special=False) == [first + 9, first + 6]  # the longest first
    assert ours.decode(ours.encode("  the\n\n\n   a", add_special=False)) == "  the\n\n\n   a"


def test_pieces_with_a_space_inside_are_found() -> None:
    """Text is cut before spaces only where no piece joins both sides; Gemma has one piece that does."""
    tokens = ["<unk>", SPACE, "<", "/", ">", f">{SPACE}", f">{SPACE}<", f">{SPACE}</", "a", f"{SPACE}a"]
    scores = [0.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0, -9.0, -4.0]
    bpe = SentencePieceBPE(Pieces(tokens, scores, [2] + [1] * 9, add_space_prefix=False))
    assert bpe.encode("a> </a a") == [8, 7, 8, 9]


def test_without_byte_fallback_unknown_characters_are_one_unknown() -> None:
    bpe = SentencePieceBPE(Pieces(["<unk>", "a", SPACE], [0.0, -1.0, -2.0], [2, 1, 1], add_space_prefix=False))
    assert bpe.encode("aßßa ß") == [1, 0, 1, 2, 0]


@pytest.mark.parametrize(("flag", "adds"), [(None, True), (True, True), (False, False)])
def test_bos_follows_the_flag_and_is_on_without_one(flag: bool | None, adds: bool) -> None:
    """R54."""
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = Tokenizer.from_gguf(sentencepiece_gguf(sentencepiece_model(), **more))
    assert tokenizer.encode("hello")[:1] == ([1] if adds else tokenizer.encode("hello", add_special=False)[:1])
    assert tokenizer.encode("") == ([1] if adds else [])


@pytest.mark.parametrize(("key", "value"), [("scores", [0.0]), ("scores", None), ("token_type", np.zeros(3, np.int32))])
def test_metadata_that_lies_is_an_error_that_names_the_key(key: str, value: Any) -> None:
    metadata = sentencepiece_gguf(sentencepiece_model(), **{key: value})
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{key}"):
        Tokenizer.from_gguf(metadata)


def test_byte_tokens_need_their_spelling() -> None:
    with pytest.raises(ModelError, match="token 1 is typed as a byte"):
        SentencePieceBPE(Pieces(["<unk>", "0x41"], [0.0, 0.0], [2, 6]))


def test_folder_with_tokenizer_model_alone(tmp_path: Path) -> None:
    model = sentencepiece_model()
    (tmp_path / "tokenizer.model").write_bytes(model)
    ours, theirs = Tokenizer.from_folder(tmp_path), processor(model)
    assert (ours.bos_id, ours.eos_ids, ours.unk_id, ours.pad_id) == (1, (2,), 0, None)
    for text in TEXTS[:100]:
        assert ours.encode(text) == [1, *theirs.encode(text)]


@pytest.mark.parametrize("cut", [1, 7, 1000, -1])
def test_cut_off_model_file_is_an_error_that_names_it(tmp_path: Path, cut: int) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model()[:cut])
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)


def test_encode_inside_leaves_out_the_first_space() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_gguf(sentencepiece_model()))
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode("the", add_special=False))) == b" the"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_inside("the"))) == b"the"
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode_inside(" the"))) == b" the"
