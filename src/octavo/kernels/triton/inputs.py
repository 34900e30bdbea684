"""One step's inputs on the device: all arrays of a batch, packed into one and sent in one copy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.kernels.backend import Batch
from octavo.kernels.triton import attention
from octavo.kernels.triton.embed import recall

Array = np.ndarray

ALIGNED = 4  # integers: sections begin at multiples of 16 bytes, as the kernels' loads like it


@dataclass(frozen=True)
class Sizes:
    """How many there are of each thing; ``items`` and ``joins`` for each layer group, ``ids`` over all of them."""

    tokens: int
    logits: int
    items: tuple[int, ...]
    joins: tuple[int, ...]
    ids: int

    @staticmethod
    def of(most: LargestStep, layout: KVLayout, heads: int) -> Sizes:
        """The most of each that a step can have."""
        work = {
            window: attention.Most.of(most.tokens, most.rows, layout, heads, window, most.context)
            for window in dict.fromkeys(layout.windows)
        }
        items = tuple(work[window].items for window in layout.windows)
        joins = tuple(work[window].joins for window in layout.windows)
        ids = most.rows * -(-most.context // layout.block_size) * len(layout.groups)
        return Sizes(most.tokens, most.logits, items, joins, ids)

    def hold(self, other: Sizes) -> bool:
        """Whether as many as ``other`` has fit."""
        mine, its = ((s.tokens, s.logits, *s.items, *s.joins, s.ids) for s in (self, other))
        return all(a >= b for a, b in zip(mine, its, strict=True))

    def places(self) -> list[tuple[int, int]]:
        """(first, length) of the arrays as they are packed: tokens, positions, logits_at; of each group the tokens'
        blocks, items and joins; and last, so that of long tables only what is used is sent, the tables' ids."""
        lengths = [self.tokens, self.tokens, self.logits]
        for items, joins in zip(self.items, self.joins, strict=True):
            lengths += [self.tokens, items * attention.FIELDS, joins * attention.FIELDS]
        lengths.append(self.ids)
        ends = np.cumsum([-(-n // ALIGNED) * ALIGNED for n in lengths]).tolist()
        return list(zip([0, *ends[:-1]], lengths, strict=True))


@dataclass(frozen=True)
class Group:
    """A layer group's part of a step, on the device."""

    blocks: torch.Tensor  # of each token: where its keys and values go; -1: nowhere
    items: torch.Tensor
    joins: torch.Tensor


@dataclass(frozen=True)
class Step:
    """One step's inputs on the device, int32."""

    tokens: torch.Tensor
    positions: torch.Tensor
    logits_at: torch.Tensor
    groups: tuple[Group, ...]
    ids: torch.Tensor


@dataclass(frozen=True)
class Prepared:
    """A batch's arrays, in the order of :meth:`Sizes.places`, still on the host."""

    sizes: Sizes
    arrays: list[Array]
    drawn: torch.Tensor | None = None  # what negative tokens stand for, if there are any


class Drawn:
    """Owns: the tokens drawn last, int32 [n] on the device, for the next step's tokens to stand for."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None

    def of(self, tokens: Array) -> torch.Tensor | None:
        """What a batch's negative tokens are looked up in; None if it has none."""
        most = -int(tokens.min(initial=0))
        if most == 0:
            return None
        if self.tokens is None or most > len(self.tokens):
            raise ValueError(f"a token stands for draw {most - 1}, and there was none")
        return self.tokens


def prepare(batch: Batch, layout: KVLayout, heads: int, drawn: torch.Tensor | None = None) -> Prepared:
    """What the kernels need to know of a batch, and what its negative tokens are looked up in."""
    arrays = [batch.tokens, batch.positions, batch.logits_at]
    row = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
    logical = batch.positions // layout.block_size
    work = {window: attention.plan(batch, layout, heads, window) for window in dict.fromkeys(layout.windows)}
    tables, items, joins, before = [], [], [], 0
    for g, window in enumerate(layout.windows):
        table, offsets = batch.tables[g]
        mine = attention.at_tables(work[window], offsets + before)
        arrays += [table[offsets[row] + logical], mine.items.reshape(-1), mine.joins.reshape(-1)]
        items.append(len(mine.items))
        joins.append(len(mine.joins))
        tables.append(table)
        before += len(table)
    arrays.append(np.concatenate(tables))
    return Prepared(Sizes(len(batch.tokens), len(batch.logits_at), tuple(items), tuple(joins), before), arrays, drawn)


class Inputs:
    """Owns: the packed array on the device, and two pinned ones on the host that are filled in turn.

    Promises: what is sent for one step stays as it is on the device until the next is sent; where ``sizes`` are larger
    than the batch's, the rest is padding: tokens that write nowhere, and items and joins without rows.
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
        places = sizes.places()
        used = places[-1][0] + prepared.sizes.ids
        self.reserve(sizes)
        staged = self._staged[self._turn]
        if self._sent:
            self._sent[self._turn].synchronize()
        host = staged.numpy()
        host[:used] = 0
        for i, ((at, length), array) in enumerate(zip(places, prepared.arrays, strict=True)):
            host[at : at + len(array)] = array
            if i >= 3 and i % 3 == 0 and i < len(places) - 1:  # the tokens' blocks
                host[at + len(array) : at + length] = -1
        self.packed[:used].copy_(staged[:used], non_blocking=True)
        if self._sent:
            self._sent[self._turn].record()
            self._turn ^= 1
        step = self.step(sizes)
        if prepared.drawn is not None:
            recall(step.tokens, prepared.drawn)
        return step

    def reserve(self, sizes: Sizes) -> None:
        """Room for so many; what was there before is lost if it grows."""
        first, length = sizes.places()[-1]
        if self._staged and first + length <= len(self.packed):
            return
        needed = first + length
        unit = max(1024, 1 << needed.bit_length() - 4)  # a little more is taken, so that it does not grow each time
        room = -(-needed // unit) * unit
        on_gpu = self.device.type == "cuda"
        for event in self._sent:
            event.synchronize()
        self.packed = torch.empty(room, dtype=torch.int32, device=self.device)
        self._staged = [torch.empty(room, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)] if on_gpu else []

    def step(self, sizes: Sizes) -> Step:
        """The sections as they lie on the device."""
        parts = [self.packed[at : at + n] for at, n in sizes.places()]
        groups = tuple(
            Group(blocks, items.view(-1, attention.FIELDS), joins.view(-1, attention.FIELDS))
            for blocks, items, joins in zip(*(parts[3 + i : -1 : 3] for i in range(3)), strict=True)
        )
        return Step(parts[0], parts[1], parts[2], groups, parts[-1])
