"""RMS norm, with the sum that follows it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.rounding import narrow


@triton.jit(do_not_specialize=["m"])
def rms_norm(
    x,
    weight,
    residual,
    out,
    m,
    eps,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows: x / sqrt(mean(x^2) + eps) * weight (+ residual)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK)
    at = row[:, None].to(tl.int64) * WIDTH + col[None, :]
    inside = (row < m)[:, None] & (col < WIDTH)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0)
    mean = tl.sum(value * value, axis=1) / WIDTH
    y = value / tl.sqrt(mean + eps)[:, None] * tl.load(weight + col, mask=col < WIDTH, other=0.0)[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=inside, other=0.0)
    tl.store(out + at, narrow(y, out.dtype.element_ty), mask=inside)


def shape(width: int) -> dict[str, int]:
    """How many rows a program takes follows their width alone: how a row is summed must not depend on the batch."""
    block = triton.next_power_of_2(width)
    return dict(BLOCK=block, ROWS=max(1, 1024 // block), num_warps=4 if width <= 4096 else 8)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [m, D] from x float32 [m, D] (Zhang and Sennrich 2019); rounded to the type of ``out``."""
    width = x.shape[1]
    chosen = shape(width)
    rms_norm[(triton.cdiv(len(x), chosen["ROWS"]),)](
        x,
        weight,
        x if residual is None else residual,
        out,
        len(x),
        eps,
        WIDTH=width,
        HAS_RESIDUAL=residual is not None,
        **chosen,
    )
