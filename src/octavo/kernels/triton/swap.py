"""Blocks to and from pinned host memory, on a stream of their own beside the kernels.

What goes out is first copied aside on the device, which takes next to no time, so that its blocks can be written anew
at once; from there it crosses the bus while the step computes.  What comes in is waited for by the kernels behind it,
not by the CPU.  Everything is ordered by events: on one stream in the order of the moves, between the streams by who
wrote what the other reads.  Without a GPU the same copies run one after the other.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from octavo.kernels.triton.move import copy, independent, sent

ASIDE = 64 << 20  # bytes of each of the two buffers that blocks wait in


def waiting_room(block_bytes: int) -> int:
    """How many blocks each of the two buffers has room for."""
    return max(1, ASIDE // block_bytes)


class Swap:
    """Owns: the stream, and two buffers on the device that are filled in turn.

    Promises: a move's bytes are those that its source had when it was asked for; whatever runs on the device next finds
    its target written.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._aside: list[torch.Tensor] = []
        self._emptied: list[torch.cuda.Event] = []
        self._turn = 0

    def out(self, source: torch.Tensor, target: torch.Tensor, pairs: np.ndarray) -> None:
        """From the device to the host."""
        room = self._reserve(source)
        for run in independent(pairs, one=False):
            for first in range(0, len(run), room):
                self._out(source, target, run[first : first + room])

    def into(self, source: torch.Tensor, target: torch.Tensor, pairs: np.ndarray) -> None:
        """From the host to the device."""
        there = [sent(run, self.device) for run in independent(pairs, one=False)]
        self._after_kernels(*there)  # some may still read what is overwritten
        with self._beside():
            for run in there:
                copy(source, target, run)
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def finish(self) -> None:
        """Wait until all has ended."""
        if self.stream is not None:
            self.stream.synchronize()

    def _out(self, source: torch.Tensor, target: torch.Tensor, pairs: np.ndarray) -> None:
        turn, self._turn = self._turn, self._turn ^ 1
        aside, count = self._aside[turn], np.arange(len(pairs))
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_event(self._emptied[turn])
        leaving = sent(np.stack([pairs[:, 0], count], axis=1), self.device)
        arriving = sent(np.stack([count, pairs[:, 1]], axis=1), self.device)
        copy(source, aside, leaving)
        self._after_kernels(arriving)
        with self._beside():
            copy(aside, target, arriving)
        if self.stream is not None:
            self._emptied[turn].record(self.stream)

    def _after_kernels(self, *used: torch.Tensor) -> None:
        """What comes next on the stream waits for the kernels so far, and uses memory that theirs gave."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            for tensor in used:
                tensor.record_stream(self.stream)

    def _beside(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self.stream) if self.stream else nullcontext()
        return context

    def _reserve(self, blocks: torch.Tensor) -> int:
        """How many blocks there is room for aside."""
        size = blocks.shape[1]
        room = min(waiting_room(size), len(blocks))
        if not self._aside or self._aside[0].shape[1] != size or len(self._aside[0]) < room:
            self.finish()
            self._aside = []
            self._aside = [torch.empty(room, size, dtype=torch.uint8, device=self.device) for _ in range(2)]
            self._emptied = [torch.cuda.Event() for _ in range(2)] if self.stream is not None else []
        return len(self._aside[0])
