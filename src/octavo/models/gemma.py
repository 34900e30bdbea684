"""Gemma 3 text: windowed and full layers with a rotary base each, norms on queries and keys and after each part."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from octavo.models import rope
from octavo.models.base import Source, config_base, config_slides, gguf_base, gguf_slides, windowed, with_defaults
from octavo.models.fields import Fields
from octavo.models.spec import ModelSpec, RopeSpec

GLOBAL, LOCAL = 0, 1  # places in ModelSpec.ropes
LAYERS_OF_27B = 62  # GGUF doesn't say by what the queries are scaled; only this size departs from the head dimension

# What transformers assumes: a multimodal file's text_config has only what differs.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


def _gemma(spec: ModelSpec, local: RopeSpec, **changes: float) -> ModelSpec:
    """Completes a spec whose windows are set: windowed layers turn with the local base."""
    layers = tuple(replace(layer, rope=GLOBAL if layer.window is None else LOCAL) for layer in spec.layers)
    return replace(
        spec,
        layers=layers,
        ropes=(spec.ropes[GLOBAL], local),
        embed_scale=float(np.float32(math.sqrt(spec.hidden))),
        qk_norm=True,
        post_norms=True,
        **changes,  # type: ignore[arg-type]
    )


def from_config(source: Source) -> ModelSpec:
    """``rope_theta``, ``rope_local_base_freq`` and ``rope_scaling`` (of full layers) in old files; newer ones nest."""
    source = with_defaults(source, **DEFAULTS)
    c = source.fields
    if c.raw("use_bidirectional_attention"):
        raise c.refuse("use_bidirectional_attention is set")
    # The rotary embeddings are read here, two of them; and no scaling makes the length in the file longer.
    plain = {k: v for k, v in c.values.items() if k not in ("rope_scaling", "rope_parameters")}
    spec = config_base(replace(source, fields=Fields(c.source, plain)), "gemma3", "hidden_activation")
    count, bias = len(spec.layers), c.flag("attention_bias", False)
    every = c.integer("sliding_window_pattern", 6)
    slides = config_slides(c, count) or [(i + 1) % every != 0 for i in range(count)]
    spec = replace(
        windowed(spec, c.integer("sliding_window"), slides),
        ropes=(_rope(c, spec, "full_attention"),),
        attention_scale=c.number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=c.number("final_logit_softcapping", 0.0, low=-1e-9),
        qkv_bias=bias,
        o_bias=bias,
    )
    return _gemma(spec, _rope(c, spec, "sliding_attention"))


def _rope(c: Fields, spec: ModelSpec, kind: str) -> RopeSpec:
    full = kind == "full_attention"
    parameters = c.inner("rope_parameters").inner(kind)
    base = c.number(*(("rope_theta", 1e6) if full else ("rope_local_base_freq", 1e4)), low=1.0)
    base = parameters.number("rope_theta", base, low=1.0)
    if full and c.has("rope_scaling"):
        parameters = c.inner("rope_scaling")
    scaling = rope.from_config(c, parameters, c.integer("max_position_embeddings"))
    return rope.rope(spec.head_dim, base, scaling, spec.max_context)


def from_gguf(source: Source) -> ModelSpec:
    m = source.fields
    spec = gguf_base(source, "gemma3", stretched=True)
    slides = gguf_slides(m, len(spec.layers), every=6)
    window = m.integer("attention.sliding_window")
    spec = windowed(spec, window, slides or [])
    scale = spec.head_dim**-0.5
    if len(spec.layers) == LAYERS_OF_27B:
        scale = (spec.hidden / spec.heads) ** -0.5
    if not m.has("rope.freq_base"):
        scaling = rope.from_gguf(m, m.integer("context_length"))
        spec = replace(spec, ropes=(rope.rope(spec.head_dim, 1e6, scaling, spec.max_context),))
    local = rope.rope(spec.head_dim, m.number("rope.freq_base_swa", 1e4, low=1.0), rope.Scaling(), 0)
    return _gemma(
        replace(spec, activation="gelu_tanh"),
        local,
        attention_scale=m.number("attention.scale", scale),
        logit_softcap=m.number("final_logit_softcapping", 0.0, low=-1e-9),
    )
