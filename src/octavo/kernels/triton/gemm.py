"""The matrix product y = x . W^T, whose rows have the same bits for every number of rows.

An output is the sum over K in one order: no program shares a sum with another, K advances 64 (of float32 weights 32)
columns a step, and within a step in the order of the matrix instruction, whose accumulator is carried along.  For that
instruction to be one for a single row and for many, it is Ampere's and Ada's on Hopper too, 16 x 8 x 16
(``mma.sync.m16n8k16``): Hopper's own works on 64 rows at least, and its width would change with the tile.  Triton takes
Hopper's for tiles of 64 rows and four warps, so tiles of 64 rows have two (tests read the compiled code).  How many
rows and columns a tile has then follows the number of rows, and changes speed alone.

GGUF's integers (see weights.py) enter the product as they are, exact in bfloat16, one group of columns at a time; the
scale multiplies the group's sum, and the shift the sum of the group's activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.rounding import narrow, put
from octavo.kernels.triton.weights import Grouped, Matrix, Weight


@triton.jit
def tile_of(pid, m, tiles_n, BLOCK_M: tl.constexpr, BAND: tl.constexpr):
    """Which tile a program computes: bands of rows, so that programs that run together share weights and rows."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    band = pid // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    inside = pid % (BAND * tiles_n)
    return band * BAND + inside % height, inside // height


@triton.jit
def finish(
    acc,
    bias,
    residual,
    out,
    rows,
    cols,
    inside,
    start,
    column,
    stride,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """Adds what is to be added to a tile of the product, rounds and stores it, from ``start`` + ``column`` on."""
    if HAS_BIAS:
        acc += tl.load(bias + column + cols, mask=inside[1], other=0.0)[None, :]
    at = rows[:, None] * stride + cols[None, :]
    both = inside[0][:, None] & inside[1][None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + start + column + at, mask=both, other=0.0)
    tl.store(out + start + column + at, narrow(acc, out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["m"])
def dense(
    x,  # [m, K]
    w0,  # [n0, K], and so on
    w1,
    w2,
    bias,
    residual,
    out,  # [m, stride]
    m,
    n0,
    n1,
    n2,
    column,
    stride,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of up to three products with the same x, side by side in ``out`` from ``column`` on."""
    end0 = tl.cdiv(n0, BLOCK_N)
    end1 = end0 + tl.cdiv(n1, BLOCK_N)
    at_m, at_n = tile_of(tl.program_id(0), m, end1 + tl.cdiv(n2, BLOCK_N), BLOCK_M, 8)
    w, n, first, tile = w0, n0, column, at_n
    if PARTS > 1:
        if at_n >= end0:
            w, n, first, tile = w1, n1, column + n0, at_n - end0
    if PARTS > 2:
        if at_n >= end1:
            w, n, first, tile = w2, n2, column + n0 + n1, at_n - end1
    rows, cols, along = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    row_in, col_in = rows < m - at_m * BLOCK_M, cols < n - tile * BLOCK_N
    x_at = x + (at_m * BLOCK_M).to(tl.int64) * K + rows[:, None] * K + along[None, :]
    w_at = w + (tile * BLOCK_N).to(tl.int64) * K + cols[None, :] * K + along[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            a = tl.load(x_at, mask=row_in[:, None], other=0.0)
            b = tl.load(w_at, mask=col_in[None, :], other=0.0)
        else:
            a = tl.load(x_at, mask=row_in[:, None] & (along[None, :] < K - start), other=0.0)
            b = tl.load(w_at, mask=col_in[None, :] & (along[:, None] < K - start), other=0.0)
        acc = tl.dot(narrow(a, b.dtype), b, acc, input_precision="ieee")
        x_at += BLOCK_K
        w_at += BLOCK_K
    start = (at_m * BLOCK_M).to(tl.int64) * stride
    first += tile * BLOCK_N
    finish(acc, bias, residual, out, rows, cols, (row_in, col_in), start, first, stride, HAS_BIAS, HAS_RESIDUAL)


@triton.jit(do_not_specialize=["m"])
def grouped(
    x,  # [m, K]
    data,  # [K / GROUP, n, GROUP * BITS / 8]
    scale,  # [K / SPAN, n], as shift
    part,  # [K / GROUP, n], as part_shift
    shift,
    part_shift,
    bias,
    residual,
    out,
    m,
    n,
    column,
    stride,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_PART: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One tile of the product with small integers and their scales."""
    at_m, tile = tile_of(tl.program_id(0), m, tl.cdiv(n, BLOCK_N), BLOCK_M, 8)
    BYTES: tl.constexpr = GROUP * BITS // 8
    rows, cols, along = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BYTES)
    row_in, col_in = rows < m - at_m * BLOCK_M, cols < n - tile * BLOCK_N
    x_at = x + (at_m * BLOCK_M).to(tl.int64) * K + rows[:, None] * K + along[None, :]
    w_at = data + (tile * BLOCK_N).to(tl.int64) * BYTES + cols[None, :] * BYTES + along[:, None]
    wide = n.to(tl.int64)
    scale, part, shift, part_shift = (
        scale + tile * BLOCK_N,
        part + tile * BLOCK_N,
        shift + tile * BLOCK_N,
        part_shift + tile * BLOCK_N,
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for g in range(0, K // GROUP):
        stored = tl.load(w_at, mask=col_in[None, :], other=0).to(tl.int32)
        a = narrow(tl.load(x_at, mask=row_in[:, None], other=0.0), tl.bfloat16)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if BITS == 4:
            high = narrow(tl.load(x_at + BYTES, mask=row_in[:, None], other=0.0), tl.bfloat16)
            total = tl.dot(a, ((stored & 15) - OFFSET).to(tl.float32).to(tl.bfloat16), total)
            total = tl.dot(high, ((stored >> 4) - OFFSET).to(tl.float32).to(tl.bfloat16), total)
        else:
            total = tl.dot(a, (stored - OFFSET).to(tl.float32).to(tl.bfloat16), total)
        unit = tl.load(scale + (g * GROUP // SPAN) * wide + cols, mask=col_in, other=0.0).to(tl.float32)
        if HAS_PART:
            unit *= tl.load(part + g * wide + cols, mask=col_in, other=0).to(tl.float32)
        acc += total * unit[None, :]
        if HAS_SHIFT:
            less = tl.load(shift + (g * GROUP // SPAN) * wide + cols, mask=col_in, other=0.0).to(tl.float32)
            if HAS_PART:
                less *= tl.load(part_shift + g * wide + cols, mask=col_in, other=0).to(tl.float32)
            # By the matrix instruction too, whose order over K is one for all tiles; the order of tl.sum is the tile's
            # layout.  All columns are the same number, so that any order of tl.max gives it.
            ones = tl.full((BYTES, 16), 1.0, tl.float32).to(tl.bfloat16)
            sums = tl.dot(a, ones)
            if BITS == 4:
                sums = tl.dot(high, ones, sums)
            acc -= tl.max(sums, axis=1)[:, None] * less[None, :]
        x_at += GROUP
        w_at += BYTES * wide
    start = (at_m * BLOCK_M).to(tl.int64) * stride
    first = column + tile * BLOCK_N
    finish(acc, bias, residual, out, rows, cols, (row_in, col_in), start, first, stride, HAS_BIAS, HAS_RESIDUAL)


# ---- launching -------------------------------------------------------------------------------------------------------


def tile(m: int, dtype: torch.dtype) -> dict[str, int]:
    """The shape of a tile for m rows: small ones for few rows, so that many programs read the weights."""
    if dtype is torch.float32:  # without tensor cores
        return dict(BLOCK_M=16 if m <= 16 else 64, BLOCK_N=32, BLOCK_K=32, num_warps=4, num_stages=3)
    if m <= 16:
        return dict(BLOCK_M=16, BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=6)
    if m <= 32:
        return dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=64, num_warps=4, num_stages=5)
    if m <= 64:
        return dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=64, num_warps=2, num_stages=5)
    if m <= 256:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=2, num_stages=4)
    return dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=2, num_stages=3)


def grouped_tile(m: int) -> dict[str, int]:
    if m <= 16:
        return dict(BLOCK_M=16, BLOCK_N=32, num_warps=4, num_stages=6)
    if m <= 32:
        return dict(BLOCK_M=32, BLOCK_N=32, num_warps=4, num_stages=5)
    if m <= 64:
        return dict(BLOCK_M=64, BLOCK_N=32, num_warps=2, num_stages=5)
    return dict(BLOCK_M=64, BLOCK_N=64, num_warps=2, num_stages=4)


def linear(
    x: torch.Tensor,
    weights: Sequence[Weight],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    library: bool = False,
) -> None:
    """out [m, sum n_i] = x [m, K] . concat(W_i)^T (+ bias) (+ residual), rounded to the type of ``out``.

    Sums are float32.  Parts of one form go in one launch.  ``library``: products with floats are cuBLAS's, whose order
    of sums changes with m, and which rounds them to the weights' type.
    """
    column = 0
    for _, same in groupby(weights, key=lambda w: w.form):
        parts = list(same)
        while parts:
            first = parts[0]
            if library and isinstance(first, Matrix):
                _library(x, first, bias, residual, out, column)
                taken = parts[:1]
            elif isinstance(first, Grouped):
                _grouped(x, first, bias, residual, out, column)
                taken = parts[:1]
            else:
                taken = parts[:3]
                _dense(x, [w for w in taken if isinstance(w, Matrix)], bias, residual, out, column)
            column += sum(w.rows for w in taken)
            parts = parts[len(taken) :]


def _library(
    x: torch.Tensor,
    w: Matrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    column: int,
) -> None:
    if x.dtype is not w.data.dtype:
        x, wide = torch.empty_like(x, dtype=w.data.dtype), x
        put(wide, x)
    y = torch.mm(x, w.data.t()).float()
    columns = slice(column, column + w.rows)
    if bias is not None:
        y += bias[columns]
    if residual is not None:
        y += residual[:, columns]
    put(y, out[:, columns])


def _dense(
    x: torch.Tensor,
    weights: list[Matrix],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    column: int,
) -> None:
    shape = tile(len(x), weights[0].data.dtype)
    widths = [w.rows for w in weights] + [0] * (3 - len(weights))
    data = [w.data for w in weights] + [weights[0].data] * (3 - len(weights))
    tiles = triton.cdiv(len(x), shape["BLOCK_M"]) * sum(triton.cdiv(n, shape["BLOCK_N"]) for n in widths)
    dense[(tiles,)](
        x,
        *data,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        len(x),
        *widths,
        column,
        out.shape[1],
        K=weights[0].cols,
        PARTS=len(weights),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        **shape,
    )


def _grouped(
    x: torch.Tensor,
    w: Grouped,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    column: int,
) -> None:
    shape = grouped_tile(len(x))
    tiles = triton.cdiv(len(x), shape["BLOCK_M"]) * triton.cdiv(w.rows, shape["BLOCK_N"])
    none = w.scale
    grouped[(tiles,)](
        x,
        w.data,
        w.scale,
        none if w.part is None else w.part,
        none if w.shift is None else w.shift,
        none if w.part_shift is None else w.part_shift,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        len(x),
        w.rows,
        column,
        out.shape[1],
        K=w.cols,
        BITS=w.bits,
        GROUP=w.group,
        SPAN=w.span,
        OFFSET=w.offset,
        HAS_PART=w.part is not None,
        HAS_SHIFT=w.shift is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        **shape,
    )
