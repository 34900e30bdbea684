"""What takes a GPU's memory, found by running the largest step and by recording its graphs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.core.params import MAX_BRANCHES
from octavo.core.plan import DEVICE, LargestStep
from octavo.kernels.backend import Backend, Batch, Program, SampleBatch
from octavo.kernels.triton.program import TritonProgram
from octavo.kernels.triton.sample import WORKSPACE

SEEN = 4096  # positions that the rows of the step see: what attention takes does not grow with them


@dataclass(frozen=True)
class Held:
    """Who has how many bytes of a GPU: ``own`` is what torch has taken for this process, ``others`` all the rest."""

    name: str
    total: int
    free: int
    own: int

    @property
    def others(self) -> int:
        return self.total - self.free - self.own


@dataclass(frozen=True)
class Measured:
    """Bytes that weights take, the largest step beside them, and the graphs with their inputs; and of ``others``."""

    others: int = 0
    weights: int = 0
    step: int = 0
    graphs: int = 0


def memory_of(device: torch.device) -> Held:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return Held(torch.cuda.get_device_name(device), total, free, torch.cuda.memory_reserved(device))


def measure(
    backend: Backend, program: Program, layout: KVLayout, device: torch.device, most: LargestStep
) -> Measured | None:
    """Lets the program reserve its memory, and runs the largest step over a single block.

    Graphs know where the blocks lie, so those that are recorded here, to see what they take, are given up again.  None
    if there is no GPU: then all that is found is that the step runs.
    """
    on_gpu = device.type == "cuda"
    blocks = backend.store(1, layout.block_bytes, DEVICE)
    blocks[:] = 0
    if on_gpu:
        before = memory_of(device)
        torch.cuda.reset_peak_memory_stats(device)
    program.reserve(most)
    logits = program.run(largest_batch(layout, most), blocks)
    count, vocab = logits.shape
    at_once = max(1, WORKSPACE // (8 * vocab))  # draws that run in one part
    draws = max(count, min(at_once, MAX_BRANCHES * most.rows)) if on_gpu else count
    backend.sample(logits, largest_samples(draws, count))
    if not on_gpu:
        return None
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device) - before.own
    del logits
    after = memory_of(device)
    graphs = 0
    if isinstance(program, TritonProgram):
        program.prepare(blocks, most)
        graphs = max(0, after.free - memory_of(device).free)
        program.descend()
    del blocks
    # A draw with penalties brings its history, two integers for each token that it holds.
    histories = 8 * min(draws, at_once) * min(most.context, vocab)
    return Measured(after.others, before.own, peak + histories, graphs)


def largest_batch(layout: KVLayout, most: LargestStep) -> Batch:
    """A step of so many tokens, in rows as long as one another, at the end of what they see.

    All blocks are block 0: what is computed means nothing.
    """
    tokens = min(most.tokens, most.rows * most.context)
    lengths = (np.arange(1, most.rows + 1) * tokens // most.rows - np.arange(most.rows) * tokens // most.rows).tolist()
    seen = max(min(most.context, SEEN), max(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    positions = np.concatenate([np.arange(seen - n, seen, dtype=np.int32) for n in lengths])
    held = -(-seen // layout.block_size)
    table = np.zeros(held * most.rows, np.int32), np.arange(most.rows + 1, dtype=np.int32) * held
    wanted = np.linspace(0, tokens - 1, min(most.logits, tokens)).astype(np.int32)
    return Batch(np.zeros(tokens, np.int32), positions, starts, [table for _ in layout.groups], wanted)


def largest_samples(draws: int, logits: int) -> SampleBatch:
    """So many draws from so many rows of logits, with everything on that takes memory."""
    one, none = np.ones(draws, np.float32), np.zeros(draws, np.float32)
    numbers = np.zeros(draws, np.int32)
    each = np.arange(draws + 1, dtype=np.int32)
    entries = np.zeros(draws, np.int32)
    return SampleBatch(
        row=each[:-1] % logits,
        temperature=one,
        top_k=numbers,
        top_p=one * np.float32(0.9),
        min_p=none,
        repetition=one,
        presence=none,
        frequency=none,
        seed=np.zeros(draws, np.uint64),
        branch=numbers,
        position=numbers,
        logprobs=numbers + 1,
        bias=(each, entries, none),
        history=(each * 0, entries[:0], entries[:0]),
    )
