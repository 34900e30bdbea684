"""From float32 to the types that are stored, and back, the same way everywhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def put(values: torch.Tensor, out: torch.Tensor) -> None:
    """Stores ``values`` in the type of ``out``, as :func:`narrow` would: for what torch computes between kernels."""
    if out.dtype is torch.float16 and values.dtype is torch.float32:
        values = torch.where(values.isinf(), values, values.clamp(-65504.0, 65504.0))
    out.copy_(values)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """x in ``dtype``, ties to even.

    float16 ends at 65,504, and activations now and then go beyond: they stay at the end, while infinity and NaN, which
    tell that something is wrong, stay what they are.
    """
    if dtype == tl.float16:
        if x.dtype == tl.float32:
            x = tl.where(tl.abs(x) < float("inf"), tl.minimum(tl.maximum(x, -65504.0), 65504.0), x)
    return x.to(dtype)


@triton.jit
def to_fp8(x):
    """float32 as the bits (uint8) of the nearest float8 e4m3, ties to even; beyond 448 it stays there, NaN is 0x7F.

    With integers, as older GPUs than Ada have no such conversion.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = tl.minimum(tl.abs(x), 448.0)
    normal = size.to(tl.int32, bitcast=True)
    normal = ((normal + 0x7FFFF + ((normal >> 20) & 1)) >> 20) - (120 << 3)
    # Under 2^-6 a step is 2^-9; adding 1.5 * 2^23 rounds to an integer, ties to even.
    small = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code | ((bits >> 24) & 0x80), 0x7F)
    return code.to(tl.uint8)


@triton.jit
def from_fp8(bits, NAN: tl.constexpr):
    """float16 of float8 e4m3 bits, exactly: float16 has the same fields, wider, with a bias that is 8 larger.

    Without ``NAN`` the bits must be those of a number.
    """
    wide = bits.to(tl.int16)
    shifted = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    value = shifted.to(tl.float16, bitcast=True) * 256.0
    if NAN:
        value = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    return value.to(tl.float16)
