"""A model as files on disk: what it is, and its weights as they lie there, mapped and checked but not yet read."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octavo.errors import ModelError
from octavo.loading.gguf import open_splits
from octavo.loading.mapped import Entry, MappedFile
from octavo.loading.safetensors import open_shards, read_json
from octavo.loading.tensor import TYPES, Tensor
from octavo.models.families import INTERLEAVED, NORM_LESS_ONE, spec_from_config, spec_from_gguf
from octavo.models.fields import Fields
from octavo.models.rope import divide
from octavo.models.spec import ModelSpec
from octavo.models.weights import Needed, needed

log = logging.getLogger("octavo.loading")

# What a checkpoint's generation defaults may hold besides "eos_token_ids"; GGUF's names for them.
GENERATION = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
Place = tuple[MappedFile, Entry]

LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "GEMMA_TERMS.html", "USE_POLICY.md")


class Weights(Mapping[str, Tensor]):
    """The tensors of a checkpoint under their canonical names.

    Owns: how each is made; makes it on access.  Promises: raw bytes as in the file (a view of its memory map), but
    for norms and biases, which come as float32, and for rows that are brought into another order (a copy).
    """

    def __init__(self, makers: dict[str, Callable[[], Tensor]], places: dict[str, Place], nbytes: int) -> None:
        self._makers = makers
        self._places = places
        self.nbytes = nbytes

    def release(self, name: str | None = None, nbytes: int | None = None) -> None:
        """The tensor, or its first ``nbytes``, or all that is in the files need not stay in memory: it is packed."""
        if name is None:
            for file in {id(file): file for file, _ in self._places.values()}.values():
                file.release()
            return
        file, entry = self._places[name]
        file.release(entry.start, entry.nbytes if nbytes is None else min(nbytes, entry.nbytes))

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


@dataclass(frozen=True)
class Checkpoint:
    """A model that is opened, not loaded.

    ``tensors`` has canonical names; ``generation`` the file's defaults: ``eos_token_ids`` (a list, always there) and
    whichever of temperature, top_k, top_p, min_p, repetition_penalty and do_sample the file sets; ``metadata`` is
    GGUF's (with the tokenizer), ``folder`` a Hugging Face folder: one of the two is None.  ``nbytes`` counts the
    weights that the model uses, as they lie in the file.
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    spec: ModelSpec
    tensors: Weights
    generation: dict[str, Any]
    files: tuple[Path, ...]
    metadata: Mapping[str, Any] | None = None
    folder: Path | None = None
    license: str | None = None
    name: str = ""
    _fingerprint: list[str] = field(default_factory=list, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return self.tensors.nbytes

    def license_text(self) -> str | None:
        """The text of a licence that lies beside the model."""
        for name in LICENCE_FILES:
            path = (self.folder or self.path.parent) / name
            if path.is_file():
                return path.read_text(encoding="utf-8", errors="replace")
        return None

    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the model's answers: its files' bytes, and the spec that is served.

        Reads every byte once (about a second a gigabyte), then remembers.
        """
        if not self._fingerprint:
            digest = hashlib.sha256(repr(self.spec).encode())
            for path in self.files:
                digest.update(f"{path.name} {path.stat().st_size}\n".encode())
                with open(path, "rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
            self._fingerprint.append(digest.hexdigest())
        return self._fingerprint[0]


def open_gguf(path: Path, context: int | None = None) -> Checkpoint:
    """Opens a GGUF file, or a split one by any of its parts."""
    files = open_splits(path)
    meta, source = files[0], str(files[0].path)
    where = {name: (file, entry) for file in files for name, entry in file.tensors.items()}
    spec = spec_from_gguf(source, meta, where.keys(), context)
    spec = replace(spec, vocab=_embedding_rows(source, where, "token_embd.weight"))
    _check_vocab(source, spec, meta.length("tokenizer.ggml.tokens"))
    spec = _with_rope_factors(source, spec, where)
    permuted = meta["general.architecture"] in INTERLEAVED
    found = {n: n.gguf for n in needed(spec, spec.vocab)}
    ignorable = ("rope_freqs.weight", ".rot_embd", ".attn_rot_embd", "rotary_emb")
    tensors = _collect(source, found, where, ignorable, permuted=permuted, less_one=False)
    return Checkpoint(
        path=files[0].path,
        format="gguf",
        spec=spec,
        tensors=tensors,
        generation=_gguf_generation(source, meta),
        files=tuple(f.path for f in files),
        metadata=meta,
        license=_name(meta.get("general.license")),
        name=_name(meta.get("general.name")) or path.stem,
    )


def open_folder(folder: Path, context: int | None = None) -> Checkpoint:
    """Opens a Hugging Face folder: config.json and safetensors."""
    source = str(folder / "config.json")
    config = read_json(folder / "config.json")
    files = open_shards(folder)
    where = {name: (file, entry) for file in files for name, entry in file.tensors.items()}
    spec = spec_from_config(source, config, where.keys(), context)
    prefix = _prefix(str(folder), where)
    heads = [h for h in ("lm_head.weight", "language_model.lm_head.weight") if h in where]
    embed = prefix + "embed_tokens.weight"
    if heads and embed in where and spec.tied:
        # As transformers has it: a head that is there wins over a configuration that says it is tied.
        log.info("%s: tie_word_embeddings is set, but the file has %s: it is used", folder, heads[0])
        spec = replace(spec, tied=False)
    found = {n: prefix + n.hf for n in needed(spec, spec.vocab)}
    for n in found:
        if n.name == "head":
            found[n] = heads[0] if heads else n.hf
        elif n.name == "embed" and embed not in where and heads and spec.tied:
            found[n] = heads[0]  # the one matrix, saved under its other name
    less_one = spec.family in NORM_LESS_ONE
    tensors = _collect(str(folder), found, where, ("inv_freq", "masked_bias"), permuted=False, less_one=less_one)
    texts = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model")
    extra = ("config.json", "generation_config.json", *texts, "chat_template.jinja")
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    return Checkpoint(
        path=folder,
        format="safetensors",
        spec=spec,
        tensors=tensors,
        generation=_folder_generation(folder, config),
        files=(*(f.path for f in files), *(folder / n for n in extra if (folder / n).is_file()), *more),
        folder=folder,
        license=_card_license(folder),
        name=_name(config.get("_name_or_path")) or folder.name,
    )


def _collect(
    source: str,
    found: dict[Needed, str],
    where: Mapping[str, Place],
    silent: tuple[str, ...],
    permuted: bool,
    less_one: bool,
) -> Weights:
    """Checks every needed tensor's presence, type and shape, and names what is left over."""
    makers: dict[str, Callable[[], Tensor]] = {}
    places: dict[str, Place] = {}
    nbytes = 0
    for need, name in found.items():
        if name not in where:
            raise ModelError(f"{source} lacks tensor {name} (needed with shape {need.shape})")
        file, entry = where[name]
        if entry.type not in TYPES:
            raise ModelError(
                f"{file.path}: tensor {name} is of type {entry.type}, which Octavo doesn't read "
                f"({', '.join(TYPES)}); take another quantisation of the model"
            )
        if entry.shape != need.shape:
            raise ModelError(f"{file.path}: tensor {name} has shape {entry.shape}, but {need.shape} is needed")
        makers[need.name] = _maker(file, entry, need, permuted, less_one)
        places[need.name] = file, entry
        nbytes += entry.nbytes
    extra = sorted(where.keys() - set(found.values()))
    extra = [e for e in extra if not any(s in e for s in silent)]
    if extra:
        log.info("%s: %d tensors are not used: %s", source, len(extra), ", ".join(extra[:8]))
    return Weights(makers, places, nbytes)


def _maker(file: MappedFile, entry: Entry, need: Needed, permuted: bool, less_one: bool) -> Callable[[], Tensor]:
    heads = need.rotary if permuted else 0
    if need.vector and entry.type not in ("F32", "F16", "BF16"):
        raise ModelError(f"{file.path}: tensor {entry.name} is {entry.type}; a norm or bias must be F32, F16 or BF16")

    def make() -> Tensor:
        data = file.bytes_of(entry)
        kind = entry.type
        if need.vector:
            values = _float32(kind, data)
            if need.norm and less_one:
                values = values + np.float32(1)
            kind, data = "F32", values.view(np.uint8)
        if heads:
            data = _halves(data, heads, need.shape[0])
        return Tensor(need.name, kind, need.shape, data)

    return make


def _float32(kind: str, data: np.ndarray) -> np.ndarray:
    """A vector's raw bytes as float32, a copy."""
    raw = np.array(data)  # aligned, whatever the file's offset is
    if kind == "F32":
        return raw.view("<f4").astype(np.float32)
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _halves(data: np.ndarray, heads: int, rows: int) -> np.ndarray:
    """Rows from interleaved rotary pairs (2j, 2j+1) to halves (j, j + d/2), in each head; bytes inside stay."""
    pairs = data.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)


def _embedding_rows(source: str, where: Mapping[str, Place], name: str) -> int:
    if name not in where:
        raise ModelError(f"{source} lacks tensor {name}")
    shape = where[name][1].shape
    if len(shape) != 2:
        raise ModelError(f"{source}: tensor {name} has shape {shape}, not two dimensions")
    return shape[0]


def _check_vocab(source: str, spec: ModelSpec, tokens: int) -> None:
    """The embedding may have more rows than the tokenizer has tokens (padding), not fewer."""
    if tokens > spec.vocab:
        raise ModelError(f"{source} has {tokens} tokens, but the embedding has {spec.vocab} rows")
    if 0 < tokens < spec.vocab:
        log.info("%s: the embedding has %d rows for %d tokens (padding)", source, spec.vocab, tokens)


def _with_rope_factors(source: str, spec: ModelSpec, where: Mapping[str, Place]) -> ModelSpec:
    """Llama 3.1's scaling, which GGUF keeps as a tensor of one factor for each frequency."""
    if "rope_factors_long.weight" in where or "rope_factors_short.weight" in where:
        raise ModelError(f"{source}: the rope scaling is of type 'longrope', which Octavo doesn't support")
    if "rope_freqs.weight" not in where:
        return spec
    file, entry = where["rope_freqs.weight"]
    if entry.type != "F32" or entry.shape != (spec.head_dim // 2,):
        raise ModelError(
            f"{source}: tensor rope_freqs.weight is {entry.type} of shape {entry.shape}, but F32 of "
            f"{(spec.head_dim // 2,)} is needed"
        )
    factors = _float32("F32", file.bytes_of(entry))
    if not (np.isfinite(factors).all() and (factors > 0).all()):
        raise ModelError(f"{source}: tensor rope_freqs.weight has factors that are not positive")
    return replace(spec, ropes=(divide(spec.ropes[0], factors), *spec.ropes[1:]))


def _prefix(source: str, where: Mapping[str, Place]) -> str:
    """What the decoder's tensors are called by: ``model.`` mostly, longer in multimodal checkpoints."""
    for prefix in ("model.", "model.language_model.", "language_model.model."):
        if prefix + "embed_tokens.weight" in where or prefix + "layers.0.input_layernorm.weight" in where:
            return prefix
    raise ModelError(f"{source} lacks tensor model.embed_tokens.weight")


def _folder_generation(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Defaults of generation_config.json; end tokens of config.json too, for either file may have only one of them."""
    path = folder / "generation_config.json"
    values = read_json(path) if path.is_file() else {}
    inner = config.get("text_config")
    eos: list[int] = []
    for source in (values, config, inner if isinstance(inner, dict) else {}):
        ids = source.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [ids]:
            if token is None or (token in eos and type(token) is int):
                continue
            if type(token) is not int or token < 0:
                raise ModelError(f"{folder}: eos_token_id holds {token!r:.40}, which is no token id")
            eos.append(token)
    found = {key: values[key] for key in (*GENERATION, "do_sample") if values.get(key) is not None}
    return {"eos_token_ids": eos, **_checked(str(path), found)}


def _gguf_generation(source: str, meta: Mapping[str, Any]) -> dict[str, Any]:
    fields = Fields(source, meta, "tokenizer.ggml.")
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    eos = [fields.integer(key, low=0, high=(1 << 32) - 1) for key in keys if fields.has(key)]
    found = {key: meta.get(f"general.sampling.{theirs}") for key, theirs in GENERATION.items()}
    return {
        "eos_token_ids": [t for t in dict.fromkeys(eos) if t != (1 << 32) - 1],  # all ones: none
        **_checked(source, {k: v for k, v in found.items() if v is not None}),
    }


def _checked(source: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Drops, with a warning, a default that is no number: a bad hint must not stop a good model."""
    good = {}
    for key, value in defaults.items():
        if isinstance(value, (int, float)) and value == value:
            good[key] = value
        else:
            log.warning("%s: %s is %r, which is no number: ignored", source, key, value)
    return good


def _card_license(folder: Path) -> str | None:
    """The licence's name from the front matter of a model card (README.md)."""
    try:
        with open(folder / "README.md", encoding="utf-8", errors="replace") as file:
            head = file.read(65_536)
    except OSError:
        return None
    parts = head.split("---", 2)
    lines = parts[1].splitlines() if len(parts) == 3 and not parts[0].strip() else []
    for line in lines:
        if line.startswith("license:"):
            return line.removeprefix("license:").strip().strip("'\"") or None
    return None


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
