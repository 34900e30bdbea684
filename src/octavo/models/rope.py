"""Rotary embeddings and their scalings, computed once at load.

A power is taken in float64 and rounded to float32, which no machine computes differently and which agrees with
transformers (a float32 power in torch) to a unit in the last place; everything after it is float32, in the order in
which ``transformers.modeling_rope_utils`` does it.

References: linear (kaiokendev, arXiv:2306.15595), dynamic NTK (bloc97, emozilla), YaRN (arXiv:2309.00071), llama3
(Llama 3.1's ``apply_scaling``).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from octavo.models.fields import Fields
from octavo.models.spec import RopeSpec

log = logging.getLogger("octavo.loading")

KINDS = ("default", "linear", "dynamic", "yarn", "llama3")


@dataclass(frozen=True)
class Scaling:
    """A rope scaling as a model file asks for it; what a kind doesn't use stays at its default.

    ``original`` is the context length (tokens) that the model was trained at before the scaling; ``attention`` is
    YaRN's attention factor, ``None`` for the paper's.
    """

    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    attention: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    low_freq: float = 1.0
    high_freq: float = 4.0

    def context(self, trained: int) -> int:
        """The longest context (tokens) of a model whose file says ``trained``."""
        if self.kind in ("linear", "dynamic"):
            return max(trained, math.floor(trained * self.factor))
        if self.kind == "yarn":
            return trained if trained > self.original else max(trained, math.floor(self.original * self.factor))
        return trained


def rope(dim: int, base: float, scaling: Scaling, context: int) -> RopeSpec:
    """The rotary embedding of ``dim`` head dimensions; ``context`` is the served length (dynamic NTK alone uses it)."""
    if scaling.kind == "dynamic":
        base = _dynamic_base(base, dim, scaling, context)
    power = _powers(base, dim)
    inverse = np.float32(1) / power
    scale = 1.0
    if scaling.kind == "linear":
        inverse = inverse / np.float32(scaling.factor)
    elif scaling.kind == "llama3":
        inverse = _llama3(inverse, scaling)
    elif scaling.kind == "yarn":
        inverse = _yarn(power, base, dim, scaling)
        scale = yarn_attention(scaling)
    return RopeSpec(tuple(float(f) for f in inverse), scale)


def divide(spec: RopeSpec, factors: np.ndarray) -> RopeSpec:
    """The embedding with each frequency divided by its factor (GGUF's ``rope_freqs.weight``), float32 [dim / 2]."""
    inverse = np.asarray(spec.inv_freq, np.float32) / factors.astype(np.float32)
    return RopeSpec(tuple(float(f) for f in inverse), spec.scale)


def _powers(base: float, dim: int) -> np.ndarray:
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return np.power(np.float64(np.float32(base)), exponents.astype(np.float64)).astype(np.float32)


def _dynamic_base(base: float, dim: int, scaling: Scaling, context: int) -> float:
    length = max(context, scaling.original)
    if dim <= 2:
        return base
    stretch = scaling.factor * length / scaling.original - (scaling.factor - 1)
    scaled: float = base * stretch ** (dim / (dim - 2))
    log.info("rope scaling dynamic: frequencies fixed for a context of %d tokens", length)
    return scaled


def _llama3(inverse: np.ndarray, s: Scaling) -> np.ndarray:
    """Low frequencies divided by the factor, high ones kept, a linear blend by wavelength between."""
    one = np.float32(1)
    wavelength = (one / inverse) * np.float32(2 * math.pi)
    low, high = np.float32(s.original / s.low_freq), np.float32(s.original / s.high_freq)
    scaled = np.where(wavelength > low, inverse / np.float32(s.factor), inverse)
    blend = (one / wavelength) * np.float32(s.original) - np.float32(s.low_freq)
    blend = blend / np.float32(s.high_freq - s.low_freq)
    smooth = (one - blend) * scaled / np.float32(s.factor) + blend * scaled
    between = ~(wavelength < high) & ~(wavelength > low)
    return np.where(between, smooth, scaled)


def _yarn(power: np.ndarray, base: float, dim: int, s: Scaling) -> np.ndarray:
    """Dimensions that turn often in the original context are kept, rare ones interpolated, a ramp between."""

    def dimension(turns: float) -> float:
        return dim * math.log(s.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.beta_fast), dimension(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step, without a division by zero
    one = np.float32(1)
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = one - np.clip(ramp, 0, 1).astype(np.float32)
    stretched = one / (np.float32(s.factor) * power)
    blended: np.ndarray = stretched * (one - keep) + (one / power) * keep
    return blended


def yarn_attention(s: Scaling) -> float:
    """What cosine and sine are multiplied by, so that logits keep their spread over a longer context."""

    def magnitude(weight: float) -> float:
        return 1.0 if s.factor <= 1 else 0.1 * weight * math.log(s.factor) + 1.0

    if s.attention is not None:
        return s.attention
    if s.mscale and s.mscale_all_dim:
        return magnitude(s.mscale) / magnitude(s.mscale_all_dim)
    return magnitude(1.0)


def from_config(config: Fields, parameters: Fields, trained: int) -> Scaling:
    """Reads a ``rope_scaling`` (old) or ``rope_parameters`` (new) object of a transformers configuration."""
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind not in KINDS:
        raise parameters.refuse(f"the rope scaling is of type {kind!r}")
    partial = parameters.raw("partial_rotary_factor", config.raw("partial_rotary_factor", 1.0))
    if partial != 1:
        raise parameters.refuse(f"partial_rotary_factor is {partial!r} (a partial rotary embedding)")
    if parameters.has("mrope_section"):
        raise parameters.refuse("mrope_section is set (a multimodal rotary embedding)")
    if kind == "default":
        return Scaling()
    if kind in ("linear", "dynamic"):
        return Scaling(kind, parameters.number("factor"), trained)
    # Some configurations keep the original length beside the scaling; that one has priority there.
    original = parameters.integer("original_max_position_embeddings", trained)
    original = config.integer("original_max_position_embeddings", original)
    if kind == "llama3":
        low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
        if low == high:
            raise parameters.fail("high_freq_factor", "must differ from low_freq_factor")
        return Scaling(kind, parameters.number("factor"), original, low_freq=low, high_freq=high)
    return Scaling(
        kind,
        parameters.number("factor", trained / original),
        original,
        attention=parameters.number("attention_factor") if parameters.has("attention_factor") else None,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        mscale=parameters.number("mscale", 0.0, low=-1e-9),
        mscale_all_dim=parameters.number("mscale_all_dim", 0.0, low=-1e-9),
        truncate=parameters.flag("truncate", True),
    )


def from_gguf(meta: Fields, trained: int) -> Scaling:
    """Reads the ``rope.scaling`` keys of a GGUF architecture."""
    factor = meta.number("rope.scaling.factor", meta.number("rope.scale_linear", 1.0), low=-1e-9) or 1.0
    kind = meta.text("rope.scaling.type", "linear")
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return Scaling()
    if kind == "linear":
        return Scaling(kind, factor, trained)
    if kind != "yarn":
        raise meta.refuse(f"the rope scaling is of type {kind!r}")
    if meta.raw("rope.scaling.yarn_log_multiplier", 0.0):
        raise meta.refuse("rope.scaling.yarn_log_multiplier is set")
    if meta.raw("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise meta.refuse("rope.scaling.yarn_ext_factor is not 1")
    scaling = Scaling(
        kind,
        factor,
        meta.integer("rope.scaling.original_context_length", trained),
        beta_fast=meta.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=meta.number("rope.scaling.yarn_beta_slow", 1.0),
    )
    # GGUF's factor multiplies the paper's, where transformers' replaces it.
    extra = meta.number("rope.scaling.yarn_attn_factor", meta.number("rope.scaling.attn_factor", 1.0))
    if extra == 1.0:
        return scaling
    return Scaling(**{**scaling.__dict__, "attention": yarn_attention(scaling) * extra})
