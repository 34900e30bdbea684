"""Tensor parallelism: a backend around another one, of which each of several processes (*ranks*) has a part.

Every matrix is cut by its rows, which are outputs: of q, k and v these are whole heads, and a rank's heads are what
its blocks hold.  No sum over K is ever cut, so that nothing is added up across ranks: what is exchanged are finished
columns, put side by side.  One, two and four ranks therefore compute the same bytes, as far as the inner backend's
columns do not depend on how many there are beside them.

A layer exchanges four times: attention's output, its projection, the gated product, and the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.errors import ConfigError
from octavo.kernels.backend import Backend, Batch, Blocks, Later, Logits, Ops, SampleBatch, Sampled

Array = np.ndarray


class Ranks(Protocol):
    """The processes that compute together, as one of them sees them.  Raises EngineError when another is gone."""

    rank: int
    size: int

    def gather(self, part: Any, widths: Sequence[int]) -> Any:
        """[M, sum of widths] from each rank's [M, widths[rank]], in the order of ranks; arrays of the inner backend."""

    def select(self, part: Any, owner: Array) -> Any:
        """[M, D]: row m is row m of what rank owner[m] has."""

    def collect(self, part: Any, widths: Sequence[int]) -> Any:
        """As :meth:`gather`, for rank 0 alone; the others give their part, and keep it."""

    def close(self) -> None: ...


class SplitOps(Ops, Protocol):
    """Operators of a backend that can be one rank: a step runs in Python, so that it can stop for an exchange."""

    def exchange(self, x: Any, width: int | None, work: Callable[[Any], Any]) -> Any:
        """A value [rows of x, width (x's own: None)] that ``work`` makes of x's array, each time the step runs."""


def cut(rows: int, size: int) -> tuple[int, ...]:
    """Bounds of each rank's share of so many rows."""
    return tuple(rows * r // size for r in range(size + 1))


@dataclass(frozen=True, eq=False)
class Part:
    """One rank's rows of a matrix."""

    packed: Any
    bounds: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.bounds, self.bounds[1:], strict=False))


@dataclass(frozen=True, eq=False)
class Whole:
    """A vector that every rank has; ``part`` is what goes with some of its items."""

    data: Array
    packed: Any
    pack: Callable[[Array], Any]

    def part(self, weights: Sequence[Part], rank: int) -> Any:
        at, pieces = 0, []
        for weight in weights:
            pieces.append(self.data[at + weight.bounds[rank] : at + weight.bounds[rank + 1]])
            at += weight.bounds[-1]
        return self.pack(np.concatenate(pieces))


@dataclass(eq=False)
class Spread:
    """A value of which each rank has some columns; ``whole`` once they have been exchanged.

    Of a product of several matrices ``widths`` are the first one's: those of q, of what attention makes of it, and of
    gate and what becomes of that.  Such a product itself is never exchanged.
    """

    value: Any
    widths: tuple[int, ...]
    whole: Any = None


class ParallelBackend:
    """One rank of several.

    Owns: which part is this rank's.  Promises: what :class:`octavo.kernels.backend.Backend` says, to the ranks
    together; only rank 0 has logits, and may sample.  Ranks meet in every step, so none is given one ahead.
    """

    asynchronous = recalls = False

    def __init__(self, inner: Backend, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks
        self.name = inner.name
        self.device, self.gpu = getattr(inner, "device", None), getattr(inner, "gpu", None)

    @property
    def build(self) -> str:
        return self.inner.build

    def matrix(self, type: str, data: Array, rows: int, cols: int, read: Callable[[int], None] | None = None) -> Part:
        bounds = cut(rows, self.ranks.size)
        first, last = bounds[self.ranks.rank], bounds[self.ranks.rank + 1]
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        row_bytes = raw.nbytes // rows
        own = raw[first * row_bytes : last * row_bytes]
        if read is None:
            told = None
        else:
            tell, before = read, first * row_bytes

            def told(done: int) -> None:
                tell(before + done)

        return Part(self.inner.matrix(type, own, last - first, cols, told), bounds)

    def vector(self, data: Array) -> Whole:
        return Whole(np.array(data, np.float32), self.inner.vector(data), self.inner.vector)

    def layout(self, layout: KVLayout, heads: int) -> KVLayout:
        """Of this rank's blocks.  Raises ConfigError if heads can't be shared evenly."""
        return self.share(layout, heads, self.ranks.size)

    @staticmethod
    def share(layout: KVLayout, heads: int, size: int) -> KVLayout:
        """Of each of so many ranks' blocks.  Raises ConfigError if heads can't be shared evenly."""
        if heads % size or layout.kv_heads % size:
            raise ConfigError(
                f"tensor_parallel {size} does not divide the model's {heads} query heads and {layout.kv_heads} "
                "key-value heads",
                "tensor_parallel",
            )
        return replace(layout, kv_heads=layout.kv_heads // size)

    def close(self) -> None:
        self.ranks.close()

    def program(self, build: Callable[[Ops], None], layout: KVLayout, heads: int) -> ParallelProgram:
        return ParallelProgram(self, build, self.layout(layout, heads), heads // self.ranks.size)

    def store(self, count: int, nbytes: int, tier: int) -> Blocks:
        return self.inner.store(count, nbytes, tier)

    def block(self, blocks: Blocks, slot: int) -> Array:
        return self.inner.block(blocks, slot)

    def move(self, source: Blocks, target: Blocks, pairs: Array) -> None:
        self.inner.move(source, target, pairs)

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled:
        return self.inner.sample(logits, batch)

    def draw(self, logits: Logits, batch: SampleBatch) -> Later:
        return self.inner.draw(logits, batch)

    def lost(self) -> str | None:
        return self.inner.lost()

    def score(self, logits: Logits, targets: Array, top: int) -> Sampled:
        return self.inner.score(logits, targets, top)


class ParallelProgram:
    """A decoder over this rank's weights and blocks.

    Owns: whose embeddings the step's tokens are.  Promises: all ranks run the same steps, in the same order; the result
    is the logits on rank 0, and this rank's columns of them elsewhere.
    """

    def __init__(self, backend: ParallelBackend, build: Callable[[Ops], None], layout: KVLayout, heads: int) -> None:
        self.ranks = backend.ranks
        self.heads, self.head_dim = heads, layout.head_dim
        search: Any = _Search()
        build(search)
        self.vocab = search.table.bounds
        self.owner: Array = np.empty(0, np.int32)
        self._inner = backend.inner.program(lambda ops: build(ParallelOps(self, ops)), layout, heads)

    def reserve(self, most: LargestStep) -> None:
        self._inner.reserve(most)

    def prepare(self, blocks: Blocks, most: LargestStep, progress: Callable[[int, int], None] | None = None) -> None:
        self._inner.prepare(blocks, most, progress)

    def run(self, batch: Batch, blocks: Blocks) -> Logits:
        first, last = self.vocab[self.ranks.rank], self.vocab[self.ranks.rank + 1]
        self.owner = np.searchsorted(self.vocab[1:], batch.tokens, side="right").astype(np.int64)
        # Of other ranks' tokens any row is looked up, and not used.
        own = np.clip(batch.tokens - first, 0, last - first - 1).astype(np.int32)
        return self._inner.run(replace(batch, tokens=own), blocks)


class _Search:
    """Operators that compute nothing: finds the matrix that tokens are looked up in."""

    table: Part

    def embed(self, table: Part, scale: float = 1.0) -> None:
        self.table = table

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments, **more: None


class ParallelOps:
    """The decoder's operators over one rank's part.

    Owns: nothing.  Promises: norms see whole rows; everything else sees this rank's columns.
    """

    def __init__(self, program: ParallelProgram, inner: Any) -> None:
        self.program, self.ranks = program, program.ranks
        self.inner: SplitOps = inner

    def embed(self, table: Part, scale: float = 1.0) -> Any:
        rows = self.inner.embed(table.packed, scale)
        return self.inner.exchange(rows, None, lambda x: self.ranks.select(x, self.program.owner))

    def norm(self, x: Any, weight: Whole, eps: float, residual: Any | None = None) -> Any:
        return self.inner.norm(self._whole(x), weight.packed, eps, self._whole(residual))

    def linear(self, x: Any, weights: Sequence[Part], bias: Whole | None = None, residual: Any | None = None) -> Spread:
        own_bias = None if bias is None else bias.part(weights, self.ranks.rank)
        own = [w.packed for w in weights]
        y = self.inner.linear(self._whole(x), own, own_bias, self._own(residual, weights[0]))
        return Spread(y, weights[0].widths)

    def rope_write(
        self,
        qkv: Spread,
        layer: int,
        inv_freq: Whole,
        scale: float,
        q_norm: Whole | None = None,
        k_norm: Whole | None = None,
        eps: float = 0.0,
    ) -> Spread:
        q_own, k_own = (None if w is None else w.packed for w in (q_norm, k_norm))
        q = self.inner.rope_write(qkv.value, layer, inv_freq.packed, scale, q_own, k_own, eps)
        return Spread(q, qkv.widths)

    def attend(self, q: Spread, layer: int, scale: float, window: int | None, softcap: float = 0.0) -> Spread:
        return Spread(self.inner.attend(q.value, layer, scale, window, softcap), q.widths)

    def gate(self, gate_up: Spread, activation: str) -> Spread:
        return Spread(self.inner.gate(gate_up.value, activation), gate_up.widths)

    def pick(self, x: Any) -> Any:
        return Spread(self.inner.pick(x.value), x.widths) if isinstance(x, Spread) else self.inner.pick(x)

    def output(self, logits: Spread, softcap: float = 0.0) -> None:
        rank, widths = self.ranks.rank, logits.widths
        width = sum(widths) if rank == 0 else widths[rank]
        self.inner.output(self.inner.exchange(logits.value, width, lambda x: self.ranks.collect(x, widths)), softcap)

    def _whole(self, x: Any) -> Any:
        if not isinstance(x, Spread):
            return x
        if x.whole is None:
            x.whole = self.inner.exchange(x.value, sum(x.widths), lambda part: self.ranks.gather(part, x.widths))
        return x.whole

    def _own(self, x: Any, weight: Part) -> Any:
        """This rank's columns of what is added to a product."""
        if x is None or isinstance(x, Spread):
            return None if x is None else x.value
        first, last = weight.bounds[self.ranks.rank], weight.bounds[self.ranks.rank + 1]
        return self.inner.exchange(x, last - first, lambda whole: whole[:, first:last])
