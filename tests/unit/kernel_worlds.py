"""Small worlds for kernel tests: a pool of blocks full of garbage, sequences in it, and tiny decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.core.layout import KVLayout, LayerGroup
from octavo.kernels.backend import Batch, SampleBatch

VOCAB = 97


@dataclass(frozen=True)
class Shape:
    """A decoder of two layers; `windows` has one entry a layer, and each window is a layer group of its own."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    hidden: int = 48
    ffn: int = 80
    block_size: int = 16
    dtype: str = "float32"
    windows: tuple[int | None, ...] = (None, None)
    softcap: float = 0.0
    activation: str = "silu"
    qk_norm: bool = False
    bias: bool = False
    rotary: float = 1.0  # part of head_dim that is rotated

    def layout(self) -> KVLayout:
        groups: dict[int | None, list[int]] = {}
        for layer, window in enumerate(self.windows):
            groups.setdefault(window, []).append(layer)
        return KVLayout(
            self.block_size,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            tuple(LayerGroup(window, tuple(layers)) for window, layers in groups.items()),
        )


def decoder(backend: Any, shape: Shape, seed: int = 3, weight_type: str = "F32") -> Callable[[Any], None]:
    """A recipe for `backend.program`; the same seed gives the same weights on every backend.

    The spread of the weights is large, so that each logit depends on the whole context.
    """
    rng = np.random.default_rng(seed)
    lay, D = shape.layout(), shape.hidden
    wide = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def matrix(rows: int, cols: int) -> Any:
        data = (rng.standard_normal((rows, cols)) * 1.5 / np.sqrt(cols)).astype(np.float32)
        if weight_type == "F16":
            data = data.astype(np.float16)
        elif weight_type == "Q8_0":
            data = _q8_0(data)
        return backend.matrix(weight_type, data.reshape(-1).view(np.uint8), rows, cols)

    def vector(n: int, around: float) -> Any:
        return backend.vector((around + 0.2 * rng.standard_normal(n)).astype(np.float32))

    table = matrix(VOCAB, D)
    layers = [
        {
            "attn_norm": vector(D, 1),
            "q": matrix(shape.heads * shape.head_dim, D),
            "k": matrix(shape.kv_heads * shape.head_dim, D),
            "v": matrix(shape.kv_heads * shape.head_dim, D),
            "bias": vector(wide, 0) if shape.bias else None,
            "q_norm": vector(shape.head_dim, 1) if shape.qk_norm else None,
            "k_norm": vector(shape.head_dim, 1) if shape.qk_norm else None,
            "o": matrix(D, shape.heads * shape.head_dim),
            "post": vector(D, 1),
            "mlp_norm": vector(D, 1),
            "gate": matrix(shape.ffn, D),
            "up": matrix(shape.ffn, D),
            "down": matrix(D, shape.ffn),
        }
        for _ in shape.windows
    ]
    half = int(shape.head_dim * shape.rotary) // 2
    inv_freq = backend.vector((100.0 ** -(np.arange(half) / half)).astype(np.float32))
    final, head = vector(D, 1), matrix(VOCAB, D)
    assert lay.places

    def build(ops: Any) -> None:
        x = ops.embed(table, 1.5)
        for i, (w, window) in enumerate(zip(layers, shape.windows, strict=True)):
            h = ops.norm(x, w["attn_norm"], 1e-5)
            qkv = ops.linear(h, [w["q"], w["k"], w["v"]], w["bias"])
            q = ops.rope_write(qkv, i, inv_freq, 1.1, w["q_norm"], w["k_norm"], 1e-6)
            a = ops.attend(q, i, shape.head_dim**-0.5, window, shape.softcap)
            if i % 2:  # as Gemma does, with a norm on the way back
                x = ops.norm(ops.linear(a, [w["o"]]), w["post"], 1e-5, residual=x)
            else:
                x = ops.linear(a, [w["o"]], residual=x)
            h = ops.norm(x, w["mlp_norm"], 1e-5)
            x = ops.linear(ops.gate(ops.linear(h, [w["gate"], w["up"]]), shape.activation), [w["down"]], residual=x)
        x = ops.norm(ops.pick(x), final, 1e-5)
        ops.output(ops.linear(x, [head]), 20.0)

    return build


def _q8_0(data: np.ndarray) -> np.ndarray:
    blocks = data.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1) / 127).astype(np.float16)
    quants = np.rint(blocks / scale.astype(np.float32)[:, None]).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8).reshape(-1, 2), quants.view(np.uint8)], axis=1)


@dataclass
class World:
    """Sequences in one pool.  Blocks start as NaN in every type, come in shuffled order, and slid ones become -1."""

    layout: KVLayout
    sequences: list[np.ndarray]  # token ids of each, all of them
    seed: int = 0
    done: list[int] = field(default_factory=list)  # tokens computed, of each sequence

    def __post_init__(self) -> None:
        lay = self.layout
        need = sum(-(-len(s) // lay.block_size) for s in self.sequences) * len(lay.groups)
        pool = need + 3
        self.blocks = np.full((pool, lay.block_bytes), 0xFF, dtype=np.uint8)
        ids = np.random.default_rng(self.seed).permutation(pool).astype(np.int32)
        self.tables: list[list[np.ndarray]] = []
        for s in self.sequences:
            n = -(-len(s) // lay.block_size)
            self.tables.append([])
            for _ in lay.groups:
                self.tables[-1].append(ids[:n].copy())
                ids = ids[n:]
        self.done = [0] * len(self.sequences)

    def batch(self, rows: Sequence[tuple[int, int]]) -> Batch:
        """The next n tokens of sequence s for each (s, n); logits of all of them.  Advances the sequences."""
        tokens, positions, starts = [], [], [0]
        ids: list[list[np.ndarray]] = [[] for _ in self.layout.groups]
        for s, n in rows:
            first = self.done[s]
            tokens.append(self.sequences[s][first : first + n])
            positions.append(np.arange(first, first + n))
            starts.append(starts[-1] + n)
            self.done[s] += n
            for g, group in enumerate(self.layout.groups):
                seen = max(0, first + 1 - group.window) if group.window else 0
                table = self.tables[s][g][: -(-(first + n) // self.layout.block_size)].copy()
                table[: seen // self.layout.block_size] = -1
                ids[g].append(table)
        return Batch(
            np.concatenate(tokens).astype(np.int32),
            np.concatenate(positions).astype(np.int32),
            np.array(starts, dtype=np.int32),
            [(np.concatenate(t).astype(np.int32), np.cumsum([0] + [len(x) for x in t]).astype(np.int32)) for t in ids],
            np.arange(starts[-1], dtype=np.int32),
        )

    def run(self, program: Any, plan: Sequence[Sequence[tuple[int, int]]]) -> list[np.ndarray]:
        """Logits of every token, one array a sequence, after running the plan's batches."""
        out: list[list[np.ndarray]] = [[] for _ in self.sequences]
        for rows in plan:
            logits = np.array(program.run(self.batch(rows), self.blocks))
            at = 0
            for s, n in rows:
                out[s].append(logits[at : at + n])
                at += n
        return [np.concatenate(x) if x else np.zeros((0, VOCAB), np.float32) for x in out]


def sequences(lengths: Sequence[int], seed: int = 1) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]


def ragged_plan(lengths: Sequence[int], seed: int, chunk: int = 40) -> list[list[tuple[int, int]]]:
    """Batches that mix chunks and single tokens of random sequences until all are done."""
    rng = np.random.default_rng(seed)
    left, plan = list(lengths), []
    while any(left):
        rows = []
        for s in rng.permutation(len(left)).tolist():
            if left[s] and rng.random() < 0.7:
                n = 1 if rng.random() < 0.3 else int(rng.integers(1, chunk + 1))
                rows.append((s, min(n, left[s])))
                left[s] -= rows[-1][1]
        if rows:
            plan.append(rows)
    return plan


def samples(n: int, rows: int, **values: Any) -> SampleBatch:
    """A sample batch of n samples over the rows in turn; keywords replace defaults, scalars are spread."""
    defaults: dict[str, tuple[Any, Any]] = {
        "row": (np.arange(n) % max(rows, 1), np.int32),
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "repetition": (1.0, np.float32),
        "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32),
        "seed": ([i * 0x9E3779B97F4A7C15 % 2**64 for i in range(n)], np.uint64),
        "branch": (0, np.int32),
        "position": (np.arange(n), np.int32),
        "logprobs": (-1, np.int32),
    }
    empty = np.zeros(n + 1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    fields = {
        name: np.broadcast_to(np.asarray(values.get(name, default), dtype=dtype), (n,)).copy()
        for name, (default, dtype) in defaults.items()
    }
    return SampleBatch(
        **fields,
        bias=values.get("bias", (*empty, np.zeros(0, dtype=np.float32))),
        history=values.get("history", (*empty, np.zeros(0, dtype=np.int32))),
        mask=values.get("mask"),
        masks=values.get("masks"),
    )


def ragged(entries: Sequence[dict[int, float]], dtype: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets, ids, values) of one dict for each sample."""
    offsets = np.cumsum([0] + [len(e) for e in entries]).astype(np.int32)
    ids = np.array([i for e in entries for i in e], dtype=np.int32)
    return offsets, ids, np.array([v for e in entries for v in e.values()], dtype=dtype)
