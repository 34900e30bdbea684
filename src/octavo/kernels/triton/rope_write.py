"""Queries and keys normed and rotated, and keys and values written to their slots, in one launch.

A key or value that is not finite once it is rounded makes its token's key NaN and its value 0 (per head).  Whoever
attends to the token gets NaN from the key; but in a tile of attention its values are multiplied by the zeros of rows
that may not see it, and 0 x infinity would reach them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.core.layout import KVLayout
from octavo.kernels.triton.cache import Cache
from octavo.kernels.triton.rounding import narrow, to_fp8

ROWS = 16  # tokens that a program takes: of one block, mostly, so that their keys lie side by side


@triton.jit
def turned(
    x,
    inside,
    norm,
    inv_freq,
    position,
    scale,
    eps,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head's vectors at x [tokens, 1], normed if asked and rotated: pairs (i, i + HALF), what is beyond stays."""
    at = tl.arange(0, BLOCK)
    other = tl.where(at < HALF, at + HALF, at - HALF)
    paired = at < 2 * HALF
    mine = tl.load(x + at[None, :], mask=inside & (at < DIM)[None, :], other=0.0)
    theirs = tl.load(x + other[None, :], mask=inside & paired[None, :], other=0.0)
    if HAS_NORM:
        root = tl.sqrt(tl.sum(mine * mine, axis=1) / DIM + eps)[:, None]
        mine = mine / root * tl.load(norm + at, mask=at < DIM, other=0.0)[None, :]
        theirs = theirs / root * tl.load(norm + other, mask=paired, other=0.0)[None, :]
    turn = tl.load(inv_freq + tl.minimum(at, other), mask=paired, other=0.0)
    angle = position.to(tl.float32)[:, None] * turn[None, :]
    cos, sin = tl.cos(angle) * scale, tl.sin(angle) * scale
    moved = mine * cos + tl.where((at < HALF)[None, :], -theirs, theirs) * sin
    return tl.where(paired[None, :], moved, mine)


@triton.jit(do_not_specialize=["m"])
def rotate_and_write(
    qkv,  # [m, (HEADS + 2 KV_HEADS) * DIM]
    positions,
    blocks,  # the block of each token; -1: not to be written
    inv_freq,
    q_norm,
    k_norm,
    queries,  # out
    cache,
    m,
    block_stride,
    layer,  # where the layer begins in a block
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    SIZE: tl.constexpr,  # slots of a block
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of some tokens; after the query heads come the key-value heads."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    there = token < m
    row = qkv + token.to(tl.int64)[:, None] * ((HEADS + 2 * KV_HEADS) * DIM) + head * DIM
    position = tl.load(positions + token, mask=there, other=0)
    at = tl.arange(0, BLOCK)
    inside = there[:, None] & (at < DIM)[None, :]
    if head < HEADS:
        q = turned(row, there[:, None], q_norm, inv_freq, position, scale, eps, DIM, HALF, HAS_Q_NORM, BLOCK)
        out = queries + (token.to(tl.int64)[:, None] * HEADS + head) * DIM + at[None, :]
        tl.store(out, narrow(q, queries.dtype.element_ty), mask=inside)
    else:
        k = turned(row, there[:, None], k_norm, inv_freq, position, scale, eps, DIM, HALF, HAS_K_NORM, BLOCK)
        v = tl.load(row + KV_HEADS * DIM + at[None, :], mask=inside, other=0.0)
        if not FP8:  # what rounding makes infinite counts
            k = k.to(cache.dtype.element_ty).to(tl.float32)
            v = v.to(cache.dtype.element_ty).to(tl.float32)
        finite = (tl.abs(k) < float("inf")) & (tl.abs(v) < float("inf"))
        bad = (tl.max(tl.where(finite, 0, 1), axis=1) > 0)[:, None]
        k, v = tl.where(bad, float("nan"), k), tl.where(bad, 0.0, v)
        if FP8:
            k, v = to_fp8(k), to_fp8(v)
        block, slot = tl.load(blocks + token, mask=there, other=-1).to(tl.int64), position % SIZE
        head_at = cache + (block * block_stride + layer + (head - HEADS) * DIM * SIZE)[:, None]
        written = inside & (block >= 0)[:, None]
        tl.store(head_at + at[None, :] * SIZE + slot[:, None], k.to(cache.dtype.element_ty), mask=written)
        v_at = head_at + KV_HEADS * DIM * SIZE + slot[:, None] * DIM + at[None, :]
        tl.store(v_at, v.to(cache.dtype.element_ty), mask=written)


def rope_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    inv_freq: torch.Tensor,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    queries: torch.Tensor,
    cache: Cache,
    layer: int,
    scale: float,
    eps: float,
) -> None:
    """queries [m, heads * head_dim] and the tokens' K and V of ``layer`` from qkv float32."""
    lay: KVLayout = cache.layout
    heads = queries.shape[1] // lay.head_dim
    q_norm, k_norm = norms
    rotate_and_write[(triton.cdiv(len(qkv), ROWS), heads + lay.kv_heads)](
        qkv,
        positions,
        blocks,
        inv_freq,
        inv_freq if q_norm is None else q_norm,
        inv_freq if k_norm is None else k_norm,
        queries,
        cache.data,
        len(qkv),
        cache.block_stride,
        cache.offset(layer),
        scale,
        eps,
        HEADS=heads,
        KV_HEADS=lay.kv_heads,
        DIM=lay.head_dim,
        HALF=len(inv_freq),
        SIZE=lay.block_size,
        HAS_Q_NORM=q_norm is not None,
        HAS_K_NORM=k_norm is not None,
        FP8=cache.fp8,
        ROWS=ROWS,
        BLOCK=triton.next_power_of_2(lay.head_dim),
        num_warps=4,
    )
