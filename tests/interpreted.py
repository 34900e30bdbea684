"""Triton's programs over NumPy blocks, for tests that hold other backends' blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from octavo.kernels.backend import Batch
from octavo.kernels.triton.backend import TritonBackend

DEVICE = TritonBackend().device


class OverArrays:
    """A program that reads and writes blocks in a NumPy array, as the other backends' do."""

    def __init__(self, program: Any) -> None:
        self.program = program

    def run(self, batch: Batch, blocks: np.ndarray) -> np.ndarray:
        there = torch.from_numpy(blocks).to(DEVICE)
        logits: np.ndarray = self.program.run(batch, there).cpu().numpy().copy()
        if DEVICE.type == "cuda":
            blocks[:] = there.cpu().numpy()
        return logits


class ArrayBackend(TritonBackend):
    """The backend with such programs."""

    def program(self, *args: Any, **kwargs: Any) -> Any:
        return OverArrays(super().program(*args, **kwargs))
