"""A plan's rows as arrays for the kernels: copies of memory, no walking of lists."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from octavo.core.plan import Row
from octavo.kernels.backend import Batch


def as_int32(items: array[int]) -> np.ndarray:
    return np.frombuffer(items, dtype=np.int32) if len(items) else np.empty(0, np.int32)


def wanted(row: Row) -> int:
    """How many logits a row wants."""
    drawn = 1 + row.drafts if row.draws and len(row.targets) < len(row.tokens) else 0
    return len(row.targets) + drawn


def batch(rows: Sequence[Row], groups: int) -> Batch:
    """Concatenates rows; wants logits for scored tokens, and for the last token of rows that draw or for all that the
    draws of a row with drafts are from."""
    tokens: array[int] = array("i")
    starts: array[int] = array("i", [0])
    positions: array[int] = array("i")
    logits_at: array[int] = array("i")
    for row in rows:
        first = len(tokens)
        tokens.extend(row.tokens)
        positions.extend(range(row.start, row.start + len(row.tokens)))
        starts.append(len(tokens))
        if row.targets:
            logits_at.extend(range(first, first + len(row.targets)))
        if row.draws and len(row.targets) < len(row.tokens):
            logits_at.extend(range(len(tokens) - 1 - row.drafts, len(tokens)))
    tables = [_tables(rows, g) for g in range(groups)]
    return Batch(as_int32(tokens), as_int32(positions), as_int32(starts), tables, as_int32(logits_at))


def _tables(rows: Sequence[Row], group: int) -> tuple[np.ndarray, np.ndarray]:
    ids: array[int] = array("i")
    offsets: array[int] = array("i", [0])
    for row in rows:
        ids.extend(row.tables[group])
        offsets.append(len(ids))
    return as_int32(ids), as_int32(offsets)
