"""GGUF files of tiny models: rotary order (R53), heads (R57), shapes, types, what the metadata says."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

import tiny
from conftest import TinyModels
from octavo.errors import ConfigError, ModelError
from octavo.loading import Checkpoint, open_model
from octavo.loading.tensor import Tensor


def values(tensor: Tensor) -> np.ndarray:
    """A tensor's numbers in gguf's opinion, float32."""
    if tensor.type == "F32":
        return tensor.data.view("<f4").reshape(tensor.shape)
    return tiny.decode(tensor.type, tensor.data.reshape(tensor.shape[0], -1)).reshape(tensor.shape)


def agree(checkpoint: Checkpoint, model: tiny.Tiny) -> None:
    """Every tensor equals the transformers model's, bit for bit."""
    gemma = model.arch == "gemma3"
    named = {tiny.canonical(n, gemma): p.data.numpy() for n, p in model.model.named_parameters()}
    assert set(checkpoint.tensors) == set(named)
    for name, expected in named.items():
        tensor = checkpoint.tensors[name]
        if expected.ndim == 1:
            assert tensor.type == "F32", name
            expected = expected + np.float32(gemma and not name.endswith("_bias"))
        assert tensor.name == name and tensor.shape == expected.shape
        assert len(tensor.data) == tensor.nbytes and tensor.data.dtype == np.uint8
        assert np.array_equal(values(tensor), expected), name


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q6_K"])
def test_rotary_order_of_llama_is_undone_with_grouped_heads(kind: str, tiny_models: TinyModels) -> None:
    """R53 (transformers 31766, PR 31788; llama.cpp PR 3364): 4 query heads, 2 key-value heads."""
    agree(open_model(tiny_models.gguf("llama", kind)), tiny_models.get("llama", kind))


@pytest.mark.parametrize("family", ["llama-untied", "llama-bias", "mistral", "qwen2", "qwen3", "gemma3"])
def test_every_family_has_transformers_weights(family: str, tiny_models: TinyModels) -> None:
    """R53: biases are reordered with their rows; Qwen and Gemma are in transformers' order already."""
    agree(open_model(tiny_models.gguf(family)), tiny_models.get(family))


def test_plain_tensors_are_views_of_the_file(tiny_models: TinyModels) -> None:
    checkpoint = open_model(tiny_models.gguf("llama", "Q8_0"))
    assert checkpoint.tensors["layers.0.v"].data.base is not None
    assert not checkpoint.tensors["layers.0.v"].data.flags.writeable
    stored = sum(checkpoint.tensors[n].nbytes for n in checkpoint.tensors)
    assert checkpoint.nbytes == stored


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_spec_is_that_of_transformers(family: str, tiny_models: TinyModels) -> None:
    found = open_model(tiny_models.gguf(family)).spec
    expected = tiny.spec_of(tiny_models.get(family).model)
    assert found.layers == expected.layers and found.tied == expected.tied
    names = (
        "hidden heads kv_heads head_dim intermediate vocab activation logit_softcap qkv_bias o_bias qk_norm post_norms"
    )
    for name in names.split():
        assert getattr(found, name) == getattr(expected, name), name
    assert found.scale == pytest.approx(expected.scale) and found.embed_scale == pytest.approx(expected.embed_scale)
    assert found.norm_eps == pytest.approx(expected.norm_eps)
    assert len(found.ropes) == len(expected.ropes)
    for ours, theirs in zip(found.ropes, expected.ropes, strict=True):
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=3e-7)
        assert ours.scale == pytest.approx(theirs.scale, rel=1e-6)


# ---- files made by hand ---------------------------------------------------------------------------------------------


def tensors_of(hidden: int = 64, rows: int = 96) -> dict[str, np.ndarray]:
    """The tensors of a one-layer Llama with 4 query and 2 key-value heads."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (rows, hidden),
        "output_norm.weight": (hidden,),
        "blk.0.attn_norm.weight": (hidden,),
        "blk.0.attn_q.weight": (hidden, hidden),
        "blk.0.attn_k.weight": (hidden // 2, hidden),
        "blk.0.attn_v.weight": (hidden // 2, hidden),
        "blk.0.attn_output.weight": (hidden, hidden),
        "blk.0.ffn_norm.weight": (hidden,),
        "blk.0.ffn_gate.weight": (32, hidden),
        "blk.0.ffn_up.weight": (32, hidden),
        "blk.0.ffn_down.weight": (hidden, 32),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(
        tensors: dict[str, np.ndarray] | None = None,
        arch: str = "llama",
        raw: dict[str, str] | None = None,
        **keys: Any,
    ) -> Path:
        """``keys`` replace the architecture's (None: left out); ``__`` is a dot."""
        path = tmp_path / "made.gguf"
        path.unlink(missing_ok=True)
        writer = gguf.GGUFWriter(path, arch)
        settings = {
            "context_length": 128,
            "embedding_length": 64,
            "block_count": 1,
            "feed_forward_length": 32,
            "attention__head_count": 4,
            "attention__head_count_kv": 2,
            "attention__layer_norm_rms_epsilon": 1e-5,
            **keys,
        }
        for key, value in settings.items():
            name = key.replace("__", ".")
            name = name if name.startswith(("general.", "tokenizer.")) else f"{arch}.{name}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, list):
                writer.add_array(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            elif value is not None:
                writer.add_uint32(name, value)
        for name, array in (tensors if tensors is not None else tensors_of()).items():
            kind = (raw or {}).get(name)
            if kind:
                writer.add_tensor(name, array, raw_dtype=GGMLQuantizationType[kind])
            else:
                writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return to_file


def test_no_output_tensor_means_a_tied_head(write: Write) -> None:
    """R57 (sglang PR 1508; vLLM PR 6758): as llama.cpp reads it."""
    checkpoint = open_model(write())
    assert checkpoint.spec.tied and "head" not in checkpoint.tensors


def test_an_output_tensor_is_the_head(write: Write) -> None:
    """R57: a separate head, and one that repeats the embedding."""
    tensors = tensors_of()
    for head in (-tensors["token_embd.weight"], tensors["token_embd.weight"]):
        checkpoint = open_model(write({**tensors, "output.weight": head}))
        assert not checkpoint.spec.tied
        assert np.array_equal(values(checkpoint.tensors["head"]), head)


@pytest.mark.parametrize("name", list(tensors_of()))
def test_a_missing_tensor_is_named(name: str, write: Write) -> None:
    """R57: loud, not zero or random."""
    tensors = tensors_of()
    del tensors[name]
    with pytest.raises(ModelError, match=rf"lacks tensor {name}"):
        open_model(write(tensors))


@pytest.mark.parametrize("name", list(tensors_of())[1:])
def test_a_wrong_shape_names_both(name: str, write: Write) -> None:
    tensors = tensors_of()
    tensors[name] = np.zeros((48, *tensors[name].shape[1:]), np.float32)
    with pytest.raises(ModelError, match=rf"{name} has shape \(48,.*is needed"):
        open_model(write(tensors))


def test_other_tensor_types_are_refused_by_name(write: Write) -> None:
    tensors = tensors_of(hidden=256)
    tensors["blk.0.ffn_gate.weight"] = np.zeros((32, 136), np.uint8)
    path = write(tensors, raw={"blk.0.ffn_gate.weight": "IQ4_XS"}, embedding_length=256)
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate\.weight is of type IQ4_XS.*Q4_K"):
        open_model(path)


def test_a_quantised_norm_is_refused(write: Write) -> None:
    tensors = tensors_of()
    tensors["output_norm.weight"] = np.zeros(68, np.uint8)
    with pytest.raises(ModelError, match=r"output_norm\.weight is Q8_0; a norm"):
        open_model(write(tensors, raw={"output_norm.weight": "Q8_0"}))


def test_unknown_tensors_are_named_in_the_log_but_rotary_buffers_are_not(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = tensors_of()
    extra = {"vision.thing": np.zeros(4, np.float32), "blk.0.attn_rot_embd.weight": np.zeros(8, np.float32)}
    with caplog.at_level(logging.INFO, "octavo.loading"):
        open_model(write({**tensors, **extra}))
    assert "1 tensors are not used: vision.thing" in caplog.text


def test_more_rows_than_tokens_is_padding_fewer_is_an_error(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo.loading"):
        checkpoint = open_model(write(tokenizer__ggml__tokens=[f"t{i}" for i in range(90)]))
    assert checkpoint.spec.vocab == 96 and "96 rows for 90 tokens" in caplog.text
    with pytest.raises(ModelError, match="has 97 tokens, but the embedding has 96 rows"):
        open_model(write(tokenizer__ggml__tokens=[f"t{i}" for i in range(97)]))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"arch": "mamba"}, "architecture 'mamba'.*llama, qwen2"),
    "experts": ({"expert_count": 8}, r"llama\.expert_count is 8 \(a mixture of experts\)"),
    "partial rotary": ({"rope__dimension_count": 8}, r"rope\.dimension_count 8.*partial rotary"),
    "rope type": ({"rope__scaling__type": "longrope"}, "type 'longrope'"),
    "value length": ({"attention__value_length": 32}, r"attention\.value_length differs"),
    "huge head": ({"attention__key_length": 100_000}, r"attention\.key_length is 100000, outside 1 to 4096"),
    "huge width": ({"embedding_length": 4_000_000}, r"attention\.key_length is 1000000, outside 1 to 4096"),
    "uneven heads": ({"attention__head_count_kv": 3}, "4 query heads can't share 3"),
    "heads by layer": ({"attention__head_count": [4, 2]}, r"attention\.head_count differs between layers"),
    "no layers": ({"block_count": 0}, r"llama\.block_count is 0, outside 1"),
    "too many layers": ({"block_count": 4_000_000_000}, r"llama\.block_count is 4000000000"),
    "missing": ({"embedding_length": None}, r"llama\.embedding_length is missing"),
    "wrong type": ({"context_length": "long"}, r"llama\.context_length must be an integer, not 'long'"),
    "epsilon": ({"attention__layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
    "rope base": ({"rope__freq_base": 0.5}, r"rope\.freq_base is 0\.5"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_metadata_that_cannot_be_run_is_refused_by_name(name: str, write: Write) -> None:
    settings, why = REFUSED[name]
    with pytest.raises(ModelError, match=why):
        open_model(write(**settings))


def test_flipped_bytes_in_a_whole_model_are_a_model_or_an_error(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Beyond the reader: what a lying header says of widths, layers and types costs an error, not memory."""
    for family in ("gemma3", "llama-yarn"):
        raw = tiny_models.gguf(family, "Q8_0").read_bytes()
        begin, names = raw.index(b"tokenizer.ggml.model"), raw.index(b"token_embd.weight")
        end = gguf.GGUFReader(tiny_models.gguf(family, "Q8_0")).data_offset
        rng = random.Random(family)
        for trial in range(600):
            bad = bytearray(raw)
            for _ in range(rng.choice((1, 1, 2, 4))):
                at = rng.choice((rng.randrange(begin), rng.randrange(names, end)))  # the vocabulary is long and dull
                bad[at] = rng.choice((0, 1, 4, 6, 8, 9, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            path = tmp_path / f"{trial % 2}.gguf"
            path.unlink(missing_ok=True)  # never write into a file that is mapped
            path.write_bytes(bad)
            try:
                checkpoint = open_model(path)
            except ModelError:
                continue
            assert sum(len(checkpoint.tensors[n].data) for n in checkpoint.tensors) < 2 * len(raw)


def test_a_value_for_each_layer_is_fine_when_all_are_alike(write: Write) -> None:
    assert open_model(write(attention__head_count=[4], feed_forward_length=[32])).spec.heads == 4


def test_llama3_factors_must_fit(write: Write) -> None:
    for bad in (np.ones(7, np.float32), np.zeros(8, np.float32), np.full(8, np.nan, np.float32)):
        with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
            open_model(write({**tensors_of(), "rope_freqs.weight": bad}))
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    plain = open_model(write()).spec.ropes[0].inv_freq
    scaled = open_model(write({**tensors_of(), "rope_freqs.weight": factors})).spec.ropes[0].inv_freq
    np.testing.assert_allclose(np.array(scaled) * factors, plain, rtol=1e-6)


def test_context_is_the_models_or_less(write: Write) -> None:
    path = write()
    assert open_model(path).spec.max_context == 128
    assert open_model(path, context=100).spec.max_context == 100
    with pytest.raises(ConfigError, match="context 129 is longer than the 128 tokens"):
        open_model(path, context=129)
    with pytest.raises(ConfigError, match="context must be a positive number"):
        open_model(path, context=0)


def test_end_tokens_and_sampling_defaults(write: Write) -> None:
    """R60: all of the file's end tokens, once each, and its recommended sampling."""
    path = write(
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=7,
        tokenizer__ggml__eom_token_id=7,
        general__sampling__temp=0.25,
        general__sampling__top_k=20,
        general__license="mit",
    )
    checkpoint = open_model(path)
    assert checkpoint.generation == {"eos_token_ids": [2, 7], "temperature": 0.25, "top_k": 20}
    assert checkpoint.license == "mit" and checkpoint.format == "gguf" and checkpoint.folder is None
    assert open_model(write()).generation == {"eos_token_ids": []}


def test_sliding_windows(write: Write) -> None:
    """Mistral is a "llama" with a window everywhere, unless a pattern says where."""
    two = tensors_of()
    two.update({k.replace("blk.0", "blk.1"): v for k, v in two.items() if k.startswith("blk.0")})

    def windows(**keys: Any) -> list[int | None]:
        return [layer.window for layer in open_model(write(two, block_count=2, **keys)).spec.layers]

    assert windows() == [None, None]
    assert windows(attention__sliding_window=16) == [16, 16]
    assert windows(attention__sliding_window=16, attention__sliding_window_pattern=2) == [16, None]
    assert windows(attention__sliding_window=16, attention__sliding_window_pattern=[False, True]) == [None, 16]
    with pytest.raises(ModelError, match="sliding_window_pattern must have a flag for each of 2"):
        windows(attention__sliding_window=16, attention__sliding_window_pattern=[False])


def test_fingerprint_is_of_the_content(write: Write) -> None:
    first = open_model(write()).fingerprint()
    assert first == open_model(write()).fingerprint() and len(first) == 64
    changed = tensors_of()
    changed["blk.0.ffn_up.weight"][3, 5] += 1
    assert open_model(write(changed)).fingerprint() != first
    assert open_model(write(), context=64).fingerprint() != first


def test_a_split_model_is_one_model(tmp_path: Path) -> None:
    tensors = tensors_of()
    names = list(tensors)
    for part, chosen in enumerate((names[:5], names[5:])):
        writer = gguf.GGUFWriter(tmp_path / f"m-{part + 1:05}-of-00002.gguf", "llama")
        if part == 0:
            writer.add_context_length(128)
            writer.add_embedding_length(64)
            writer.add_block_count(1)
            writer.add_feed_forward_length(32)
            writer.add_head_count(4)
            writer.add_head_count_kv(2)
            writer.add_layer_norm_rms_eps(1e-5)
        writer.add_uint16("split.no", part)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(names))
        for name in chosen:
            writer.add_tensor(name, tensors[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    for path in (tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf", tmp_path):
        checkpoint = open_model(path)
        assert len(checkpoint.files) == 2
        assert np.array_equal(values(checkpoint.tensors["layers.0.down"]), tensors["blk.0.ffn_down.weight"])
