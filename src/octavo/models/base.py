"""What all families read alike: widths, heads, context and rotary embedding, checked against one another."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from octavo.errors import ConfigError
from octavo.models import rope
from octavo.models.fields import MAX_COUNT, Fields
from octavo.models.spec import LayerSpec, ModelSpec

MAX_LAYERS = 4096
MAX_HEAD_DIM = 4096  # what a rotary embedding's frequencies are laid out for
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


@dataclass(frozen=True)
class Source:
    """What a family is read from: its description's fields, the names of the tensors there, the context asked for."""

    fields: Fields
    tensors: Collection[str]
    context: int | None = None


def served_context(source: Source, longest: int, stretches: bool = False) -> int:
    """The context length to serve: the one asked for, or the model's own; only dynamic scaling ``stretches`` it."""
    asked = source.context
    if asked is None:
        return longest
    if isinstance(asked, bool) or not isinstance(asked, int) or not 1 <= asked <= MAX_COUNT:
        raise ConfigError(f"context must be a positive number of tokens, not {asked!r}", "context")
    if asked > longest and not stretches:
        raise ConfigError(
            f"context {asked} is longer than the {longest} tokens that {source.fields.source} was made for", "context"
        )
    return asked


def check_heads(fields: Fields, spec: ModelSpec) -> ModelSpec:
    if spec.heads % spec.kv_heads:
        raise fields.refuse(f"{spec.heads} query heads can't share {spec.kv_heads} key-value heads evenly")
    if spec.head_dim % 2:
        raise fields.refuse(f"the head dimension {spec.head_dim} is odd")
    return spec


def with_defaults(source: Source, **defaults: Any) -> Source:
    """The source with values for keys that it lacks: what the family's transformers class assumes."""
    fields = source.fields
    return replace(source, fields=Fields(fields.source, {**defaults, **fields.values}, fields.prefix))


def config_base(source: Source, family: str, activation: str = "hidden_act") -> ModelSpec:
    """The parts of a transformers ``config.json`` that all families share, with full attention and one rope.

    ``activation`` is the key that names the MLP's activation.
    """
    c = source.fields
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if c.raw(key):
            raise c.refuse(f"{key} is {c.raw(key)!r:.20} (a mixture of experts)")
    if c.raw("mlp_bias"):
        raise c.refuse("mlp_bias is set (biases in the MLP)")
    if c.has("quantization_config"):
        method = c.inner("quantization_config").raw("quant_method", "unknown")
        raise c.refuse(f"the weights are quantised by quantization_config ({method!s:.40})")
    act = c.text(activation, "silu")
    if act not in ACTIVATIONS:
        raise c.refuse(f"{activation} is {act!r}")
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    count = c.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = c.integer("head_dim", hidden // heads, high=MAX_HEAD_DIM)
    trained = c.integer("max_position_embeddings", 2048)
    scaling, base = config_rope(c, trained)
    context = served_context(source, scaling.context(trained), stretches=scaling.kind == "dynamic")
    spec = ModelSpec(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=c.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate=c.integer("intermediate_size"),
        vocab=c.integer("vocab_size"),
        layers=(LayerSpec(),) * count,
        ropes=(rope.rope(head_dim, base, scaling, context),),
        max_context=context,
        norm_eps=c.number("rms_norm_eps", 1e-6, high=1.0),
        activation=ACTIVATIONS[act],
        tied=c.flag("tie_word_embeddings", False),
    )
    return check_heads(c, spec)


def config_rope(c: Fields, trained: int) -> tuple[rope.Scaling, float]:
    """Scaling and base of a configuration with one rotary embedding, in its old or its new key names."""
    parameters = c.inner("rope_scaling") if c.has("rope_scaling") else c.inner("rope_parameters")
    base = parameters.number("rope_theta", c.number("rope_theta", 10_000.0, low=1.0), low=1.0)
    return rope.from_config(c, parameters, trained), base


def gguf_base(source: Source, family: str, stretched: bool = False) -> ModelSpec:
    """The parts of GGUF metadata that all families share, with full attention and one rope; ``vocab`` is 0 still.

    ``stretched``: the length in the file is the one after any rope scaling.
    """
    m = source.fields
    if m.raw("expert_count"):
        raise m.refuse(f"{m.prefix}expert_count is {m.raw('expert_count')!r:.20} (a mixture of experts)")
    hidden, heads = m.integer("embedding_length"), alike(m, "attention.head_count")
    count = m.integer("block_count", high=MAX_LAYERS)
    head_dim = m.integer("attention.key_length", hidden // heads, high=MAX_HEAD_DIM)
    if m.integer("attention.value_length", head_dim) != head_dim:
        raise m.refuse(f"{m.prefix}attention.value_length differs from the key length {head_dim}")
    if m.integer("rope.dimension_count", head_dim) != head_dim:
        raise m.refuse(
            f"{m.prefix}rope.dimension_count {m.raw('rope.dimension_count')} is not the head dimension {head_dim} "
            "(a partial rotary embedding)"
        )
    trained = m.integer("context_length")
    scaling = rope.from_gguf(m, trained)
    context = served_context(source, trained if stretched else scaling.context(trained))
    spec = ModelSpec(
        family=family,
        hidden=hidden,
        heads=heads,
        kv_heads=alike(m, "attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=alike(m, "feed_forward_length"),
        vocab=0,
        layers=(LayerSpec(),) * count,
        ropes=(rope.rope(head_dim, m.number("rope.freq_base", 10_000.0, low=1.0), scaling, context),),
        max_context=context,
        norm_eps=m.number("attention.layer_norm_rms_epsilon", high=1.0),
        qkv_bias="blk.0.attn_q.bias" in source.tensors,
        tied="output.weight" not in source.tensors,
    )
    return check_heads(m, spec)


def alike(m: Fields, key: str, default: int | None = None) -> int:
    """An integer that GGUF may also give per layer, as long as all layers have the same."""
    value = m.raw(key)
    if value is None or isinstance(value, int):
        return m.integer(key, default)
    each = {int(v) for v in value} if hasattr(value, "__iter__") and not isinstance(value, str) else set()
    if len(each) != 1:
        raise m.refuse(f"{m.prefix}{key} differs between layers")
    return Fields(m.source, {m.prefix + key: each.pop()}, m.prefix).integer(key)


def windowed(spec: ModelSpec, window: int, slides: Sequence[bool]) -> ModelSpec:
    """The model with a sliding window of ``window`` tokens in the layers that ``slides`` names."""
    layers = tuple(replace(layer, window=window if s else None) for layer, s in zip(spec.layers, slides, strict=True))
    return replace(spec, layers=layers)


def config_slides(c: Fields, count: int) -> list[bool] | None:
    """Which layers slide, by ``layer_types``; None where the configuration has none."""
    types = c.items("layer_types")
    if types is None:
        return None
    for t in types:
        if t not in ("full_attention", "sliding_attention"):
            raise c.refuse(f"layer_types has a layer of type {t!r:.60}")
    if len(types) != count:
        raise c.fail("layer_types", f"names {len(types)} layers, but the model has {count}")
    return [t == "sliding_attention" for t in types]


def gguf_slides(m: Fields, count: int, every: int | None) -> list[bool] | None:
    """Which layers slide: by a flag for each, or all but every n-th; ``every`` stands in for an absent key."""
    pattern = m.raw("attention.sliding_window_pattern", every)
    if pattern is None:
        return None
    if isinstance(pattern, int):
        n = m.integer("attention.sliding_window_pattern", every, low=0)
        return [n == 0 or (i + 1) % n != 0 for i in range(count)]
    if isinstance(pattern, str) or not hasattr(pattern, "__len__") or len(pattern) < count:
        raise m.fail("attention.sliding_window_pattern", f"must have a flag for each of {count} layers")
    return [bool(p) for p in pattern[:count]]
