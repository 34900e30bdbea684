"""Runs a Program over sequences with the simplest of block allocators: for tests of kernels and decoder."""

from __future__ import annotations

import random
from collections.abc import Sequence as Run
from dataclasses import dataclass, field

import numpy as np

from octavo.core.layout import KVLayout
from octavo.kernels.backend import Backend, Batch, Program
from octavo.models import decoder


def load(
    backend: Backend, checkpoint: decoder.Checkpoint, block_size: int = 16, dtype: str = "float32", blocks: int = 1024
) -> Drive:
    """A model on a backend, ready to be driven."""
    weights = decoder.load_weights(backend, checkpoint)
    layout = decoder.kv_layout(checkpoint.spec, block_size, dtype)
    return Drive(decoder.compile_model(backend, checkpoint.spec, weights, layout), layout, blocks)


@dataclass
class Row:
    """A sequence: how many tokens it holds, and its block table in each layer group (-1: freed)."""

    tables: list[list[int]]
    length: int = 0
    freed: list[int] = field(default_factory=list)  # per group: head blocks given back


class Drive:
    """Owns the blocks.

    Free blocks are handed out in a random order and are full of NaN, so that reading a slot that nobody wrote shows.
    """

    def __init__(self, program: Program, layout: KVLayout, blocks: int = 1024, seed: int = 0) -> None:
        self.program, self.layout = program, layout
        self.blocks = np.full((blocks, layout.block_bytes), 0xFF, dtype=np.uint8)  # NaN in all float types
        self.free = list(range(blocks))
        random.Random(seed).shuffle(self.free)

    def sequence(self) -> Row:
        groups = len(self.layout.groups)
        return Row([[] for _ in range(groups)], freed=[0] * groups)

    def step(self, rows: Run[tuple[Row, Run[int]]], every: bool = True) -> list[np.ndarray]:
        """Appends tokens to each sequence in one batch; logits float32 [n, V] of every token, or of the last."""
        for row, tokens in rows:
            self._reserve(row, row.length + len(tokens))
        batch = self._batch(rows, every)
        logits = np.array(self.program.run(batch, self.blocks))
        assert logits.dtype == np.float32
        for row, tokens in rows:
            row.length += len(tokens)
            self._slide(row)
        counts = [len(tokens) if every else 1 for _, tokens in rows]
        return np.split(logits, np.cumsum(counts)[:-1])

    def logits(self, tokens: Run[int], chunks: Run[int] = ()) -> np.ndarray:
        """[n, V] of a new sequence: chunks of the sizes given, then the rest at once."""
        row, done, out = self.sequence(), 0, []
        for size in [*chunks, len(tokens)]:
            piece = tokens[done : done + size]
            if piece:
                out += self.step([(row, piece)])
            done += len(piece)
        self.release(row)
        return np.concatenate(out)

    def release(self, row: Row) -> None:
        for table in row.tables:
            self._give_back([b for b in table if b >= 0])
        row.tables = [[] for _ in row.tables]

    def _reserve(self, row: Row, length: int) -> None:
        for table in row.tables:
            while len(table) * self.layout.block_size < length:
                table.append(self.free.pop())

    def _slide(self, row: Row) -> None:
        """Frees the blocks of windowed groups that no later token can see."""
        for g, window in enumerate(self.layout.windows):
            if window is None:
                continue
            last = max(0, row.length - window + 1) // self.layout.block_size
            table = row.tables[g]
            self._give_back(table[row.freed[g] : last])
            table[row.freed[g] : last] = [-1] * (last - row.freed[g])
            row.freed[g] = last

    def _give_back(self, ids: list[int]) -> None:
        self.blocks[ids] = 0xFF
        self.free[:0] = ids

    def _batch(self, rows: Run[tuple[Row, Run[int]]], every: bool) -> Batch:
        counts = [len(tokens) for _, tokens in rows]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        tables = []
        for g in range(len(self.layout.groups)):
            ids = [row.tables[g] for row, _ in rows]
            offsets = np.cumsum([0, *map(len, ids)]).astype(np.int32)
            tables.append((np.array([b for t in ids for b in t], dtype=np.int32), offsets))
        return Batch(
            tokens=np.array([t for _, tokens in rows for t in tokens], dtype=np.int32),
            positions=np.array([row.length + i for row, tokens in rows for i in range(len(tokens))], dtype=np.int32),
            starts=starts,
            tables=tables,
            logits_at=np.arange(starts[-1], dtype=np.int32) if every else starts[1:] - 1,
        )
