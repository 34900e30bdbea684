"""R58 (vLLM PR 1956, 10537; ANEForge PR 58): rope scalings against transformers, in old and new key names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tiny
from octavo.errors import ModelError
from octavo.loading import open_model
from octavo.models.families import spec_from_config
from octavo.models.fields import Fields
from octavo.models.rope import Scaling, from_gguf, rope, yarn_attention
from octavo.models.spec import RopeSpec

LENGTH = 256  # max_position_embeddings of all configurations here
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "llama3, other bounds": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 2, "high_freq_factor": 16},
    "llama3, original absent": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": None},
    "yarn": {"rope_type": "yarn", **YARN},
    "yarn, attention factor": {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
    "yarn, mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn, one mscale": {"rope_type": "yarn", **YARN, "mscale": 0.7},
    "yarn, betas": {"rope_type": "yarn", **YARN, "beta_fast": 8, "beta_slow": 2},
    "yarn, not truncated": {"rope_type": "yarn", **YARN, "truncate": False},
    "yarn, original absent": {"rope_type": "yarn", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
SHAPES = {"head 64": (64, 10_000.0), "head 128": (128, 500_000.0), "head 32": (32, 1e6), "head 96": (96, 12_345.0)}


def clean(scaling: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in scaling.items() if v is not None}


def config(head_dim: int, **settings: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": head_dim,
        "max_position_embeddings": LENGTH,
        **settings,
    }


def ours(head_dim: int, context: int | None = None, **settings: Any) -> RopeSpec:
    return spec_from_config("config.json", config(head_dim, **settings), (), context).ropes[0]


def rotary(head_dim: int, base: float, scaling: dict[str, Any]) -> torch.nn.Module:
    own = {k: v for k, v in config(head_dim).items() if k not in ("model_type", "architectures")}
    made = transformers.LlamaConfig(**own, rope_parameters={**clean(scaling), "rope_theta": base})
    module: torch.nn.Module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(made)
    return module


def cos_sin(spec: RopeSpec, positions: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """As the contract of RopeSpec has it: float32 angles, both halves the same."""
    angles = np.array(positions, np.float32)[:, None] * np.array(spec.inv_freq, np.float32)
    angles = np.concatenate([angles, angles], axis=1).astype(np.float64)
    return np.cos(angles) * spec.scale, np.sin(angles) * spec.scale


def compare(spec: RopeSpec, module: torch.nn.Module, positions: list[int]) -> None:
    theirs = module(torch.zeros(1), torch.tensor([positions]))
    for a, b in zip(cos_sin(spec, positions), theirs, strict=True):
        np.testing.assert_allclose(a, b[0].numpy(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCALINGS)
def test_cosines_and_sines_are_those_of_transformers(name: str, shape: str) -> None:
    """At positions 1, 100 and beyond the original length; all but the last digit of the frequencies too."""
    head_dim, base = SHAPES[shape]
    scaling = SCALINGS[name]
    module = rotary(head_dim, base, scaling)
    # transformers' dynamic frequencies move with the longest position seen: pin ours to what it has served.
    longest = 150 if scaling["rope_type"] == "dynamic" else None
    spec = ours(head_dim, longest, rope_parameters={**clean(scaling), "rope_theta": base})
    np.testing.assert_allclose(spec.inv_freq, module.inv_freq.numpy(), rtol=2e-7)  # type: ignore[union-attr,operator]
    assert spec.scale == pytest.approx(module.attention_scaling)
    compare(spec, module, [0, 1, 63, 64, 100, 149])


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_key_names_mean_the_same(name: str) -> None:
    scaling = clean(SCALINGS[name])
    new = ours(64, rope_parameters={**scaling, "rope_theta": 20_000.0})
    old = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    assert ours(64, rope_scaling=old, rope_theta=20_000.0) == new
    assert ours(64, rope_scaling=scaling, rope_theta=20_000.0) == new
    assert ours(64, rope_scaling={**scaling, "rope_theta": 20_000.0}) == new


@pytest.mark.parametrize("served", [300, 400, 512, 1000])
def test_dynamic_frequencies_are_fixed_at_the_served_length(served: int) -> None:
    """Equal to transformers once it has seen that many tokens, for every position of the prompt."""
    module = rotary(64, 10_000.0, SCALINGS["dynamic"])
    spec = ours(64, served, rope_parameters={**SCALINGS["dynamic"], "rope_theta": 10_000.0})
    compare(spec, module, [1, 100, LENGTH, served - 1])
    assert spec != ours(64, LENGTH, rope_parameters={**SCALINGS["dynamic"], "rope_theta": 10_000.0})


def test_dynamic_serves_the_stretched_length_by_default() -> None:
    spec = spec_from_config("c", config(64, rope_scaling=SCALINGS["dynamic"]), ())
    assert spec.max_context == 2 * LENGTH
    assert spec.ropes[0] == ours(64, 2 * LENGTH, rope_scaling=SCALINGS["dynamic"])


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 4 * LENGTH),
        ({"rope_type": "llama3", **LLAMA3}, LENGTH),
        ({"rope_type": "yarn", **YARN}, LENGTH),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": LENGTH}, 4 * LENGTH),
    ],
)
def test_how_long_a_scaled_model_is(scaling: dict[str, Any], context: int) -> None:
    assert spec_from_config("c", config(64, rope_scaling=scaling), ()).max_context == context


def test_the_old_place_of_the_original_length_has_priority() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    assert ours(64, rope_scaling=scaling, original_max_position_embeddings=64) == ours(
        64, rope_scaling={**scaling, "original_max_position_embeddings": 64}
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "longrope": ({"rope_type": "longrope", "factor": 2.0}, "type 'longrope', which Octavo doesn't support"),
    "made up": ({"type": "spiral", "factor": 2.0}, "type 'spiral'"),
    "no factor": ({"rope_type": "linear"}, "factor is missing"),
    "factor 0": ({"rope_type": "linear", "factor": 0}, "factor is 0, outside"),
    "factor NaN": ({"rope_type": "yarn", **YARN, "factor": float("nan")}, "factor is nan"),
    "factor text": ({"rope_type": "linear", "factor": "2"}, "factor must be a number, not '2'"),
    "type number": ({"rope_type": 3}, "rope_type must be a string"),
    "equal bounds": ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "must differ"),
    "partial": ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "multimodal": ({"rope_type": "default", "mrope_section": [1, 2, 3]}, "mrope_section"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_scaling_that_is_unknown_or_broken_is_refused(name: str) -> None:
    scaling, why = REFUSED[name]
    for key in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelError, match=why):
            ours(64, **{key: scaling})
    with pytest.raises(ModelError, match="rope_scaling must be an object"):
        ours(64, rope_scaling=[1])


def test_gguf_yarn_factor_multiplies_the_papers() -> None:
    """ggml computes 0.1 ln(factor) + 1 itself; its attn_factor comes on top."""

    def read(**keys: Any) -> Scaling:
        return from_gguf(Fields("f", {f"rope.scaling.{k}": v for k, v in keys.items()}), 256)

    plain = read(type="yarn", factor=4.0, original_context_length=64)
    assert plain == Scaling("yarn", 4.0, 64)
    doubled = read(type="yarn", factor=4.0, original_context_length=64, attn_factor=2.0)
    assert yarn_attention(doubled) == pytest.approx(2 * yarn_attention(plain))
    assert read() == read(type="none") == read(type="linear", factor=1.0) == Scaling()
    assert read(factor=4.0) == Scaling("linear", 4.0, 256)
    with pytest.raises(ModelError, match="yarn_log_multiplier"):
        read(type="yarn", factor=4.0, yarn_log_multiplier=0.1)
    with pytest.raises(ModelError, match="yarn_ext_factor"):
        read(type="yarn", factor=4.0, yarn_ext_factor=0.5)


def test_a_scaled_rope_is_the_same_on_every_machine() -> None:
    """Golden values: powers come from float64, so that no vector library decides a bit."""
    spec = rope(64, 10_000.0, Scaling("llama3", 8.0, 64), 0)
    assert np.float32(spec.inv_freq[0]) == np.float32(1)
    found = np.array(rope(8, 10_000.0, Scaling(), 0).inv_freq, np.float32)
    assert found.tolist() == np.array([1.0, 0.1, 0.01, 0.001], np.float32).tolist()


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", **YARN}])
@pytest.mark.parametrize("kinds", ["full", "both"])
def test_gemma_has_two_embeddings_and_each_its_scaling(scaling: dict[str, Any], kinds: str) -> None:
    parameters: dict[str, Any] = {
        "full_attention": {**scaling, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    if kinds == "both":
        parameters["sliding_attention"] = {**scaling, "factor": 2.0, "rope_theta": 2e4}
    model = tiny.build("gemma3", wide=False, seed=0, rope_parameters=parameters)
    made = {"architectures": ["Gemma3ForCausalLM"], **model.config.to_dict()}
    spec = spec_from_config("c", made, ())
    expected = tiny.spec_of(model)
    assert spec.max_context == tiny.CONTEXT
    for a, b in zip(spec.ropes, expected.ropes, strict=True):
        np.testing.assert_allclose(a.inv_freq, b.inv_freq, rtol=2e-7)
        assert a.scale == pytest.approx(b.scale)


def test_gemma_old_key_names() -> None:
    base = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 64}
    old = {**base, "rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8}}
    new = {
        **base,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 2e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
    }
    assert spec_from_config("c", old, ()).ropes == spec_from_config("c", new, ()).ropes
    default = spec_from_config("c", base, ()).ropes
    assert default == (rope(64, 1e6, Scaling(), 0), rope(64, 1e4, Scaling(), 0))


def test_saved_scalings_come_through_a_folder(tmp_path: Path) -> None:
    """What transformers itself saves, read back by us: frequencies and attention factor."""
    for name in ("llama3-rope", "llama-yarn-factor", "llama-linear"):
        model = tiny.make(name)
        spec = open_model(model.save(tmp_path / name)).spec
        np.testing.assert_allclose(spec.ropes[0].inv_freq, tiny.spec_of(model.model).ropes[0].inv_freq, rtol=2e-7)
        assert spec.ropes[0].scale == pytest.approx(tiny.spec_of(model.model).ropes[0].scale)
