"""A weight as it lies in the file: type name, logical shape, and the raw bytes (usually a view of a memory map)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# type -> (weights per block, bytes per block)
TYPES: dict[str, tuple[int, int]] = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q8_0": (32, 34),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint.

    ``shape`` is row-major, (rows, columns) for matrices: ``y = x . W^T`` with W of shape (N, K) as transformers writes
    it (GGUF's ``ne`` reversed).  ``data`` is a flat uint8 array of ``nbytes`` bytes, row after row.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        per, size = TYPES[self.type]
        n = 1
        for d in self.shape:
            n *= d
        return n // per * size
