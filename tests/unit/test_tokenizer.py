"""Byte-level BPE rebuilt from GGUF metadata, and folders, against the original tokenizers (R36, R54, R56)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ModelError, RequestError
from octavo.text.bytelevel import PRE_TOKENIZERS, char_to_byte
from octavo.text.tokenizer import Tokenizer
from texts import byte_level, byte_level_gguf, hard_strings

# Written out once more, as the published tokenizer.json files have them.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LLAMA3 = CONTRACTIONS + (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ("<|begin|>", "<|im_start|>", "<|im_end|>")
ORIGINALS: dict[str, dict[str, Any]] = {
    "gpt-2": {"pattern": None},
    "default": {"pattern": None},
    "llama-bpe": {"pattern": LLAMA3},
    "qwen2": {"pattern": QWEN2, "nfc": True},
    "smollm": {"pattern": None, "single_digits": True},
    "starcoder": {"pattern": None, "single_digits": True},
    "tekken": {"pattern": TEKKEN},
}


def original(pre: str) -> Any:
    return byte_level(specials=SPECIALS, **ORIGINALS[pre])


def rebuilt(pre: str, **more: Any) -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_gguf(original(pre), pre, **more))


@pytest.mark.parametrize("pre", ORIGINALS)
def test_rebuilt_from_gguf_gives_the_original_ids(pre: str) -> None:
    """R56: accents, emoji, digits and spaces are cut like the original cuts them."""
    hf, ours = original(pre), rebuilt(pre, add_bos_token=False)
    assert len(hard_strings()) >= 300
    for text in (*hard_strings(), "<|im_start|>user\nhi <|im_end|> <|im_end|"):
        assert ours.encode(text) == hf.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", [pre for pre in ORIGINALS if pre != "qwen2"])
def test_round_trip_is_exact(pre: str) -> None:
    """R56; Qwen's normaliser composes accents, so there the text itself changes, as in the original."""
    ours = rebuilt(pre)
    for text in hard_strings():
        assert ours.decode(ours.encode(text, add_special=False)) == text


def test_decode_equals_the_original_on_whole_texts() -> None:
    hf, ours = original("qwen2"), rebuilt("qwen2")
    for text in hard_strings():
        ids = ours.encode(text, add_special=False)
        assert ours.decode(ids, skip_special=False) == hf.decode(ids, skip_special_tokens=False)


def test_tokens_that_merges_do_not_reach() -> None:
    """Llama 3's tokenizer takes a word that is a token as it stands, even where the merges would miss it."""
    metadata = byte_level_gguf(original("llama-bpe"), "llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "qzqzq"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("qzqzq") == [tokenizer.vocab_size - 1]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer.from_gguf(metadata).encode("qzqzq")) > 1


def test_unknown_pre_tokenizer_is_refused_by_name() -> None:
    """R56: a near miss would give other ids without anybody noticing."""
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre.*'mystery-9'.*llama-bpe"):
        Tokenizer.from_gguf(byte_level_gguf(original("gpt-2"), "mystery-9"))


def test_files_without_a_pre_tokenizer_go_by_their_architecture() -> None:
    metadata = byte_level_gguf(original("qwen2"), None) | {"general.architecture": "qwen2"}
    assert Tokenizer.from_gguf(metadata).encode("e\u0301 1234") == rebuilt("qwen2").encode("e\u0301 1234")


def test_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="'wordpiece'"):
        Tokenizer.from_gguf({"tokenizer.ggml.model": "wordpiece", "tokenizer.ggml.tokens": ["a"]})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokens", []),
        ("tokens", 7),
        ("tokens", [1, 2]),
        ("token_type", [1, 1]),
        ("merges", ["no_space_in_here"]),
        ("merges", ["zz yy"]),
        ("bos_token_id", 10**12),
        ("eos_token_id", -1),
        ("eos_token_id", "2"),
    ],
)
def test_metadata_that_lies_is_an_error_that_names_the_key(key: str, value: Any) -> None:
    metadata = byte_level_gguf(original("gpt-2"), "gpt-2") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(ModelError, match=rf"tokenizer\.ggml\.{key}"):
        Tokenizer.from_gguf(metadata)


def test_through_a_real_file(tmp_path: Path) -> None:
    """The metadata as the gguf package writes it and as our reader hands it over."""
    import gguf

    from octavo.loading.gguf import GGUFFile

    metadata = byte_level_gguf(original("llama-bpe"), "llama-bpe")
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.from_gguf(GGUFFile(tmp_path / "t.gguf"))
    for text in hard_strings():
        assert tokenizer.encode(text) == [0, *original("llama-bpe").encode(text, add_special_tokens=False).ids]
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}


# --- BOS and EOS ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "flag", "adds"),
    [("llama-bpe", None, True), ("llama-bpe", False, False), ("smollm", None, False), ("smollm", True, True)],
)
def test_bos_follows_the_flag_and_else_the_kind(pre: str, flag: bool | None, adds: bool) -> None:
    """R54: add_bos true, false and missing; Llama 3's tokenizer adds BOS without a flag, SmolLM's doesn't."""
    more = {} if flag is None else {"add_bos_token": flag}
    tokenizer = rebuilt(pre, bos_token_id=0, **more)
    plain = tokenizer.encode("hello", add_special=False)
    assert tokenizer.add_bos is adds
    assert tokenizer.encode("hello") == ([0] if adds else []) + plain
    assert tokenizer.encode("") == ([0] if adds else [])  # R36: an empty prompt is BOS alone, or nothing


def test_chat_has_one_bos_whether_or_not_the_template_writes_it() -> None:
    """R54: what a template renders is encoded without adding anything."""
    for source, count in (("{{ bos_token }}{{ messages[0].content }}", 1), ("{{ messages[0].content }}", 0)):
        metadata = byte_level_gguf(original("llama-bpe"), "llama-bpe", bos_token_id=0, add_bos_token=True)
        tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.chat_template": source})
        text = tokenizer.chat.render([{"role": "user", "content": "hi"}])
        assert tokenizer.encode(text, add_special=False).count(0) == count


def test_all_end_of_turn_ids_are_eos() -> None:
    metadata = byte_level_gguf(original("gpt-2"), "gpt-2", eos_token_id=0, eot_token_id=1)
    assert Tokenizer.from_gguf(metadata).eos_ids == (0, 1, 2)  # <|im_end|> by its name


def test_special_tokens_are_told_from_words() -> None:
    tokenizer = rebuilt("gpt-2")
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert [tokenizer.is_special(i) for i in (ids[0], ids[1], ids[-1])] == [True, False, True]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_bytes(ids[-1]) == b"<|im_end|>"


def test_ids_beyond_the_vocabulary_are_no_text() -> None:
    """R26: embedding rows beyond the tokenizer exist; they decode to nothing, as in transformers."""
    tokenizer = rebuilt("gpt-2")
    assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""


def test_every_byte_has_one_spelling() -> None:
    assert sorted(char_to_byte().values()) == list(range(256))
    tokenizer = rebuilt("gpt-2")
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


@pytest.mark.parametrize("text", [b"bytes", None, 7, "half \ud83d a pair"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(RequestError):
        rebuilt("gpt-2").encode(text)


# --- folders ----------------------------------------------------------------------------------------------------------


def folder(path: Path, processor: bool, **config: Any) -> Path:
    from tokenizers import Tokenizer as HF
    from tokenizers.processors import TemplateProcessing

    hf = HF.from_str(original("llama-bpe").to_str())
    if processor:
        hf.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    hf.save(str(path / "tokenizer.json"))
    config = {
        "bos_token": "<|begin|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    } | config
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_folder_equals_transformers(tmp_path: Path, processor: bool, flags: dict[str, bool]) -> None:
    """R54: exactly what Hugging Face gives: the post-processor decides, whatever the flags beside it say."""
    from transformers import AutoTokenizer

    path = folder(tmp_path, processor, **flags)
    ours, theirs = Tokenizer.from_folder(path), AutoTokenizer.from_pretrained(path)
    for text in ("", "hello", "<|begin|>hello", "hello<|im_end|>", *hard_strings()[:40]):
        assert ours.encode(text) == theirs(text)["input_ids"], text
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    ids = ours.encode("<|begin|>naïve 日本 👍🏽<|im_end|>")
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_folder_takes_added_tokens_and_templates_from_the_config(tmp_path: Path) -> None:
    extra = {"content": "<|tool|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    path = folder(tmp_path, True, added_tokens_decoder={"900": extra}, chat_template="old")
    (path / "chat_template.jinja").write_text("{{ bos_token }}new")
    tokenizer = Tokenizer.from_folder(path)
    assert tokenizer.encode("<|tool|>", add_special=False) == [900]
    assert tokenizer.chat.render([{"role": "user", "content": ""}]) == "<|begin|>new"


def test_folder_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json.*tokenizer\.model"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ModelError, match="not a SentencePiece model"):
        Tokenizer.from_folder(tmp_path)


def test_every_known_pre_tokenizer_builds() -> None:
    for pre in PRE_TOKENIZERS:
        tokenizer = Tokenizer.from_gguf(byte_level_gguf(original("gpt-2"), pre, add_bos_token=False))
        assert tokenizer.decode(tokenizer.encode("Hello 1234, don't!")) == "Hello 1234, don't!"
