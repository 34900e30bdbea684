"""Llama 2 and 3, and what is built like them (SmolLM2, TinyLlama); in GGUF, Mistral too."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.base import Source, config_base, gguf_base, gguf_slides, windowed
from octavo.models.spec import ModelSpec


def from_config(source: Source) -> ModelSpec:
    bias = source.fields.flag("attention_bias", False)
    return replace(config_base(source, "llama"), qkv_bias=bias, o_bias=bias)


def from_gguf(source: Source) -> ModelSpec:
    spec = gguf_base(source, "llama")
    spec = replace(spec, o_bias="blk.0.attn_output.bias" in source.tensors)
    window = source.fields.integer("attention.sliding_window", 0, low=0)
    if not window:
        return spec
    count = len(spec.layers)
    return windowed(spec, window, gguf_slides(source.fields, count, None) or [True] * count)
