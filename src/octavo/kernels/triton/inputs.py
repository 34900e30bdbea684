"""One step's inputs on the device: all arrays of a batch, packed into one and sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.kernels.backend import Batch
from octavo.kernels.triton import attention

Array = np.ndarray

ALIGNED = 4  # integers: sections begin at multiples of 16 bytes, as the kernels' loads like it


@dataclass(frozen=True)
class Sizes:
    """How many there are of each thing; ``ids``, ``items`` and ``joins`` for each layer group."""

    tokens: int
    logits: int
    ids: tuple[int, ...]
    items: tuple[int, ...]
    joins: tuple[int, ...]

    def hold(self, other: Sizes) -> bool:
        """Whether as many as ``other`` has fit."""
        pairs = [(self.tokens, other.tokens), (self.logits, other.logits)]
        for mine, its in ((self.ids, other.ids), (self.items, other.items), (self.joins, other.joins)):
            pairs += list(zip(mine, its, strict=True))
        return all(a >= b for a, b in pairs)

    def sections(self) -> list[int]:
        """Lengths of the arrays as they are packed: tokens, positions, logits_at; and for each group the tokens'
        blocks, items, joins and the tables' ids."""
        out = [self.tokens, self.tokens, self.logits]
        for ids, items, joins in zip(self.ids, self.items, self.joins, strict=True):
            out += [self.tokens, items * attention.FIELDS, joins * attention.FIELDS, ids]
        return out


@dataclass(frozen=True)
class Group:
    """A layer group's part of a step, on the device."""

    blocks: torch.Tensor  # of each token: where its keys and values go
    items: torch.Tensor
    joins: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One step's inputs on the device, int32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    logits_at: torch.Tensor
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class Prepared:
    """A batch's arrays, in the order of :meth:`Sizes.sections`, still on the host."""

    sizes: Sizes
    arrays: list[Array]


def prepare(batch: Batch, layout: KVLayout, heads: int) -> Prepared:
    """What the kernels need to know of a batch."""
    arrays = [batch.tokens, batch.positions, batch.logits_at]
    row = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
    logical = batch.positions // layout.block_size
    work = {window: attention.plan(batch, layout, heads, window) for window in dict.fromkeys(layout.windows)}
    ids, items, joins = [], [], []
    for g, window in enumerate(layout.windows):
        table, offsets = batch.tables[g]
        mine = attention.at_tables(work[window], batch, g)
        arrays += [table[offsets[row] + logical], mine.items.reshape(-1), mine.joins.reshape(-1), table]
        ids.append(len(table))
        items.append(len(mine.items))
        joins.append(len(mine.joins))
    sizes = Sizes(len(batch.tokens), len(batch.logits_at), tuple(ids), tuple(items), tuple(joins))
    return Prepared(sizes, arrays)


class Inputs:
    """Owns: the packed array on the device, and two pinned ones on the host that are filled in turn.

    Promises: what is sent for one step stays as it is on the device until the next is sent; with ``sizes`` larger than
    the batch's the rest is padding: tokens that write nowhere, and items that have none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.packed = torch.empty(0, dtype=torch.int32, device=device)
        self._staged: list[torch.Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        self._turn = 0

    def send(self, prepared: Prepared, sizes: Sizes | None = None) -> Step:
        """The step on the device, its sections as long as ``sizes`` says."""
        sizes = sizes or prepared.sizes
        lengths = sizes.sections()
        places = np.cumsum([0, *(-(-n // ALIGNED) * ALIGNED for n in lengths)])
        total = int(places[-1])
        self._reserve(total)
        staged = self._staged[self._turn]
        if self._sent:
            self._sent[self._turn].synchronize()
        host = staged.numpy()
        host[:total] = 0
        for at, array in zip(places, prepared.arrays, strict=False):
            host[at : at + len(array)] = array
        for g in range(len(sizes.ids)):  # padding tokens write nowhere
            at, used = places[3 + 4 * g], prepared.sizes.tokens
            host[at + used : at + sizes.tokens] = -1
        self.packed[:total].copy_(staged[:total], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
            self._turn ^= 1
        return self._step(sizes, places)

    def _reserve(self, total: int) -> None:
        if self._staged and total <= len(self.packed):
            return
        room = 1 << (total - 1).bit_length()
        on_gpu = self.device.type == "cuda"
        for event in self._sent:
            event.synchronize()
        self.packed = torch.empty(room, dtype=torch.int32, device=self.device)
        self._staged = [torch.empty(room, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if on_gpu else []

    def _step(self, sizes: Sizes, places: Array) -> Step:
        parts = [self.packed[at : at + n] for at, n in zip(places.tolist(), sizes.sections(), strict=False)]
        groups = tuple(
            Group(blocks, items.view(-1, attention.FIELDS), joins.view(-1, attention.FIELDS), ids)
            for blocks, items, joins, ids in zip(*(parts[3 + i :: 4] for i in range(4)), strict=True)
        )
        return Step(parts[0], parts[1], parts[2], groups)
