"""The MLP's gate, and the soft cap of logits: element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.rounding import narrow

BLOCK = 1024


@triton.jit
def tanh(x):
    """(1 - e) / (1 + e) with e = exp(-2 |x|), and the sign of x."""
    e = tl.exp(-2.0 * tl.abs(x))
    y = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -y, y)


@triton.jit
def activate(x, GELU: tl.constexpr):
    """silu, or the tanh form of GELU (Hendrycks and Gimpel 2016)."""
    if GELU:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["items"])
def gated(x, out, items, WIDTH: tl.constexpr, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Some items of [m, WIDTH]: act(first half) * second half."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < items
    first_at = x + at + at // WIDTH * WIDTH  # rows of x are twice as wide
    first = tl.load(first_at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, narrow(activate(first, GELU) * second, out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["items"])
def capped(x, cap, items, BLOCK: tl.constexpr):
    """Some items: cap * tanh(x / cap), in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < items, other=0.0)
    tl.store(x + at, cap * tanh(value / cap), mask=at < items)


def gate(x: torch.Tensor, activation: str, out: torch.Tensor) -> None:
    """out [m, F] = act(x[:, :F]) * x[:, F:]; ``activation`` is "silu" or "gelu_tanh"."""
    grid = (triton.cdiv(out.numel(), BLOCK),)
    gated[grid](x, out, out.numel(), WIDTH=out.shape[1], GELU=activation == "gelu_tanh", BLOCK=BLOCK)


def softcap(x: torch.Tensor, cap: float) -> None:
    """x float32 becomes cap * tanh(x / cap)."""
    capped[(triton.cdiv(x.numel(), BLOCK),)](x, cap, x.numel(), BLOCK=BLOCK)
