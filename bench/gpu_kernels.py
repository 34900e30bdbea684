"""Kernels alone, against what the GPU can do: a device copy, and a large matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_shapes import SHAPES, Sizes

from octavo.core.layout import KVLayout, LayerGroup
from octavo.kernels.backend import Batch
from octavo.kernels.triton import gemm
from octavo.kernels.triton.backend import TritonBackend
from octavo.kernels.triton.weights import Matrix
from octavo.models.spec import ModelSpec

Report = dict[str, Any]

LAYERS = 2  # that attention alone runs over: what one reads is not in the cache when the other has run


def seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """The median time of one call, after two that warm up; on a GPU by its own clock."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            work()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def limits(device: torch.device, sizes: Sizes) -> Report:
    """Bytes a second that a copy reads and writes, operations a second of a large bfloat16 product."""
    source = torch.empty(sizes.copied, dtype=torch.uint8, device=device)
    source.fill_(1)
    target = torch.empty_like(source)
    copy = 2 * sizes.copied / seconds(device, partial(target.copy_, source), sizes.repeats)
    del source, target
    n = sizes.product
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    return {"copy": copy, "matmul": 2 * n**3 / seconds(device, partial(torch.matmul, a, b), sizes.repeats)}


def decode_attention(device: torch.device, sizes: Sizes, name: str) -> list[Report]:
    """Bytes of K and V over the time, for one token of each of several sequences, over contexts."""
    spec, found = SHAPES[name], []
    for rows in sizes.rows:
        for context in sizes.contexts:
            layout = _layout(spec)
            world = _Attention(device, spec, layout, rows, context)
            took = seconds(device, world.decode, sizes.repeats) / LAYERS
            read = 4 * rows * context * spec.kv_heads * spec.head_dim
            found.append({"model": name, "rows": rows, "context": context, "seconds": took, "rate": read / took})
            del world
    return found


def prefill_attention(device: torch.device, sizes: Sizes, name: str) -> Report:
    """Operations a second of one prompt's attention: four for each dimension and (query, key) pair."""
    spec, tokens = SHAPES[name], sizes.context
    world = _Attention(device, spec, _layout(spec), 1, tokens)
    took = seconds(device, world.prefill, max(2, sizes.repeats // 4)) / LAYERS
    work = 4 * spec.heads * spec.head_dim * tokens * (tokens + 1) // 2
    return {"model": name, "tokens": tokens, "seconds": took, "rate": work / took}


def products(device: torch.device, sizes: Sizes, name: str) -> list[Report]:
    """The product of gate and up, row counts over which it is run: our kernel's time and torch's."""
    spec, found = SHAPES[name], []
    rows, cols = 2 * spec.intermediate, spec.hidden
    weight = torch.randn(rows, cols, dtype=torch.bfloat16, device=device)
    for m in sorted({*sizes.batches, sizes.product // 4}):
        x = torch.randn(m, cols, dtype=torch.bfloat16, device=device)
        out = torch.empty(m, rows, dtype=torch.float32, device=device)
        part = Matrix(rows, cols, weight)
        ours = seconds(device, partial(gemm.linear, x, [part], None, None, out), sizes.repeats)
        theirs = seconds(device, partial(torch.matmul, x, weight.T), sizes.repeats)
        found.append({"model": name, "rows": m, "seconds": ours, "torch": theirs, "rate": 2 * m * rows * cols / ours})
    return found


def _layout(spec: ModelSpec) -> KVLayout:
    return KVLayout(16, spec.kv_heads, spec.head_dim, "float16", (LayerGroup(None, tuple(range(LAYERS))),))


class _Attention:
    """Owns: sequences of one length in shuffled blocks, and a program that only attends.

    Promises: ``decode`` runs one token of each at its end, ``prefill`` all tokens of the first, in every layer.
    """

    def __init__(self, device: torch.device, spec: ModelSpec, layout: KVLayout, rows: int, context: int) -> None:
        backend = TritonBackend(str(device))
        held = -(-context // layout.block_size)
        self.rows, self.context, self.held = rows, context, held
        self.ids = np.random.default_rng(1).permutation(rows * held).astype(np.int32)
        self.blocks = backend.store(rows * held, layout.block_bytes, 0)
        for first in range(0, len(self.blocks), 1024):
            self.blocks[first : first + 1024].view(torch.float16).normal_(0.0, 1.0)
        queries = Matrix(64, spec.heads * spec.head_dim, torch.randn(64, spec.heads * spec.head_dim, device=device))

        def attend(ops: Any) -> None:
            q = ops.embed(queries)
            for layer in range(LAYERS):
                mixed = ops.attend(q, layer, spec.head_dim**-0.5, None)
            ops.output(ops.pick(mixed))

        self.program = backend.program(attend, layout, spec.heads)

    def decode(self) -> None:
        ones = np.arange(self.rows + 1, dtype=np.int32)
        self._run(ones, np.full(self.rows, self.context - 1, np.int32), self.rows)

    def prefill(self) -> None:
        self._run(np.array([0, self.context], np.int32), np.arange(self.context, dtype=np.int32), 1)

    def _run(self, starts: np.ndarray, positions: np.ndarray, rows: int) -> None:
        table = self.ids[: rows * self.held], np.arange(rows + 1, dtype=np.int32) * self.held
        tokens = np.arange(len(positions), dtype=np.int32) % 64
        self.program.run(Batch(tokens, positions, starts, [table], np.zeros(1, np.int32)), self.blocks)
