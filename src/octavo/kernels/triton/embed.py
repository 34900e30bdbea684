"""Rows of a table: embeddings, and the rows whose logits are wanted; and tokens that were drawn on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.kernels.triton.weights import Grouped, Weight

BLOCK = 1024


@triton.jit(do_not_specialize=["items"])
def rows_of(table, ids, out, scale, items, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Some items of [m, WIDTH]: rows of a table of floats, times ``scale``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < items
    row = tl.load(ids + at // WIDTH, mask=inside, other=0).to(tl.int64)
    value = tl.load(table + row * WIDTH + at % WIDTH, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value * scale, mask=inside)


@triton.jit(do_not_specialize=["items"])
def rows_of_grouped(
    data,
    scale,
    part,
    shift,
    part_shift,
    ids,
    out,
    factor,
    n,
    items,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_PART: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The same of a table of small integers with scales (weights.py)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < items
    row = tl.load(ids + at // WIDTH, mask=inside, other=0).to(tl.int64)
    BYTES: tl.constexpr = GROUP * BITS // 8
    col = at % WIDTH
    group, span, place = col // GROUP, col // SPAN, col % GROUP
    byte = tl.load(data + (group * n + row) * BYTES + place % BYTES, mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        byte = tl.where(place < BYTES, byte & 15, byte >> 4)
    unit = tl.load(scale + span * n + row, mask=inside, other=0.0).to(tl.float32)
    if HAS_PART:
        unit *= tl.load(part + group * n + row, mask=inside, other=0).to(tl.float32)
    value = unit * (byte - OFFSET).to(tl.float32)
    if HAS_SHIFT:
        less = tl.load(shift + span * n + row, mask=inside, other=0.0).to(tl.float32)
        if HAS_PART:
            less *= tl.load(part_shift + group * n + row, mask=inside, other=0).to(tl.float32)
        value -= less
    tl.store(out + at, value * factor, mask=inside)


@triton.jit(do_not_specialize=["stride", "items"])
def recalled(tokens, drawn, stride, items, BLOCK: tl.constexpr):
    """tokens[i] < 0 becomes drawn[-1 - tokens[i]], and 0 where that is negative."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + at, mask=at < items, other=0)
    found = tl.load(drawn + (-1 - token) * stride, mask=token < 0, other=0)
    tl.store(tokens + at, tl.maximum(found, 0), mask=token < 0)


def recall(tokens: torch.Tensor, drawn: torch.Tensor) -> None:
    """Puts what was drawn, int32 [n], in place of negative tokens int32 [m]: -(1 + k) stands for drawn[k]."""
    grid = (triton.cdiv(len(tokens), BLOCK),)
    recalled[grid](tokens, drawn, drawn.stride(0), len(tokens), BLOCK=BLOCK)


def pick(x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """out float32 [len(ids), D] = x[ids] * scale; ids int32."""
    grid = (triton.cdiv(out.numel(), BLOCK),)
    rows_of[grid](x, ids, out, scale, out.numel(), WIDTH=x.shape[1], BLOCK=BLOCK)


def embed(table: Weight, ids: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """out float32 [len(ids), D] = table[ids] * scale; ids int32."""
    if not isinstance(table, Grouped):
        return pick(table.data, ids, out, scale)
    none = table.scale
    rows_of_grouped[(triton.cdiv(out.numel(), BLOCK),)](
        table.data,
        table.scale,
        none if table.part is None else table.part,
        none if table.shift is None else table.shift,
        none if table.part_shift is None else table.part_shift,
        ids,
        out,
        scale,
        table.rows,
        out.numel(),
        WIDTH=table.cols,
        BITS=table.bits,
        GROUP=table.group,
        SPAN=table.span,
        OFFSET=table.offset,
        HAS_PART=table.part is not None,
        HAS_SHIFT=table.shift is not None,
        BLOCK=BLOCK,
    )
