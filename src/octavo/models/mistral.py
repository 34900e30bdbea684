"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from octavo.models.base import Source, config_base, windowed, with_defaults
from octavo.models.spec import ModelSpec


def from_config(source: Source) -> ModelSpec:
    """An absent ``sliding_window`` means transformers' default of 4,096; an explicit null means none."""
    source = with_defaults(source, max_position_embeddings=131_072, num_key_value_heads=8)
    spec = config_base(source, "mistral")
    if "sliding_window" in source.fields.values and not source.fields.has("sliding_window"):
        return spec
    return windowed(spec, source.fields.integer("sliding_window", 4096), [True] * len(spec.layers))
