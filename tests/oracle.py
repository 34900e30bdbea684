"""What transformers says, in true float64.

``model.double()`` alone isn't float64: transformers' RMS norms and eager softmax cast to float32 whatever the model's
type.  So the norms are replaced by the same formula in the input's type, and attention goes through torch's
``scaled_dot_product_attention``, which computes float64 inputs in float64.  Rotary angles, cosines and sines stay in
float32, because that is how the models are defined.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Truth:
    """Next-token log-probabilities [n, V] after each of the tokens, and how far an engine may be from them."""

    tokens: list[int]
    logprobs: np.ndarray
    bound: float


def truth(model: PreTrainedModel, tokens: list[int]) -> Truth:
    """From a float32 model; the bound is 1e-4, or twice transformers' own float32 error where that is larger."""
    exact = log_softmax(logits(float64_model(model), tokens))
    own = float(np.abs(log_softmax(logits(model, tokens)) - exact).max())
    return Truth(tokens, exact, max(1e-4, 2 * own))


def float64_model(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that computes in float64."""
    twin = copy.deepcopy(model).double().eval()
    twin.set_attn_implementation("sdpa")
    for module in twin.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)
    return twin


def _norm(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    weight = 1 + self.weight if type(self).__name__.startswith("Gemma") else self.weight
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def with_frequencies(model: PreTrainedModel, inv_freq: Sequence[float]) -> PreTrainedModel:
    """A copy whose one rotary embedding has these frequencies for any length, in place of its own.

    They must be the model's own but for the last bits: some come out of float32 powers, which no two libraries round
    alike, and GGUF stores quotients of them.
    """
    twin = copy.deepcopy(model)
    rotary = twin.model.rotary_emb
    own = rotary.inv_freq.to(torch.float32).numpy()
    ours = np.array(inv_freq, dtype=np.float32)
    assert np.abs(ours / own - 1).max() < 3e-7, f"rotary frequencies {ours} are not transformers' {own}"
    rotary.inv_freq = torch.from_numpy(ours)
    rotary.rope_type = "default"  # nothing moves with the text any more
    return twin


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """[n, V] of one pass over the tokens, in the model's own type."""
    with torch.no_grad():
        out: np.ndarray = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return out


def log_softmax(values: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    x = np.asarray(values, dtype=np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return np.asarray(x - np.log(np.exp(x).sum(axis=-1, keepdims=True)))
