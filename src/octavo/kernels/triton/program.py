"""The decoder, recorded once and run by launching its kernels over buffers on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.kernels.backend import Batch, Ops
from octavo.kernels.triton import attention, gate, gemm, norm, rope_write
from octavo.kernels.triton.attention import Scratch
from octavo.kernels.triton.cache import Cache, check, computed
from octavo.kernels.triton.embed import embed, pick, recall
from octavo.kernels.triton.inputs import Drawn, Inputs, Sizes, Step, prepare
from octavo.kernels.triton.ladder import TABLES, Ladder, sizes_of
from octavo.kernels.triton.rounding import put
from octavo.kernels.triton.weights import Weight

log = logging.getLogger("octavo.kernels")


@dataclass(frozen=True)
class Where:
    """What a launch works on, besides values: the step's inputs, the cache, room for partial results."""

    step: Step
    cache: Cache
    scratch: Scratch


Launch = Callable[..., None]  # of (where, output, *inputs)


@dataclass(eq=False)
class Slot:
    """A value that some operator makes, and where it lives: known once all operators are recorded."""

    width: int
    logits: bool  # has a row for each wanted logit, not for each token
    products: set[torch.dtype] = field(default_factory=set)  # rounded to these types, where a product reads it
    exact: bool = False  # something else reads it too
    fixed: torch.dtype | None = None
    last_use: int = -1
    buffer: int = -1

    @property
    def dtype(self) -> torch.dtype:
        if self.fixed is not None:
            return self.fixed
        return next(iter(self.products)) if len(self.products) == 1 and not self.exact else torch.float32

    @property
    def kind(self) -> tuple[int, torch.dtype, bool]:
        return self.width, self.dtype, self.logits


@dataclass
class Call:
    """One recorded operator: how it is launched, the values it reads and makes."""

    launch: Launch
    inputs: tuple[Slot | None, ...]
    output: Slot


class Recorder:
    """Takes the decoder's calls down.

    Owns: the record.  Promises: a value is float32, unless products with 16-bit weights alone read it, or attention;
    then it is rounded once, when it is made.
    """

    def __init__(self, layout: KVLayout, heads: int, library: bool = False) -> None:
        self.layout, self.heads, self.library = layout, heads, library
        self.calls: list[Call] = []
        self.logits = False
        self.exchanges = False  # something runs in Python between kernels: such a step can't be a graph
        self.cap = 0.0
        self.result: Slot | None = None

    def embed(self, table: Weight, scale: float = 1.0) -> Slot:
        return self._record(table.cols, (), lambda at, out: embed(table, at.step.tokens, scale, out))

    def norm(self, x: Slot, weight: Tensor, eps: float, residual: Slot | None = None) -> Slot:
        def launch(at: Where, out: Tensor, x: Tensor, residual: Tensor | None) -> None:
            norm.norm(x, weight, eps, residual, out)

        return self._record(x.width, (x, residual), launch)

    def linear(
        self, x: Slot, weights: Sequence[Weight], bias: Tensor | None = None, residual: Slot | None = None
    ) -> Slot:
        def launch(at: Where, out: Tensor, x: Tensor, residual: Tensor | None) -> None:
            gemm.linear(x, weights, bias, residual, out, self.library)

        out = self._record(sum(w.rows for w in weights), (x, residual), launch, product=True)
        x.products |= {w.input for w in weights}
        return out

    def rope_write(
        self,
        qkv: Slot,
        layer: int,
        inv_freq: Tensor,
        scale: float,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Slot:
        group = self.layout.places[layer][0]

        def launch(at: Where, out: Tensor, qkv: Tensor) -> None:
            step, blocks = at.step, at.step.groups[group].blocks
            norms = q_norm, k_norm
            rope_write.rope_write(qkv, step.positions, blocks, inv_freq, norms, out, at.cache, layer, scale, eps)

        out = self._record(self.heads * self.layout.head_dim, (qkv,), launch)
        out.fixed = computed(self.layout)
        return out

    def attend(self, q: Slot, layer: int, scale: float, window: int | None, softcap: float = 0.0) -> Slot:
        group = self.layout.places[layer][0]

        def launch(at: Where, out: Tensor, q: Tensor) -> None:
            part = at.step.groups[group]
            attention.attend(
                q,
                at.cache,
                layer,
                at.step.ids,
                part.items,
                part.joins,
                at.scratch,
                scale,
                window,
                softcap,
                out,
            )

        return self._record(q.width, (q,), launch)

    def gate(self, gate_up: Slot, activation: str) -> Slot:
        return self._record(gate_up.width // 2, (gate_up,), lambda at, out, x: gate.gate(x, activation, out))

    def pick(self, x: Slot) -> Slot:
        self.logits = True
        return self._record(x.width, (x,), lambda at, out, x: pick(x, at.step.logits_at, out))

    def output(self, logits: Slot, softcap: float = 0.0) -> None:
        logits.last_use = 1 << 60  # nothing may overwrite the result
        logits.exact = True
        self.cap, self.result = softcap, logits

    def exchange(self, x: Slot, width: int | None, work: Callable[[Tensor], Tensor]) -> Slot:
        """For tensor parallelism: what ``work`` makes of x, see :mod:`octavo.kernels.parallel`."""

        def launch(at: Where, out: Tensor, x: Tensor) -> None:
            put(work(x), out)

        self.exchanges = True
        return self._record(x.width if width is None else width, (x,), launch)

    def _record(self, width: int, inputs: tuple[Slot | None, ...], launch: Launch, product: bool = False) -> Slot:
        for i, x in enumerate(inputs):
            if x is not None:
                x.last_use = max(x.last_use, len(self.calls))
                x.exact |= not (product and i == 0)
        out = Slot(width, self.logits)
        self.calls.append(Call(launch, inputs, out))
        return out

    def place(self) -> list[Slot]:
        """Gives each value a buffer, taking up those whose value is used no more; one slot of each buffer.

        An operator's inputs are alive while it makes its output.
        """
        free: dict[tuple[int, torch.dtype, bool], list[int]] = {}
        made: list[Slot] = []
        for at, call in enumerate(self.calls):
            shelf = free.setdefault(call.output.kind, [])
            call.output.buffer = shelf.pop() if shelf else len(made)
            if call.output.buffer == len(made):
                made.append(call.output)
            done = {id(x): x for x in (*call.inputs, call.output) if x is not None and x.last_use <= at}
            for x in done.values():
                free.setdefault(x.kind, []).append(x.buffer)
        return made


class Buffers:
    """Owns: the activations' memory, for so many tokens and logits."""

    def __init__(self, slots: Sequence[Slot], device: torch.device, tokens: int = 0, logits: int = 0) -> None:
        self.slots, self.device = slots, device
        self.tokens, self.logits = tokens, logits
        self.tensors = [
            torch.empty(logits if s.logits else tokens, s.width, dtype=s.dtype, device=device) for s in slots
        ]

    def hold(self, tokens: int, logits: int) -> bool:
        return tokens <= self.tokens and logits <= self.logits

    def grown(self, tokens: int, logits: int) -> Buffers:
        """Others, with room for so many at least."""
        return Buffers(self.slots, self.device, max(self.tokens, tokens), max(self.logits, logits))

    def of(self, slot: Slot, step: Step) -> Tensor:
        return self.tensors[slot.buffer][: len(step.logits_at) if slot.logits else len(step.tokens)]


class TritonProgram:
    """A recorded decoder.

    Owns: the record, the activations' memory, the step's inputs on the device, the ladder of graphs.  Promises: a run
    writes only the slots of the batch's tokens; its result is a view that the next run overwrites; memory that is
    reserved for the largest step never moves, and a larger one takes more beside it, so that graphs stay.
    """

    def __init__(
        self,
        build: Callable[[Ops], None],
        layout: KVLayout,
        heads: int,
        device: torch.device,
        library: bool = False,
        drawn: Drawn | None = None,
    ) -> None:
        check(layout)
        self.layout, self.heads, self.device = layout, heads, device
        recorder: Any = Recorder(layout, heads, library)
        build(recorder)
        self.calls, self.cap, self.result = recorder.calls, recorder.cap, recorder.result
        self.exchanges = recorder.exchanges
        self.buffers = Buffers(recorder.place(), device)
        self.inputs = Inputs(device)
        self.drawn = drawn or Drawn()
        self.ladder: Ladder | None = None
        self.reserved: LargestStep | None = None
        self._address = 0
        self.scratch = Scratch.make(attention.SCRATCH, layout.kv_heads, layout.head_dim, device)

    def reserve(self, most: LargestStep) -> None:
        """Takes the memory that the largest step needs, in place of what was there."""
        self.ladder = None
        self.buffers = Buffers(self.buffers.slots, self.device)  # let go before as much is taken again
        self.buffers = self.buffers.grown(most.tokens, most.logits)
        sizes = Sizes.of(most, self.layout, self.heads)
        self.inputs.reserve(replace(sizes, ids=min(sizes.ids, TABLES)))
        self.reserved = most

    def prepare(self, blocks: Tensor, most: LargestStep, progress: Callable[[int, int], None] | None = None) -> None:
        """Records the ladder of graphs for steps of a token of each row over these blocks; there are none on a CPU."""
        if self.device.type == "cuda" and not self.exchanges:
            token = torch.zeros(1, dtype=torch.int32, device=self.device)
            recall(token, token)  # compiled now, not under load
            self.climb(blocks, most.rows, most.context, progress)

    def climb(
        self, blocks: Tensor, tokens: int, context: int, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """From now on steps of up to so many tokens are padded to rungs of a ladder."""
        self.ladder = None
        self._make_room(tokens, tokens)
        launch = partial(self._launch, Cache.of(blocks, self.layout), self.buffers)
        ladder = Ladder(self.device, sizes_of(tokens, self.layout, self.heads, context), launch)
        ladder.build(progress)
        self.ladder, self._address = ladder, blocks.data_ptr()

    def descend(self) -> None:
        """Give up the ladder and its memory."""
        self.ladder = None

    def run(self, batch: Batch, blocks: Tensor) -> Tensor:
        prepared = prepare(batch, self.layout, self.heads, self.drawn.of(batch.tokens))
        if self.ladder is not None and blocks.data_ptr() == self._address:
            logits = self.ladder.run(prepared)
            if logits is not None:
                return logits
        self._make_room(prepared.sizes.tokens, prepared.sizes.logits)
        return self._launch(Cache.of(blocks, self.layout), self.buffers, self.inputs.send(prepared))

    def _make_room(self, tokens: int, logits: int) -> None:
        """The ladder, if any, keeps the activations that its graphs know."""
        if self.buffers.hold(tokens, logits):
            return
        if self.reserved is not None:
            log.warning("a step of %d tokens and %d logits takes more memory than was reserved", tokens, logits)
            self.reserved = None  # said once
        room = max(self.buffers.tokens, tokens), max(self.buffers.logits, logits)
        if self.ladder is None:  # let go before as much is taken again; if that fails, a smaller step may find room
            self.buffers = Buffers(self.buffers.slots, self.device)
        self.buffers = self.buffers.grown(*room)

    def _launch(self, cache: Cache, buffers: Buffers, step: Step) -> Tensor:
        where = Where(step, cache, self.scratch)
        for call in self.calls:
            if call.output.logits and not len(step.logits_at):
                break
            inputs = [None if x is None else buffers.of(x, step) for x in call.inputs]
            call.launch(where, buffers.of(call.output, step), *inputs)
        logits = buffers.of(self.result, step)
        if self.cap and len(logits):
            gate.softcap(logits, self.cap)
        return logits
