"""Reads vocabularies: out of GGUF metadata, and out of Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ModelError
from octavo.text import bytelevel
from octavo.text.sentencepiece import CONTROL, NORMAL, SPACE, UNKNOWN, Pieces, SentencePieceBPE, read_model_file
from octavo.text.tokenizer import END_OF_TURN, Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer


# --- GGUF -------------------------------------------------------------------------------------------------------------


def from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Keys as llama.cpp's converter writes them; arrays may be lists, NumPy arrays or lazy sequences."""
    tokens = _array(metadata, "tokenizer.ggml.tokens", str)
    if not tokens:
        raise ModelError("tokenizer.ggml.tokens: is empty; the file carries no vocabulary.")
    types = _array(metadata, "tokenizer.ggml.token_type", int, len(tokens)) or [NORMAL] * len(tokens)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _gguf_bytelevel(metadata, tokens, types)
    if kind == "llama":
        return _gguf_sentencepiece(metadata, tokens, types)
    raise ModelError(f"tokenizer.ggml.model: tokenizers of kind {kind!r} are not supported; known are gpt2 and llama.")


def _gguf_bytelevel(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Vocabulary:
    rules = bytelevel.pre_tokenizer(metadata)
    hf = bytelevel.build(tokens, types, _array(metadata, "tokenizer.ggml.merges", str), rules)
    special = [i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)]
    raw = _cached_raw(lambda i: _bytelevel_bytes(tokens[i], types[i] != NORMAL), len(tokens))
    codec = {"encode": _encoder(hf), "raw": raw, "strips_space": False}
    return _gguf_vocabulary(metadata, tokens, types, special, rules.add_bos, **codec)


def _gguf_sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Vocabulary:
    if metadata.get("tokenizer.ggml.precompiled_charsmap") is not None:
        raise ModelError("tokenizer.ggml.precompiled_charsmap: text normalisation by a table is not supported.")
    scores = _array(metadata, "tokenizer.ggml.scores", float, len(tokens))
    if not scores:
        raise ModelError("tokenizer.ggml.scores: is missing; a SentencePiece vocabulary needs it.")
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    squeeze = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    bpe = SentencePieceBPE(Pieces(tokens, scores, types, prefix, squeeze))
    raw = _cached_raw(lambda i: _piece_bytes(bpe, tokens[i], i), len(tokens))
    codec = {"encode": bpe.encode, "raw": raw, "strips_space": prefix}
    return _gguf_vocabulary(metadata, tokens, types, bpe.special, True, **codec)


def _gguf_vocabulary(
    metadata: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
    special: Iterable[int],
    adds_bos: bool,
    **codec: Any,
) -> Vocabulary:
    def token_id(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < len(tokens):
            raise ModelError(f"{key}: {value!r:.40} is outside the vocabulary of {len(tokens)} tokens.")
        return value

    bos, eos, unk, pad = token_id("bos"), token_id("eos"), token_id("unknown"), token_id("padding")
    ends = [i for i in (eos, token_id("eot"), token_id("eom")) if i is not None]
    ends += [i for i, kind in enumerate(types) if kind != NORMAL and tokens[i] in END_OF_TURN]
    # Files say false or true; where they say nothing the kind of tokenizer does, as in Hugging Face's classes.
    begins = bos is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos))
    finishes = eos is not None and bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    named = {"bos_token": bos, "eos_token": eos, "unk_token": unk, "pad_token": pad}
    return Vocabulary(
        size=len(tokens),
        special=frozenset(special).union(ends, [] if bos is None else [bos]),
        prefix=(bos,) if begins and bos is not None else (),
        suffix=(eos,) if finishes and eos is not None else (),
        bos=bos,
        eos=tuple(ends),
        unk=unk,
        pad=pad,
        templates=_gguf_templates(metadata),
        named={name: tokens[i] for name, i in named.items() if i is not None},
        **codec,
    )


def _gguf_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {name.removeprefix(key + "."): metadata[name] for name in metadata if name.startswith(key + ".")}
    if key in metadata:
        found["default"] = metadata[key]
    return {name: source for name, source in found.items() if isinstance(source, str)}


def _array(metadata: Mapping[str, Any], key: str, kind: type, size: int | None = None) -> list[Any]:
    """The array under ``key`` as a plain list ([] if there is none), of ``size`` entries if that is given."""
    value = metadata.get(key)
    if value is None:
        return []
    items = value.tolist() if hasattr(value, "tolist") else value
    # One pass at C's speed; Gemma has three arrays of 262,144 entries.
    if isinstance(items, str) or not isinstance(items, Sequence) or set(map(type, items)) - {kind}:
        raise ModelError(f"{key}: must be an array of {kind.__name__}.")
    if size is not None and len(items) != size:
        raise ModelError(f"{key}: has {len(items)} entries for {size} tokens.")
    return list(items)


# --- Hugging Face folders ---------------------------------------------------------------------------------------------


def from_folder(folder: Path) -> Vocabulary:
    if not folder.is_dir():
        raise ModelError(f"{folder}: is not a folder.")
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    if (folder / "tokenizer.json").is_file():
        return _folder_json(folder, config)
    if (folder / "tokenizer.model").is_file():
        return _folder_model(folder, config)
    raise ModelError(f"{folder}: holds neither tokenizer.json nor tokenizer.model; add the model's tokenizer files.")


def _folder_json(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    from tokenizers import AddedToken, Tokenizer

    path = folder / "tokenizer.json"
    try:
        hf = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{path}: cannot be read ({error}); get the file again.") from None
    hf.no_truncation()
    hf.no_padding()
    named = _named_tokens(config)
    for _, entry in sorted(_added_in_config(config).items()):
        if hf.token_to_id(entry["content"]) is None:
            hf.add_tokens([AddedToken(**entry)])
    known = [text for text in named.values() if hf.token_to_id(text) is not None]
    hf.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in known])
    added = hf.get_added_tokens_decoder()
    special = frozenset(i for i, token in added.items() if token.special)
    raw, strips_space = _decoder_of(hf, path)
    ids = {name: hf.token_to_id(text) for name, text in named.items()}
    size = 1 + max(hf.get_vocab(with_added_tokens=True).values(), default=-1)
    prefix, suffix = _surroundings(hf)
    return _folder_vocabulary(
        folder, config, ids, named,
        {i: added[i].content for i in special},
        size=size, encode=_encoder(hf), raw=_cached_raw(raw, size), special=special, prefix=prefix, suffix=suffix,
        strips_space=strips_space,
    )  # fmt: skip


def _folder_model(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    path = folder / "tokenizer.model"
    data = path.read_bytes()
    if not data.startswith(b"\n"):  # a protobuf whose first field is a piece; Llama 3's tiktoken file is base64 text
        raise ModelError(f"{path}: is not a SentencePiece model; add the model's tokenizer.json.")
    pieces, own = read_model_file(data, str(path))
    bpe = SentencePieceBPE(pieces)
    named = {f"{name}_token": pieces.tokens[i] for name, i in own.items()} | _named_tokens(config)
    position = {token: i for i, token in reversed(list(enumerate(pieces.tokens)))}
    ids = {name: position.get(text) for name, text in named.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    size = len(pieces.tokens)
    return _folder_vocabulary(
        folder, config, ids, named,
        {i: pieces.tokens[i] for i in bpe.special},
        size=size, encode=bpe.encode, special=frozenset(bpe.special),
        raw=_cached_raw(lambda i: _piece_bytes(bpe, pieces.tokens[i], i), size),
        prefix=(bos,) if bos is not None and config.get("add_bos_token", True) else (),
        suffix=(eos,) if eos is not None and config.get("add_eos_token", False) else (),
        strips_space=pieces.add_space_prefix,
    )  # fmt: skip


def _folder_vocabulary(
    folder: Path,
    config: Mapping[str, Any],
    ids: Mapping[str, int | None],
    named: Mapping[str, str],
    special_texts: Mapping[int, str],
    **codec: Any,
) -> Vocabulary:
    eos = ids.get("eos_token")
    ends = [] if eos is None else [eos]
    ends += sorted(i for i, text in special_texts.items() if text in END_OF_TURN)
    return Vocabulary(
        bos=ids.get("bos_token"),
        eos=tuple(ends),
        unk=ids.get("unk_token"),
        pad=ids.get("pad_token"),
        templates=_folder_templates(folder, config),
        named=named,
        **codec,
    )


def _surroundings(hf: HFTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a prompt.

    As in transformers, it alone decides where there is a tokenizer.json: the flags add_bos_token and add_eos_token in
    tokenizer_config.json are then ignored.
    """
    plain = hf.encode("a", add_special_tokens=False).ids
    full = hf.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if plain and full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()


def _decoder_of(hf: HFTokenizer, path: Path) -> tuple[Any, bool]:
    """How ids become bytes, from the decoder in tokenizer.json: a function, and whether the first space is dropped."""
    steps = [] if hf.decoder is None else _decoder_steps(json.loads(hf.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    added = hf.get_added_tokens_decoder()
    if "ByteLevel" in kinds:
        return lambda i: _bytelevel_bytes(hf.id_to_token(i) or "", i in added), False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = any(step["type"] == "Strip" and step.get("start") for step in steps)
        strips |= any(step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps)
        return lambda i: _spelled_piece(hf.id_to_token(i) or ""), strips
    shown = ", ".join(kinds) or "none"
    raise ModelError(f"{path}: decoder {shown} is not supported; known are ByteLevel and SentencePiece's.")


def _decoder_steps(state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(state["decoders"]) if state.get("type") == "Sequence" else [state]


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like; each is text, or a dict that holds it."""
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    found = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _added_in_config(config: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    keys = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    entries = config.get("added_tokens_decoder") or {}
    return {int(i): {key: entry[key] for key in keys if key in entry} for i, entry in entries.items()}


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own wins over the entry in tokenizer_config.json, as in transformers."""
    entry = config.get("chat_template")
    found = {"default": entry} if isinstance(entry, str) else {e["name"]: e["template"] for e in entry or []}
    files = {"default": folder / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    found |= {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not readable JSON ({error}); get the file again.") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object.")
    return value


# --- both -------------------------------------------------------------------------------------------------------------


def _encoder(hf: HFTokenizer) -> Any:
    def encode(text: str) -> list[int]:
        return list(hf.encode(text, add_special_tokens=False).ids)

    return encode


def _bytelevel_bytes(token: str, added: bool) -> bytes:
    """Added tokens are matched in text as they stand, so they are written as they stand, not as spelled bytes."""
    return token.encode("utf-8", "replace") if added else bytelevel.spelled_bytes(token)


def _piece_bytes(bpe: SentencePieceBPE, token: str, token_id: int) -> bytes:
    byte = bpe.bytes_of.get(token_id)
    return byte if byte is not None else token.replace(SPACE, " ").encode("utf-8", "replace")


def _spelled_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(SPACE, " ").encode("utf-8", "replace")


def _cached_raw(raw: Any, size: int) -> Any:
    """``raw`` with a memory: the same few thousand tokens come again and again."""
    known: dict[int, bytes] = {}

    def look_up(token_id: int) -> bytes:
        found = known.get(token_id)
        if found is None:
            found = known[token_id] = raw(token_id) if 0 <= token_id < size else b""
        return found

    return look_up
