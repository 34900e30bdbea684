"""A mapped file gives its memory back once its bytes are packed, and can still be read."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.loading.mapped import MappedFile


def resident(path: Path) -> int:
    """Bytes of the file's mappings that are in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.endswith(f" {path}"):
            ours = True
        elif ours and line.startswith("Rss:"):
            total, ours = total + int(line.split()[1]) * 1024, False
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc what is resident")
def test_released_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = np.random.default_rng(1).integers(0, 256, 3_000_017, dtype=np.uint8)
    content.tofile(path)
    file = MappedFile(path)
    whole = file.data
    assert whole.sum() == content.sum() and resident(path) >= len(content)
    file.release(100_000, 2_000_000)
    assert resident(path) <= len(content) - 2_000_000 + 2 * 65_536
    file.release()
    assert resident(path) == 0
    assert np.array_equal(file.data[99_000:2_099_000], content[99_000:2_099_000])
