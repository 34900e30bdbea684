"""The definition of right: every operator in NumPy, one row at a time, as plain as a textbook.

The other backends are tested against this one.  It is also a backend of its own, for machines and questions where
speed doesn't matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.core.layout import KEY_GROUP, KVLayout
from octavo.core.plan import LargestStep
from octavo.kernels import reference_sample
from octavo.kernels.backend import Batch, Ops, SampleBatch, Sampled, Synchronous
from octavo.kernels.dequant import bfloat16_to_float32, dequantize, float32_to_bfloat16

Array = np.ndarray

STORAGE: dict[str, np.dtype] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int8": np.dtype("i1"),
}


class ReferenceBackend(Synchronous):
    """NumPy kernels.

    Owns: nothing.

    Promises: all arithmetic is in ``dtype`` (float32 or float64); K and V are rounded to the cache's type; rows are
    computed one by one, so that a row's bits depend on that row alone.
    """

    name = "reference"

    def __init__(self, dtype: str = "float32") -> None:
        if dtype not in ("float32", "float64"):
            raise ValueError(f"dtype is float32 or float64, not {dtype}")
        self.dtype = np.dtype(dtype)
        self.build = f"numpy-{np.__version__}-{dtype}"

    def matrix(self, type: str, data: Array, rows: int, cols: int, read: Callable[[int], None] | None = None) -> Array:
        return dequantize(type, data, rows, cols).astype(self.dtype)

    def vector(self, data: Array) -> Array:
        return np.array(data, dtype=np.float32).astype(self.dtype)

    def program(self, build: Callable[[Ops], None], layout: KVLayout, heads: int) -> ReferenceProgram:
        return ReferenceProgram(build, layout, heads, self.dtype)

    def store(self, count: int, nbytes: int, tier: int) -> Array:
        return np.empty((count, nbytes), np.uint8)

    def block(self, blocks: Array, slot: int) -> Array:
        row: Array = blocks[slot]
        return row

    def move(self, source: Array, target: Array, pairs: Array) -> None:
        for a, b in pairs.tolist():
            target[b] = source[a]

    def sample(self, logits: Array, batch: SampleBatch) -> Sampled:
        return reference_sample.sample(logits, batch)

    def score(self, logits: Array, targets: Array, top: int) -> Sampled:
        return reference_sample.score(logits, targets, top)


@dataclass
class ReferenceProgram:
    """A decoder, run anew on every step.

    Owns: the recipe.  Promises: reads no slot beyond a token's own position, and writes the batch's slots only.
    """

    build: Callable[[Ops], None]
    layout: KVLayout
    heads: int
    dtype: np.dtype

    def reserve(self, most: LargestStep) -> None:
        pass

    def prepare(self, blocks: Array, most: LargestStep, progress: Callable[[int, int], None] | None = None) -> None:
        pass

    def run(self, batch: Batch, blocks: Array) -> Array:
        ops = ReferenceOps(self.layout, self.heads, self.dtype, batch, blocks)
        # Overflow and NaN are answers here, not accidents: the sampler turns such rows into errors.
        with np.errstate(over="ignore", invalid="ignore"):
            self.build(ops)
        return ops.result


class ReferenceOps:
    """The operators over one step's batch.

    Owns: the step's result.  Promises: what :class:`octavo.kernels.backend.Ops` says.
    """

    def __init__(self, layout: KVLayout, heads: int, dtype: np.dtype, batch: Batch, blocks: Array) -> None:
        self.layout, self.heads, self.dtype, self.batch = layout, heads, dtype, batch
        # Views, so that writes reach the blocks: [pool, layer in block, K or V, items] and, of int8,
        # [pool, layer in block, kv_heads, scale, slot]
        layers = blocks.reshape(len(blocks), layout.layers_per_block, layout.layer_bytes)
        planes, scales = np.split(layers, [2 * layout.plane_bytes], axis=2)
        self.planes = planes.view(STORAGE[layout.dtype]).reshape(*layers.shape[:2], 2, layout.plane_items)
        self.scales = scales.view("<u2").reshape(*layers.shape[:2], layout.kv_heads, -1, layout.block_size)
        self.result = np.zeros((0, 0), dtype=np.float32)

    def embed(self, table: Array, scale: float = 1.0) -> Array:
        rows: Array = table[self.batch.tokens] * self.dtype.type(scale)
        return rows

    def norm(self, x: Array, weight: Array, eps: float, residual: Array | None = None) -> Array:
        y = rms_norm(x, weight, eps)
        return y if residual is None else y + residual

    def linear(
        self, x: Array, weights: Sequence[Array], bias: Array | None = None, residual: Array | None = None
    ) -> Array:
        # A product of matrix and vector for each row: a product of two matrices would add in another order for
        # another number of rows.
        y = np.empty((len(x), sum(len(w) for w in weights)), dtype=self.dtype)
        for row, out in zip(x, y, strict=True):
            np.concatenate([w @ row for w in weights], out=out)
        if bias is not None:
            y = y + bias
        return y if residual is None else y + residual

    def rope_write(
        self,
        qkv: Array,
        layer: int,
        inv_freq: Array,
        scale: float,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> Array:
        lay = self.layout
        parts = qkv.reshape(len(qkv), -1, lay.head_dim)
        q, k, v = np.split(parts, [self.heads, self.heads + lay.kv_heads], axis=1)
        if q_norm is not None:
            q = rms_norm(q, q_norm, eps)
        if k_norm is not None:
            k = rms_norm(k, k_norm, eps)
        cos, sin = self._angles(inv_freq, scale)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = self._planes_of(layer)
        at, slot = self._places_of_tokens(layer)
        if lay.dtype == "int8":
            scales = self.scales[:, lay.places[layer][1]]
            k, scales[at, :, :-1, slot] = quantise(k, KEY_GROUP)
            v, scales[at, :, -1:, slot] = quantise(v, lay.head_dim)
        else:
            k, v = self._store(k), self._store(v)
        keys[at, :, :, slot, :] = k.reshape(len(qkv), lay.kv_heads, -1, keys.shape[-1])
        values[at, :, slot, :] = v
        return q.reshape(len(qkv), -1)

    def attend(self, q: Array, layer: int, scale: float, window: int | None, softcap: float = 0.0) -> Array:
        lay, batch = self.layout, self.batch
        out = np.empty_like(q)
        q = q.reshape(len(q), lay.kv_heads, self.heads // lay.kv_heads, lay.head_dim)
        for s in range(len(batch.starts) - 1):
            rows = range(batch.starts[s], batch.starts[s + 1])
            if not rows:
                continue
            first = max(0, int(batch.positions[rows[0]]) - window + 1) if window else 0
            keys, values = self._gather(layer, s, first, int(batch.positions[rows[-1]]) + 1)
            for m in rows:
                stop = int(batch.positions[m]) + 1
                start = max(0, stop - window) if window else 0
                seen = slice(start - first, stop - first)
                for h in range(lay.kv_heads):
                    score = (q[m, h] @ keys[h, seen].T) * self.dtype.type(scale)
                    if softcap:
                        score = softcap * np.tanh(score / softcap)
                    weight = softmax(score)
                    mixed = weight @ values[h, seen]
                    width = mixed.size
                    out[m, h * width : (h + 1) * width] = mixed.reshape(-1)
        return out

    def gate(self, gate_up: Array, activation: str) -> Array:
        gate, up = np.split(gate_up, 2, axis=1)
        y: Array = ACTIVATIONS[activation](gate) * up
        return y

    def pick(self, x: Array) -> Array:
        rows: Array = x[self.batch.logits_at]
        return rows

    def output(self, logits: Array, softcap: float = 0.0) -> None:
        if softcap:
            logits = softcap * np.tanh(logits / softcap)
        self.result = logits.astype(np.float32)

    def exchange(self, x: Array, width: int | None, work: Callable[[Array], Array]) -> Array:
        """For tensor parallelism: what ``work`` makes of x, see :mod:`octavo.kernels.parallel`."""
        return work(x)

    def _angles(self, inv_freq: Array, scale: float) -> tuple[Array, Array]:
        """Cosine and sine [M, 1, rotary_dim/2] of each token's angles, which are products rounded to float32."""
        angle = self.batch.positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)
        angle = angle.astype(self.dtype)[:, None, :]
        factor = self.dtype.type(scale)
        return np.cos(angle) * factor, np.sin(angle) * factor

    def _planes_of(self, layer: int) -> tuple[Array, Array]:
        """Views of a layer's K and V.

        K [pool, kv_heads, head_dim/n, block_size, n], where n dimensions lie together: 2 in int8, else 1;
        V [pool, kv_heads, block_size, head_dim].
        """
        lay, (_, i) = self.layout, self.layout.places[layer]
        together = 2 if lay.dtype == "int8" else 1
        keys = self.planes[:, i, 0].reshape(-1, lay.kv_heads, lay.head_dim // together, lay.block_size, together)
        values = self.planes[:, i, 1].reshape(-1, lay.kv_heads, lay.block_size, lay.head_dim)
        return keys, values

    def _table(self, layer: int, row: int) -> Array:
        ids, offsets = self.batch.tables[self.layout.places[layer][0]]
        return ids[offsets[row] : offsets[row + 1]]

    def _places_of_tokens(self, layer: int) -> tuple[Array, Array]:
        """Physical block and slot in it, int [M] each, of every token of the batch."""
        starts = self.batch.starts
        row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        ids, offsets = self.batch.tables[self.layout.places[layer][0]]
        logical, slot = np.divmod(self.batch.positions, self.layout.block_size)
        return ids[offsets[row] + logical], slot

    def _gather(self, layer: int, row: int, start: int, stop: int) -> tuple[Array, Array]:
        """K and V [kv_heads, stop - start, head_dim] of a row's positions start..stop-1, copied out of the blocks."""
        size = self.layout.block_size
        keys, values = self._planes_of(layer)
        first = start // size
        ids = self._table(layer, row)[first : (stop - 1) // size + 1]
        inside = slice(start - first * size, stop - first * size)
        shape = self.layout.kv_heads, -1, self.layout.head_dim
        k = self._load(keys[ids].transpose(1, 0, 3, 2, 4).reshape(shape)[:, inside])
        v = self._load(values[ids].transpose(1, 0, 2, 3).reshape(shape)[:, inside])
        if self.layout.dtype == "int8":
            scales = self.scales[:, self.layout.places[layer][1]][ids].transpose(1, 0, 3, 2)
            scales = bfloat16_to_float32(scales.reshape(self.layout.kv_heads, len(ids) * size, -1)[:, inside])
            k *= np.repeat(scales[..., :-1], KEY_GROUP, axis=-1)[..., : self.layout.head_dim]
            v *= scales[..., -1:]
        return k, v

    def _store(self, x: Array) -> Array:
        """Rounded to the cache's type, ties to even."""
        x = x.astype(np.float32)
        return float32_to_bfloat16(x) if self.layout.dtype == "bfloat16" else x.astype(STORAGE[self.layout.dtype])

    def _load(self, stored: Array) -> Array:
        values = bfloat16_to_float32(stored) if self.layout.dtype == "bfloat16" else stored
        return values.astype(self.dtype)


def quantise(x: Array, group: int) -> tuple[Array, Array]:
    """int8 [..., n] and its scales, bfloat16 [..., groups of the last axis]: largest / 127, rounded, then divided by.

    Ties go to even.  A value that is not finite makes its group's scale NaN.
    """
    quants: Array = np.zeros(x.shape, np.int8)
    scales: Array = np.empty((*x.shape[:-1], -(-x.shape[-1] // group)), np.uint16)
    for g in range(scales.shape[-1]):
        inside = slice(g * group, (g + 1) * group)
        part = x[..., inside].astype(np.float32)
        largest = np.max(np.abs(part), axis=-1)
        largest = np.where(np.isfinite(part).all(axis=-1), largest / np.float32(127), np.float32("nan"))
        scales[..., g] = float32_to_bfloat16(largest)
        step = bfloat16_to_float32(scales[..., g])[..., None]
        steps = np.rint(np.divide(part, step, out=np.zeros_like(part), where=step > 0))
        quants[..., inside] = np.clip(steps, -127, 127)
    return quants, scales


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019)."""
    mean = np.mean(x * x, axis=-1, keepdims=True)
    y: Array = x / np.sqrt(mean + x.dtype.type(eps)) * weight
    return y


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of [M, heads, head_dim]; pairs are (i, i + rotary_dim/2), what is beyond stays."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    y: Array = e / np.sum(e, axis=-1, keepdims=True)
    return y


def silu(x: Array) -> Array:
    y: Array = x / (1 + np.exp(-x))
    return y


def gelu_tanh(x: Array) -> Array:
    """The tanh form of GELU (Hendrycks and Gimpel 2016)."""
    inner = x.dtype.type(np.sqrt(2 / np.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
    y: Array = x.dtype.type(0.5) * x * (1 + np.tanh(inner))
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "gelu_tanh": gelu_tanh}
