"""Files of weights, mapped into memory for reading; pages can be given back once their bytes are somewhere else."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octavo.errors import ModelError


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: type name, row-major shape, and its bytes in the file (-1: a type that we can't size)."""

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class MappedFile:
    """Owns: a read-only memory map.

    Promises: views stay valid, released or not, for the mapping lives as long as one does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _mapped(path)
        self.data = np.frombuffer(self._map, np.uint8)

    def bytes_of(self, entry: Entry) -> np.ndarray:
        """A view of the tensor's raw bytes, uint8."""
        return self.data[entry.start : entry.start + entry.nbytes]

    def release(self, start: int = 0, nbytes: int | None = None) -> None:
        """Takes whole pages inside the range out of this process's memory; touched again, they're read again."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return  # not on this system: the pages go when it needs memory
        page = mmap.PAGESIZE
        end = len(self.data) if nbytes is None else start + nbytes
        first = -(-start // page) * page
        last = end if end == len(self.data) else end // page * page
        if last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _mapped(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) == 0:
                raise ModelError(f"{path} is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path} doesn't exist") from None
    except (OSError, ValueError) as e:
        raise ModelError(f"{path} can't be read: {e}") from None
