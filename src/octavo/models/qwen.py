"""Qwen2 (biases on queries, keys and values) and Qwen3 (a norm on each query and key head instead)."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.base import Source, config_base, config_slides, gguf_base, gguf_slides, windowed, with_defaults
from octavo.models.spec import ModelSpec


def qwen2_from_config(source: Source) -> ModelSpec:
    source = with_defaults(source, max_position_embeddings=32_768, num_key_value_heads=32)
    return replace(_slide(source, config_base(source, "qwen2")), qkv_bias=True)


def qwen3_from_config(source: Source) -> ModelSpec:
    source = with_defaults(source, max_position_embeddings=32_768, num_key_value_heads=32, head_dim=128)
    spec = _slide(source, config_base(source, "qwen3"))
    bias = source.fields.flag("attention_bias", False)
    return replace(spec, qk_norm=True, qkv_bias=bias, o_bias=bias)


def _slide(source: Source, spec: ModelSpec) -> ModelSpec:
    """The first ``max_window_layers`` layers see everything, unless ``layer_types`` says which do."""
    c = source.fields
    window = c.integer("sliding_window", 4096) if c.flag("use_sliding_window", False) else None
    if window is not None and "sliding_window" in c.values and not c.has("sliding_window"):
        window = None
    first = c.integer("max_window_layers", 28, low=0)
    slides = config_slides(c, len(spec.layers))
    if slides is None:
        slides = [window is not None and i >= first for i in range(len(spec.layers))]
    if not any(slides):
        return spec
    if window is None:
        raise c.fail("layer_types", "has sliding layers, but use_sliding_window or sliding_window is not set")
    return windowed(spec, window, slides)


def qwen2_from_gguf(source: Source) -> ModelSpec:
    return replace(_gguf_slide(source, gguf_base(source, "qwen2")), qkv_bias=True)


def qwen3_from_gguf(source: Source) -> ModelSpec:
    spec = replace(gguf_base(source, "qwen3"), o_bias="blk.0.attn_output.bias" in source.tensors)
    return replace(_gguf_slide(source, spec), qk_norm=True)


def _gguf_slide(source: Source, spec: ModelSpec) -> ModelSpec:
    """A window counts only with a pattern: without one, files carry the length of a window that is switched off."""
    window = source.fields.integer("attention.sliding_window", 0, low=0)
    slides = gguf_slides(source.fields, len(spec.layers), None)
    return windowed(spec, window, slides) if window and slides else spec
