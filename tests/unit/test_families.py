"""Configurations to specs: every family against transformers, and everything that is refused by name (R60's files)."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import tiny
from conftest import TinyModels
from octavo.errors import ModelError
from octavo.loading import open_model
from octavo.models.families import spec_from_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}


def spec_with(**changes: Any) -> Any:
    return spec_from_config("folder/config.json", {**LLAMA, **changes}, ())


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_spec_of_a_saved_folder_is_that_of_transformers(family: str, tiny_models: TinyModels) -> None:
    found = open_model(tiny_models.folder(family)).spec
    expected = tiny.spec_of(tiny_models.get(family).model)
    ignored = {"family", "ropes", "max_context", "attention_scale", "embed_scale"}
    for name in found.__dataclass_fields__.keys() - ignored:
        assert getattr(found, name) == getattr(expected, name), name
    assert found.scale == pytest.approx(expected.scale) and found.embed_scale == pytest.approx(expected.embed_scale)
    for ours, theirs in zip(found.ropes, expected.ropes, strict=True):
        np.testing.assert_allclose(ours.inv_freq, theirs.inv_freq, rtol=2e-7)
        assert ours.scale == pytest.approx(theirs.scale)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model type": ({"model_type": "mamba"}, "model_type 'mamba' is not one that Octavo runs.*llama"),
    "no model type": ({"model_type": None}, "model_type is missing"),
    "architecture": ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
    "activation": ({"hidden_act": "relu2"}, "hidden_act is 'relu2'"),
    "experts": ({"num_local_experts": 8}, "num_local_experts is 8 .a mixture of experts"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is set"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5"),
    "uneven heads": ({"num_key_value_heads": 3}, "4 query heads can't share 3"),
    "huge head": ({"head_dim": 100_000}, "head_dim is 100000, outside 1 to 4096"),
    "odd head": ({"head_dim": 33}, "head dimension 33 is odd"),
    "missing": ({"hidden_size": None}, "hidden_size is missing"),
    "text": ({"hidden_size": "128"}, "hidden_size must be an integer, not '128'"),
    "true": ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, not True"),
    "float": ({"vocab_size": 32.0}, r"vocab_size must be an integer, not 32\.0"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads is 0, outside 1"),
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, outside 1 to 4096"),
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps is 0, outside"),
    "base": ({"rope_theta": 1.0}, "rope_theta is 1.0, outside"),
    "tied": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    "architectures": ({"architectures": "LlamaForCausalLM"}, "architectures must be a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_run_is_refused_by_name(name: str) -> None:
    changes, why = REFUSED[name]
    with pytest.raises(ModelError, match=why) as error:
        spec_with(**changes)
    assert "config.json" in str(error.value)


NONSENSE: list[Any] = [
    *(
        None,
        True,
        0,
        -1,
        3,
        10**9,
        10**30,
        0.5,
        float("nan"),
        float("inf"),
        1e300,
        "x",
        "",
        [],
        [1],
        ["full_attention"],
    ),
    *({}, {"rope_type": "yarn"}, {"rope_type": "dynamic", "factor": 1e9}, {"factor": 2}),
]


def test_nonsense_anywhere_is_a_spec_or_a_model_error() -> None:
    """Any key may hold anything: no other exception, and nothing as large as a lying head dimension."""
    rng = random.Random(5)
    starts = [LLAMA, {**LLAMA, "model_type": "qwen3", "architectures": None}, {**GEMMA, "head_dim": 64}]
    more = ["rope_scaling", "rope_parameters", "rope_theta", "text_config", "layer_types", "sliding_window", "head_dim"]
    more += ["sliding_window_pattern", "query_pre_attn_scalar", "original_max_position_embeddings", "num_experts"]
    specs = 0
    for _ in range(3000):
        start = rng.choice(starts)
        keys = rng.choices([*start, *more], k=rng.choice((1, 1, 2, 3)))
        try:
            spec_from_config("c", {**start, **{k: rng.choice(NONSENSE) for k in keys}}, ())
            specs += 1
        except ModelError:
            pass
    assert 0 < specs < 3000


def test_head_dim_and_kv_heads_are_the_files() -> None:
    assert (spec_with().head_dim, spec_with().kv_heads) == (32, 2)
    assert spec_with(head_dim=48).head_dim == 48 and spec_with(head_dim=None).head_dim == 32
    assert spec_with(num_key_value_heads=None).kv_heads == 4
    assert spec_with(architectures=None) == spec_with()


def test_mistral_windows() -> None:
    def windows(**changes: Any) -> list[int | None]:
        found = spec_with(model_type="mistral", architectures=["MistralForCausalLM"], **changes)
        return [layer.window for layer in found.layers]

    assert windows(sliding_window=16) == [16, 16]
    assert windows(sliding_window=None) == [None, None]
    assert windows() == [transformers.MistralConfig().sliding_window] * 2


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows(model_type: str) -> None:
    """As transformers decides it: switched on, from max_window_layers on, or by layer_types."""
    cases: list[dict[str, Any]] = [
        {},
        {"sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ]
    prefix = model_type.capitalize()
    for changes in cases:
        config = getattr(transformers, prefix + "Config")(**{**LLAMA, **changes})
        expected = [config.sliding_window if t == "sliding_attention" else None for t in config.layer_types]
        found = spec_with(model_type=model_type, architectures=[prefix + "ForCausalLM"], **changes)
        assert [layer.window for layer in found.layers] == expected, changes
        saved = {**config.to_dict(), "model_type": model_type, "architectures": [prefix + "ForCausalLM"]}
        assert [layer.window for layer in spec_from_config("c", saved, ()).layers] == expected, changes


def test_layer_types_that_make_no_sense() -> None:
    def qwen(**changes: Any) -> Any:
        return spec_with(model_type="qwen2", architectures=["Qwen2ForCausalLM"], **changes)

    with pytest.raises(ModelError, match="layer of type 'chunked_attention'"):
        qwen(layer_types=["chunked_attention", "full_attention"])
    with pytest.raises(ModelError, match="layer_types names 1 layers, but the model has 2"):
        qwen(layer_types=["full_attention"])
    with pytest.raises(ModelError, match="layer_types has sliding layers, but use_sliding_window"):
        qwen(layer_types=["sliding_attention", "full_attention"])


GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def test_gemma_defaults_are_transformers() -> None:
    """A configuration that says nothing, and a multimodal one whose text_config has only what differs."""
    theirs = transformers.Gemma3TextConfig()
    for config in (
        GEMMA,
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"head_dim": 256}},
    ):
        spec = spec_from_config("c", config, ())
        found = (spec.vocab, spec.hidden, spec.intermediate, len(spec.layers), spec.heads, spec.kv_heads, spec.head_dim)
        assert found == (
            theirs.vocab_size,
            theirs.hidden_size,
            theirs.intermediate_size,
            theirs.num_hidden_layers,
            theirs.num_attention_heads,
            theirs.num_key_value_heads,
            theirs.head_dim,
        )
        expected = [theirs.sliding_window if t == "sliding_attention" else None for t in theirs.layer_types]
        assert [layer.window for layer in spec.layers] == expected
        assert spec.max_context == theirs.max_position_embeddings and spec.tied and spec.norm_eps == theirs.rms_norm_eps
        assert spec.activation == "gelu_tanh" and spec.scale == theirs.query_pre_attn_scalar**-0.5


def test_gemma_settings() -> None:
    spec = spec_from_config(
        "c",
        {
            **GEMMA,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 6,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
            "query_pre_attn_scalar": 144,
            "sliding_window": 512,
        },
        (),
    )
    assert [layer.window for layer in spec.layers] == [512, 512, None, 512, 512, None]
    assert [layer.rope for layer in spec.layers] == [1, 1, 0, 1, 1, 0]
    # transformers has no cap on Gemma 3's scores
    assert (spec.logit_softcap, spec.attention_softcap, spec.scale) == (30.0, 0.0, 1 / 12)
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        spec_from_config("c", {**GEMMA, "use_bidirectional_attention": True}, ())
    with pytest.raises(ModelError, match="hidden_activation is 'gelu'"):
        spec_from_config("c", {**GEMMA, "hidden_activation": "gelu"}, ())


# ---- generation defaults (R60) and what else lies in a folder --------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.make("llama").save(tmp_path / "model")


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    values.update(changes)
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def test_all_end_tokens_and_the_defaults_are_read(folder: Path) -> None:
    """R60 (vLLM 4180, PR 4182, 45591): eos [2, 7] in one file, 2 in the other, temperature 0.3."""
    edit(folder / "config.json", eos_token_id=[2, 7])
    edit(folder / "generation_config.json", eos_token_id=2, temperature=0.3, do_sample=True, top_k=None, max_length=20)
    generation = open_model(folder).generation
    assert generation == {"eos_token_ids": [2, 7], "temperature": 0.3, "do_sample": True}
    edit(folder / "config.json", eos_token_id=7)
    edit(folder / "generation_config.json", eos_token_id=[2, 5], top_p=0.9, repetition_penalty=1.1)
    generation = open_model(folder).generation
    assert generation["eos_token_ids"] == [2, 5, 7]
    assert generation["top_p"] == 0.9 and generation["repetition_penalty"] == 1.1


def test_a_folder_without_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    assert open_model(folder).generation == {"eos_token_ids": []}


def test_bad_generation_values(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "generation_config.json", temperature="hot", top_p=0.5)
    with caplog.at_level(logging.WARNING, "octavo.loading"):
        assert "temperature" not in open_model(folder).generation
    assert "temperature is 'hot'" in caplog.text
    edit(folder / "generation_config.json", eos_token_id=[1, "x"])
    with pytest.raises(ModelError, match="eos_token_id holds 'x'"):
        open_model(folder)


def test_license_and_name(folder: Path) -> None:
    assert open_model(folder).license is None and open_model(folder).license_text() is None
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# Model\nlicense: none\n")
    (folder / "LICENSE").write_text("Do as you like.")
    checkpoint = open_model(folder)
    assert checkpoint.license == "apache-2.0" and checkpoint.license_text() == "Do as you like."
    assert checkpoint.name == "model" and checkpoint.folder == folder and checkpoint.metadata is None


def test_fingerprint_knows_weights_tokenizer_and_template(folder: Path) -> None:
    first = open_model(folder).fingerprint()
    assert open_model(folder).fingerprint() == first
    edit(folder / "tokenizer.json", version="9")
    assert open_model(folder).fingerprint() != first
    second = open_model(folder).fingerprint()
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    assert open_model(folder).fingerprint() != second
