"""Attention over block tables, for any mix of rows: chunks of prompts, single tokens, both in one launch.

The query heads that share a KV head are packed: a tile's 64 rows are (token, head) pairs of one sequence, in order, so
that K and V are read once for all of them.  Every tile has 64 rows, for one token as for thousands, and keys come in
tiles of 64 (or, where they are large, fewer) at absolute positions: one matrix instruction, one order of additions.  A
context is cut at multiples of ``SPLIT`` positions.  Each piece starts afresh, and pieces are joined in order, be it by
one program that runs all of them or by a second kernel after many programs, which is how few long rows keep a GPU busy.

A slot that a row may not see takes no part: scores are selected, not multiplied, values that no row of the tile may
see are not read, and those that are read are always finite (rope_write.py).  What is added for a row because of its
neighbours in the tile is exactly nothing: maxima stay, factors are 1, sums grow by 0.

Online softmax after Milakov and Gimelshein (2018), tiles after Dao et al. (2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from octavo.core.layout import KV_ITEMSIZE, KVLayout
from octavo.kernels.backend import Batch
from octavo.kernels.triton.cache import Cache
from octavo.kernels.triton.gate import tanh
from octavo.kernels.triton.rounding import from_fp8, narrow

Array = np.ndarray

ROWS = 64  # (token, head) pairs of a tile
SPLIT = 1024  # positions of a piece
FIELDS = 8  # integers that describe an item
ENOUGH = 256  # programs that fill a GPU: with more, prompts are not cut into pieces
SCRATCH = 1 << 15  # rows of partial results, of each KV head

LOG2E = 1.4426950408889634


@triton.jit
def joined(top, total, mixed, top2, total2, mixed2):
    """Two partial results as one: maxima [m] (in powers of two), sums [m], mixed values [m, d]."""
    highest = tl.maximum(top, top2)
    safe = tl.where(highest == float("-inf"), 0.0, highest)
    first, second = tl.exp2(top - safe), tl.exp2(top2 - safe)
    return highest, total * first + total2 * second, mixed * first[:, None] + mixed2 * second[:, None]


@triton.jit
def attend_tile(
    queries,  # [M, KV_HEADS * GROUP * DIM]
    cache,
    ids,  # block tables, end to end
    items,  # [programs, 8]: see Work
    out,  # [M, KV_HEADS * GROUP * DIM]
    part,  # scratch: [rows, KV_HEADS, DIM], mixed values
    part_sums,  # scratch: [rows, KV_HEADS, 2], maxima and sums
    block_stride,
    layer,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads that share a KV head
    DIM: tl.constexpr,
    SIZE: tl.constexpr,  # slots of a block
    WINDOW: tl.constexpr,  # 0: none
    HAS_SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
    LIMIT: tl.constexpr,  # positions of a piece
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    item = items + tl.program_id(0) * 8
    token0, tokens, pair0, position0 = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    table, begin, end, scratch = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    kv = tl.program_id(1)
    pair = pair0 + tl.arange(0, ROWS)
    token, dims = pair // GROUP, tl.arange(0, BLOCK)
    valid = token < tokens
    position = position0 + token
    place = (token0 + token).to(tl.int64) * (KV_HEADS * GROUP) + kv * GROUP + pair % GROUP
    mine = valid[:, None] & (dims < DIM)[None, :]
    q = tl.load(queries + place[:, None] * DIM + dims[None, :], mask=mine, other=0.0)
    if FP8:
        q = narrow(q, tl.float16)
    else:
        q = narrow(q, cache.dtype.element_ty)
    seen_from = 0
    if WINDOW > 0:
        seen_from = tl.maximum(position0 + pair0 // GROUP - WINDOW + 1, 0)
    head = layer + kv * DIM * SIZE
    top_all = tl.full((ROWS,), float("-inf"), tl.float32)
    total_all = tl.zeros((ROWS,), tl.float32)
    mixed_all = tl.zeros((ROWS, BLOCK), tl.float32)
    for piece in range(begin // LIMIT, tl.cdiv(end, LIMIT)):
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, BLOCK), tl.float32)
        first, last = tl.maximum(begin, piece * LIMIT) // TILE, tl.cdiv(tl.minimum(end, (piece + 1) * LIMIT), TILE)
        for tile in range(first, last):
            n = tile * TILE + tl.arange(0, TILE)
            there = (n < end) & (n >= seen_from)
            # Whole blocks of keys are read, as 16 bytes at a time are only where no mask cuts them: what lies in slots
            # that nobody may see, perhaps NaN, makes scores that are not selected.
            logical, slot = n // SIZE, n % SIZE
            filled = (logical * SIZE < end) & (logical * SIZE + SIZE > seen_from)
            block = tl.load(ids + table + logical, mask=filled, other=0).to(tl.int64) * block_stride + head
            k_at = cache + block[None, :] + dims[:, None] * SIZE + slot[None, :]
            k = tl.load(k_at, mask=(dims < DIM)[:, None] & filled[None, :], other=0)
            if FP8:
                k = from_fp8(k, True)
            score = tl.dot(q, k, input_precision="ieee") * scale
            if HAS_SOFTCAP:
                score = softcap * tanh(score / softcap)
            visible = there[None, :] & (n[None, :] <= position[:, None])
            if WINDOW > 0:
                visible = visible & (n[None, :] > position[:, None] - WINDOW)
            score = tl.where(visible, score * 1.4426950408889634, float("-inf"))
            highest = tl.maximum(top, tl.max(score, axis=1))
            safe = tl.where(highest == float("-inf"), 0.0, highest)
            weight = tl.exp2(score - safe[:, None])
            factor = tl.exp2(top - safe)
            top = highest
            total = total * factor + tl.sum(weight, axis=1)
            v_at = cache + block[:, None] + KV_HEADS * DIM * SIZE + slot[:, None] * DIM + dims[None, :]
            v = tl.load(v_at, mask=there[:, None] & (dims < DIM)[None, :], other=0)
            if FP8:
                v = from_fp8(v, False)
            mixed = tl.dot(weight.to(v.dtype), v, mixed * factor[:, None], input_precision="ieee")
        top_all, total_all, mixed_all = joined(top_all, total_all, mixed_all, top, total, mixed)
    if scratch < 0:
        result = narrow(mixed_all / tl.where(valid, total_all, 1.0)[:, None], out.dtype.element_ty)
        tl.store(out + place[:, None] * DIM + dims[None, :], result, mask=mine)
    else:
        row = (scratch + tl.arange(0, ROWS)).to(tl.int64) * KV_HEADS + kv
        tl.store(part + row[:, None] * DIM + dims[None, :], mixed_all, mask=mine)
        tl.store(part_sums + row * 2, top_all, mask=valid)
        tl.store(part_sums + row * 2 + 1, total_all, mask=valid)


@triton.jit
def join_pieces(
    joins,  # [programs, 8]: see Work
    part,
    part_sums,
    out,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows of one tile: their pieces, joined in order."""
    item = joins + tl.program_id(0) * 8
    token0, tokens, pair0 = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    scratch, pieces, step = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    kv = tl.program_id(1)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    pair, dims = pair0 + rows, tl.arange(0, BLOCK)
    token = pair // GROUP
    valid = (token < tokens) & (rows < step)
    mine = valid[:, None] & (dims < DIM)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    mixed = tl.zeros((ROWS, BLOCK), tl.float32)
    for piece in range(0, pieces):
        row = (scratch + piece * step + rows).to(tl.int64) * KV_HEADS + kv
        top2 = tl.load(part_sums + row * 2, mask=valid, other=float("-inf"))
        total2 = tl.load(part_sums + row * 2 + 1, mask=valid, other=0.0)
        mixed2 = tl.load(part + row[:, None] * DIM + dims[None, :], mask=mine, other=0.0)
        top, total, mixed = joined(top, total, mixed, top2, total2, mixed2)
    place = (token0 + token).to(tl.int64) * (KV_HEADS * GROUP) + kv * GROUP + pair % GROUP
    result = narrow(mixed / tl.where(valid, total, 1.0)[:, None], out.dtype.element_ty)
    tl.store(out + place[:, None] * DIM + dims[None, :], result, mask=mine)


# ---- what is launched ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What the programs of one step do in the layers of one group.

    - ``items`` int32 [n, 8]: a tile's first token in the batch's order, the row's tokens, the first (token, head)
      pair, the row's first position; where its table begins; the positions to visit, from a multiple of the tile to the
      end; the first row of scratch for its partial result, or -1 for a whole one
    - ``joins`` int32 [k, 8]: first token, tokens and first pair as above; the first row of scratch, how many pieces,
      and how many rows each has
    """

    items: Array
    joins: Array
    row: Array  # of each item


def shape(head_dim: int, itemsize: int) -> dict[str, int]:
    """The shape of a tile of keys; fewer at a time where they are large, for what a GPU's shared memory holds."""
    return dict(
        LIMIT=SPLIT,
        ROWS=ROWS,
        TILE=(32 if head_dim <= 64 else 16) if itemsize == 4 else 64 if head_dim <= 128 else 32,
        BLOCK=max(16, triton.next_power_of_2(head_dim)),
        num_warps=8 if itemsize == 4 or head_dim > 128 else 4,
        num_stages=1 if head_dim * itemsize > 512 else 2,
        enable_fp_fusion=False,  # joining must be the same arithmetic in both kernels
    )


def shape_of(layout: KVLayout) -> dict[str, int]:
    return shape(layout.head_dim, KV_ITEMSIZE[layout.dtype])


def plan(batch: Batch, layout: KVLayout, heads: int, window: int | None) -> Work:
    """The work of all layers of one window: which results are whole and which are cut changes speed, not bits.

    Where the rows' tables begin is another thing for each group: see :func:`at_tables`.
    """
    kv_heads, tile, split = layout.kv_heads, shape_of(layout)["TILE"], SPLIT
    share = heads // kv_heads
    counts = np.diff(batch.starts)
    tiles = -(-counts * share // ROWS)
    row = np.repeat(np.arange(len(counts)), tiles)
    number = np.arange(len(row)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    pair = number * ROWS
    tokens = counts[row]
    pairs = np.minimum(tokens * share - pair, ROWS)
    start = batch.positions[batch.starts[:-1][row]] if len(row) else np.empty(0, np.int32)
    end = start + (pair + pairs - 1) // share + 1
    begin = np.zeros_like(end)
    if window:
        begin = np.maximum(start + pair // share - window + 1, 0) // tile * tile
    pieces = (end - 1) // split - begin // split + 1
    cut = (pieces > 1) & ((tiles[row] == 1) | (len(row) * kv_heads < ENOUGH))
    cut &= np.cumsum(np.where(cut, pieces * pairs, 0)) <= SCRATCH
    parts = np.where(cut, pieces, 1)
    of = np.repeat(np.arange(len(row)), parts)
    part = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
    first = np.cumsum(np.where(cut, pieces * pairs, 0)) - np.where(cut, pieces * pairs, 0)
    low = np.where(cut[of], np.maximum(begin[of], (begin[of] // split + part) * split), begin[of])
    high = np.where(cut[of], np.minimum(end[of], (begin[of] // split + part + 1) * split), end[of])
    scratch = np.where(cut[of], first[of] + part * pairs[of], -1)
    token0 = batch.starts[:-1][row]
    items = np.stack([token0[of], tokens[of], pair[of], start[of], row[of], low, high, scratch], axis=1)
    none = np.zeros(int(cut.sum()), np.int32)
    joins = np.stack([token0[cut], tokens[cut], pair[cut], first[cut], pieces[cut], pairs[cut], none, none], axis=1)
    return Work(items.astype(np.int32), joins.astype(np.int32), row[of])


@dataclass(frozen=True)
class Most:
    """The most work that :func:`plan` makes of a step: ``whole`` tiles, and ``pieces`` more of those that are cut."""

    whole: int
    pieces: int

    @property
    def items(self) -> int:
        return self.whole + self.pieces

    @property
    def joins(self) -> int:
        return min(self.whole, self.pieces)  # each that is cut has a piece more at least

    @staticmethod
    def of(tokens: int, rows: int, layout: KVLayout, heads: int, window: int | None, context: int) -> Most:
        """Of up to so many tokens in up to so many rows, at positions before ``context``."""
        share, tile = heads // layout.kv_heads, shape_of(layout)["TILE"]
        # ceil(n / 64) is (n + 63) / 64 at the most; and a row has no more tiles than its tokens would have apart.
        whole = min((tokens * share + (ROWS - 1) * min(rows, tokens)) // ROWS, tokens * -(-share // ROWS))
        across = -(-context // SPLIT)
        if window:  # from the first token's window, which begins with a tile, to the last token's end
            length = (ROWS - 1) // share + 1 + window + tile - 1
            across = min(across, (length - 2) // SPLIT + 2)
        # A piece has a row of scratch for each pair of its tile, and of these there are a multiple of the divisor.
        return Most(whole, min(whole * (across - 1), SCRATCH // math.gcd(share, ROWS)))


def at_tables(work: Work, offsets: Array) -> Work:
    """The same work over the tables of one group, which begin at ``offsets``."""
    items = work.items.copy()
    items[:, 4] = offsets[work.row]
    return Work(items, work.joins, work.row)


@dataclass(frozen=True)
class Scratch:
    """Room for partial results: mixed values [rows, kv_heads, head_dim], and maxima and sums [rows, kv_heads, 2]."""

    part: torch.Tensor
    sums: torch.Tensor

    @staticmethod
    def make(rows: int, kv_heads: int, head_dim: int, device: torch.device) -> Scratch:
        part = torch.empty(rows, kv_heads, head_dim, dtype=torch.float32, device=device)
        return Scratch(part, torch.empty(rows, kv_heads, 2, dtype=torch.float32, device=device))


def attend(
    queries: torch.Tensor,
    cache: Cache,
    layer: int,
    ids: torch.Tensor,
    items: torch.Tensor,
    joins: torch.Tensor,
    scratch: Scratch,
    scale: float,
    window: int | None,
    softcap: float,
    out: torch.Tensor,
) -> None:
    """out [M, heads * head_dim] for queries of the type that :func:`cache.computed` says; ``items`` and ``joins`` are
    those of :func:`plan`, on the device."""
    lay = cache.layout
    share = queries.shape[1] // (lay.kv_heads * lay.head_dim)
    attend_tile[(len(items), lay.kv_heads)](
        queries,
        cache.data,
        ids,
        items,
        out,
        scratch.part,
        scratch.sums,
        cache.block_stride,
        cache.offset(layer),
        scale,
        softcap,
        KV_HEADS=lay.kv_heads,
        GROUP=share,
        DIM=lay.head_dim,
        SIZE=lay.block_size,
        WINDOW=window or 0,
        HAS_SOFTCAP=softcap > 0,
        FP8=cache.fp8,
        **shape_of(lay),
    )
    if len(joins):
        rows = 16
        join_pieces[(len(joins), lay.kv_heads, ROWS // rows)](
            joins,
            scratch.part,
            scratch.sums,
            out,
            KV_HEADS=lay.kv_heads,
            GROUP=share,
            DIM=lay.head_dim,
            ROWS=rows,
            BLOCK=triton.next_power_of_2(lay.head_dim),
            num_warps=4,
            enable_fp_fusion=False,
        )
