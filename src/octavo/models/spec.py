"""What a model is, as data: the decoder is written once against these two records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """One rotary embedding, after any scaling.

    ``inv_freq`` holds the float32 values of the ``rotary_dim / 2`` inverse frequencies; the angle at a position is
    float32(position) * float32(inv_freq) rounded to float32 (as transformers computes it), and ``scale`` multiplies
    cosine and sine (YaRN's attention factor).  Pairs are (i, i + rotary_dim/2), the "NEOX" order; loaders bring
    interleaved checkpoints into it.
    """

    inv_freq: tuple[float, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class LayerSpec:
    """What differs between layers: sliding window in tokens (``None``: full) and which rotary embedding."""

    window: int | None = None
    rope: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """Everything that the decoder needs to know of a model besides its weights."""

    family: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    max_context: int
    norm_eps: float = 1e-5
    activation: str = "silu"  # or "gelu_tanh"
    embed_scale: float = 1.0
    attention_scale: float = 0.0  # 0: 1/sqrt(head_dim)
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False  # norms after attention and MLP, before the residual sum (Gemma)
    tied: bool = False

    @property
    def scale(self) -> float:
        return self.attention_scale or self.head_dim**-0.5
