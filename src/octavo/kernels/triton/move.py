"""Copies of whole blocks in one launch: within the device, and between it and pinned host memory, which it reads."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl

WORDS = 1024  # 8-byte words that one program copies


@triton.jit
def copy_blocks(source, target, pairs, source_stride, target_stride, words, BLOCK: tl.constexpr):
    pair = pairs + tl.program_id(0) * 2
    at = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    read = source + tl.load(pair).to(tl.int64) * source_stride + at
    written = target + tl.load(pair + 1).to(tl.int64) * target_stride + at
    tl.store(written, tl.load(read, mask=inside), mask=inside)


def move(blocks: torch.Tensor, pairs: np.ndarray, device: torch.device) -> None:
    """blocks[pairs[i, 1]] = blocks[pairs[i, 0]] in order, of an array uint8 [n, block_bytes] on the device."""
    for run in independent(pairs, one=True):
        copy(blocks, blocks, sent(run, device))


def sent(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """As int32 on the device; on a GPU by way of pinned memory, so that the CPU does not wait for what runs there.

    torch keeps that memory from being taken again until the copy has ended.
    """
    there = torch.from_numpy(np.ascontiguousarray(numbers, np.int32))
    return there.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else there


def copy(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """One launch for pairs that may be copied in any order."""
    size = source.shape[1]
    word = next(t for t in (torch.int64, torch.int32, torch.int16, torch.uint8) if size % t.itemsize == 0)
    a, b = source.view(word), target.view(word)
    grid = len(pairs), triton.cdiv(a.shape[1], WORDS)
    copy_blocks[grid](a, b, pairs, a.stride(0), b.stride(0), a.shape[1], BLOCK=WORDS)


def independent(pairs: np.ndarray, one: bool) -> Iterator[np.ndarray]:
    """The pairs cut into runs that may be copied in any order; ``one``: source and target are one array."""
    begin = 0
    read: set[int] = set()
    written: set[int] = set()
    for i, (a, b) in enumerate(pairs.tolist()):
        if b in written or (one and (a in written or b in read)):
            yield pairs[begin:i]
            begin, read, written = i, set(), set()
        read.add(a)
        written.add(b)
    if begin < len(pairs):
        yield pairs[begin:]
