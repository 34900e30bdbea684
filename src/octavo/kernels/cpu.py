"""The CPU backend: the decoder recorded once, and replayed on every step by one native call."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.kernels.backend import Batch, Ops, SampleBatch, Sampled, Synchronous
from octavo.kernels.select import load_kernels
from octavo.kernels.threads import choose_threads

Array = np.ndarray

log = logging.getLogger(__name__)

PAGE = 4096
ROW_TILE = 256  # tokens that pass from one attention to the next together, so that activations stay in cache


class CpuBackend(Synchronous):
    """Native kernels.

    Owns: the threads and their working memory; one call runs at a time, others wait.

    Promises: an output row has the same bits whatever rows run with it and on however many threads; bad arrays raise
    ValueError, TypeError or IndexError before anything is written; the interpreter lock is not held while computing.

    ``compute="fast"`` rounds activations to 8 bits where weights are quantised, ``"exact"`` does not.  ``isa`` names
    the instruction set (default: the best that the machine runs).
    """

    def __init__(self, threads: int | None = None, compute: str = "fast", isa: str | None = None) -> None:
        if compute not in ("fast", "exact"):
            raise ValueError(f"compute is fast or exact, not {compute}")
        self.kernels = load_kernels(isa)
        self.threads = choose_threads(threads)
        self.compute = compute
        self.isa: str = self.kernels.isa
        self.name = f"cpu-{self.isa}-{compute}"
        self.native = self.kernels.Cpu(self.threads.count, compute == "exact")
        log.info("CPU kernels: %s, %d thread(s): %s", self.isa, self.threads.count, self.threads.reason)

    @cached_property
    def build(self) -> str:
        """A hash of the kernels' code."""
        return hashlib.blake2b(Path(self.kernels.__file__).read_bytes(), digest_size=16).hexdigest()

    def matrix(self, type: str, data: Array, rows: int, cols: int, read: Callable[[int], None] | None = None) -> Any:
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        return self.native.pack(type, raw, rows, cols, read)

    def vector(self, data: Array) -> Array:
        packed = np.array(data, dtype=np.float32, order="C")
        if packed.ndim != 1:
            raise ValueError(f"a vector has one dimension, not {packed.ndim}")
        return packed

    def program(
        self, build: Callable[[Ops], None], layout: KVLayout, heads: int, row_tile: int = ROW_TILE
    ) -> CpuProgram:
        """Records ``build``; ``row_tile`` changes speed and memory, not results."""
        recorder = Recorder(layout, heads)
        build(recorder)
        return CpuProgram(recorder.finish(self, row_tile), layout)

    def store(self, count: int, nbytes: int, tier: int) -> Array:
        # Untouched pages of an empty array cost no memory: the pool fills as blocks are first used.  NumPy's own start
        # 16 bytes into a page, and each vector of keys would then lie across two cache lines.
        memory = np.empty(count * nbytes + PAGE, np.uint8)
        first = -memory.ctypes.data % PAGE
        return memory[first : first + count * nbytes].reshape(count, nbytes)

    def block(self, blocks: Array, slot: int) -> Array:
        row: Array = blocks[slot]
        return row

    def move(self, source: Array, target: Array, pairs: Array) -> None:
        self.native.move(source, target, np.ascontiguousarray(pairs, dtype=np.int64).reshape(-1, 2))

    def sample(self, logits: Array, batch: SampleBatch) -> Sampled:
        top = max(0, min(int(batch.logprobs.max(initial=0)), logits.shape[1]))
        out = _empty(len(batch.row), top)
        self.native.sample(
            _as(logits, np.float32),
            _as(batch.row, np.int32),
            _as(batch.temperature, np.float32),
            _as(batch.top_k, np.int32),
            _as(batch.top_p, np.float32),
            _as(batch.min_p, np.float32),
            _as(batch.repetition, np.float32),
            _as(batch.presence, np.float32),
            _as(batch.frequency, np.float32),
            _as(batch.seed, np.uint64),
            _as(batch.branch, np.int32),
            _as(batch.position, np.int32),
            _as(batch.logprobs, np.int32),
            *_ragged(batch.bias, np.float32),
            *_ragged(batch.history, np.int32),
            *_masks(batch),
            *_arrays(out),
        )
        return out

    def score(self, logits: Array, targets: Array, top: int) -> Sampled:
        out = _empty(len(targets), max(0, min(top, logits.shape[1])))
        self.native.score(_as(logits, np.float32), _as(targets, np.int32), *_arrays(out))
        return out


class CpuProgram:
    """A recorded decoder.

    Owns: the native record, which owns the activations' memory.  Promises: a run writes only the slots of the batch's
    tokens; its result is a view that the next run overwrites.
    """

    def __init__(self, native: Any, layout: KVLayout) -> None:
        self.native = native
        self.layout = layout

    @property
    def workspace_bytes(self) -> int:
        """Memory that activations take at the largest step so far."""
        return int(self.native.workspace_bytes)

    def reserve(self, most: LargestStep) -> None:
        pass

    def prepare(self, blocks: Array, most: LargestStep, progress: Callable[[int, int], None] | None = None) -> None:
        pass

    def run(self, batch: Batch, blocks: Array) -> Array:
        tables = [(_as(ids, np.int32), _as(offsets, np.int32)) for ids, offsets in batch.tables]
        result: Array = self.native.run(
            _as(batch.tokens, np.int32),
            _as(batch.positions, np.int32),
            _as(batch.starts, np.int32),
            tables,
            _as(batch.logits_at, np.int32),
            blocks,
        )
        return result


# ---- recording ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Slot:
    """A value that some operator makes, and where it lives: known once all operators are recorded."""

    width: int
    segment: int
    logits: bool
    last_use: int = -1
    crosses: bool = False  # used in a later segment than its own
    buffer: int = -1

    @property
    def extent(self) -> str:
        return "logits" if self.logits else "tokens" if self.crosses else "tile"


@dataclass
class Call:
    """One recorded operator: its native method, the values it reads and makes, and its other arguments."""

    method: str
    segment: int
    output: Slot | None
    inputs: tuple[Slot | None, ...]
    arguments: tuple[Any, ...] = ()


@dataclass
class Recorder:
    """Takes the decoder's calls down.

    Owns: the record.  Promises: values whose uses don't overlap share memory; operators between two attentions form a
    segment, which the native side runs a tile of tokens at a time.
    """

    layout: KVLayout
    heads: int
    calls: list[Call] = field(default_factory=list)
    segment: int = 0
    logits: bool = False  # past `pick`: rows are those of the wanted logits

    def embed(self, table: Any, scale: float = 1.0) -> Slot:
        return self._record("embed", table.cols, (), table, scale)

    def norm(self, x: Slot, weight: Array, eps: float, residual: Slot | None = None) -> Slot:
        return self._record("norm", x.width, (x, residual), weight, eps)

    def linear(self, x: Slot, weights: Sequence[Any], bias: Array | None = None, residual: Slot | None = None) -> Slot:
        return self._record("linear", sum(w.rows for w in weights), (x, residual), list(weights), bias)

    def rope_write(
        self,
        qkv: Slot,
        layer: int,
        inv_freq: Array,
        scale: float,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> Slot:
        place = self.layout.places[layer]
        width = self.heads * self.layout.head_dim
        return self._record("rope_write", width, (qkv,), *place, inv_freq, scale, q_norm, k_norm, eps)

    def attend(self, q: Slot, layer: int, scale: float, window: int | None, softcap: float = 0.0) -> Slot:
        self.segment += 1  # all keys of the step are written before any query looks at them
        return self._record("attend", q.width, (q,), *self.layout.places[layer], scale, window or 0, softcap)

    def gate(self, gate_up: Slot, activation: str) -> Slot:
        return self._record("gate", gate_up.width // 2, (gate_up,), activation)

    def pick(self, x: Slot) -> Slot:
        self.segment += 1
        self.logits = True
        return self._record("pick", x.width, (x,))

    def output(self, logits: Slot, softcap: float = 0.0) -> None:
        self._use(logits)
        logits.last_use = 1 << 60  # nothing may overwrite the result
        self.calls.append(Call("output", self.segment, None, (logits,), (softcap,)))

    def _record(self, method: str, width: int, inputs: tuple[Slot | None, ...], *arguments: Any) -> Slot:
        for x in inputs:
            if x is not None:
                self._use(x)
        out = Slot(width, self.segment, self.logits)
        self.calls.append(Call(method, self.segment, out, inputs, arguments))
        return out

    def _use(self, x: Slot) -> None:
        x.last_use = max(x.last_use, len(self.calls))
        x.crosses |= x.segment != self.segment

    def finish(self, backend: CpuBackend, row_tile: int) -> Any:
        """The native program."""
        lay = self.layout
        native = backend.kernels.Program(
            backend.native,
            lay.block_size,
            lay.kv_heads,
            lay.head_dim,
            lay.layers_per_block,
            lay.dtype,
            len(lay.groups),
            self.heads,
            row_tile,
        )
        place_values(self.calls, native.buffer)
        segment = -1
        for call in self.calls:
            if call.segment != segment:
                segment = call.segment
                native.segment(call.output is None or call.output.logits)
            _emit(native, call)
        return native


def _emit(native: Any, call: Call) -> None:
    numbers = [-1 if x is None else x.buffer for x in call.inputs]
    if call.output is None:
        native.output(*numbers, *call.arguments)
    elif call.method in ("norm", "linear"):  # the residual comes last
        getattr(native, call.method)(call.output.buffer, numbers[0], *call.arguments, numbers[1])
    else:
        getattr(native, call.method)(call.output.buffer, *numbers, *call.arguments)


def place_values(calls: list[Call], make: Callable[[int, str], int]) -> None:
    """Gives each value a buffer, taking up those whose value is used no more.

    A buffer is taken up for a value of the same width and extent only: rows then lie where the old value's rows lay,
    so a tile that has moved on cannot overwrite what a later tile still reads.  An operator's inputs are alive while
    it makes its output.
    """
    free: dict[tuple[int, str], list[int]] = {}
    for at, call in enumerate(calls):
        if call.output is not None:
            shelf = free.setdefault((call.output.width, call.output.extent), [])
            call.output.buffer = shelf.pop() if shelf else make(call.output.width, call.output.extent)
        done = {id(x): x for x in (*call.inputs, call.output) if x is not None and x.last_use <= at}
        for x in done.values():
            free.setdefault((x.width, x.extent), []).append(x.buffer)


# ---- arrays ---------------------------------------------------------------------------------------------------------


def _as(array: Array, dtype: Any) -> Array:
    return np.ascontiguousarray(array, dtype=dtype)


def _ragged(arrays: tuple[Array, Array, Array], dtype: Any) -> tuple[Array, Array, Array]:
    offsets, ids, values = arrays
    return _as(offsets, np.int32), _as(ids, np.int32), _as(values, dtype)


def _masks(batch: SampleBatch) -> tuple[Array, Array]:
    if batch.mask is None or batch.masks is None:
        return np.full(len(batch.row), -1, np.int32), np.empty((0, 0), np.uint32)
    return _as(batch.mask, np.int32), _as(batch.masks, np.uint32)


def _empty(n: int, top: int) -> Sampled:
    return Sampled(
        token=np.empty(n, dtype=np.int32),
        logprob=np.empty(n, dtype=np.float32),
        rank=np.empty(n, dtype=np.int32),
        top_ids=np.empty((n, top), dtype=np.int32),
        top_logprobs=np.empty((n, top), dtype=np.float32),
    )


def _arrays(out: Sampled) -> tuple[Array, Array, Array, Array, Array]:
    return out.token, out.logprob, out.rank, out.top_ids, out.top_logprobs
