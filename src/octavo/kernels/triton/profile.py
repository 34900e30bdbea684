"""What a step takes of a GPU's memory, found by running the largest one."""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import DEVICE
from octavo.kernels.backend import Backend, Batch, Program, SampleBatch


def memory_of(device: torch.device) -> tuple[str, int, int, int]:
    """Name, bytes in all, bytes that others than this process's tensors have, bytes that its tensors have."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return torch.cuda.get_device_name(device), total, total - free - own, own


def step_bytes(
    backend: Backend, program: Program, layout: KVLayout, device: torch.device, batch: Batch, samples: SampleBatch
) -> int:
    """The most that a step takes beside weights and blocks.  Not on a GPU: 0, and all that is found is that it runs."""
    measured = device.type == "cuda"
    blocks = backend.store(1, layout.block_bytes, DEVICE)
    blocks[:] = 0
    before = memory_of(device)[3] if measured else 0
    if measured:
        torch.cuda.reset_peak_memory_stats(device)
    logits = program.run(batch, blocks)
    backend.sample(logits, samples)
    if not measured:
        return 0
    torch.cuda.synchronize(device)
    peak: int = torch.cuda.max_memory_reserved(device) - before
    del logits, blocks
    torch.cuda.empty_cache()
    return peak


def largest_batch(layout: KVLayout, tokens: int, rows: int, logits: int, context: int) -> Batch:
    """A step of so many tokens: single ones in all rows but the first, which has the rest; all at the context's end.

    All blocks are block 0: what is computed means nothing.
    """
    chunk = min(tokens - rows + 1, context)
    lengths = np.array([chunk] + [1] * (rows - 1), np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    count = int(starts[-1])
    positions = np.concatenate([np.arange(context - n, context, dtype=np.int32) for n in lengths])
    held = -(-context // layout.block_size)
    table = np.zeros(held * rows, np.int32), np.arange(rows + 1, dtype=np.int32) * held
    wanted = np.linspace(0, count - 1, min(logits, count)).astype(np.int32)
    return Batch(np.zeros(count, np.int32), positions, starts, [table for _ in layout.groups], wanted)


def largest_samples(logits: int) -> SampleBatch:
    """A draw from each row with everything on that takes memory."""
    one, none = np.ones(logits, np.float32), np.zeros(logits, np.float32)
    numbers = np.zeros(logits, np.int32)
    each = np.arange(logits + 1, dtype=np.int32)
    entries = np.zeros(logits, np.int32)
    return SampleBatch(
        row=np.arange(logits, dtype=np.int32),
        temperature=one,
        top_k=numbers,
        top_p=one * np.float32(0.9),
        min_p=none,
        repetition=one,
        presence=none,
        frequency=none,
        seed=np.zeros(logits, np.uint64),
        branch=numbers,
        position=numbers,
        logprobs=numbers + 1,
        bias=(each, entries, none),
        history=(each * 0, entries[:0], entries[:0]),
    )
