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

from octavo.core.layout import KV_ITEMSIZE, KVLayout, LayerGroup
from octavo.core.plan import DEVICE
from octavo.kernels.backend import Batch
from octavo.kernels.triton import attention, gemm
from octavo.kernels.triton.backend import TritonBackend
from octavo.kernels.triton.cache import Cache
from octavo.kernels.triton.inputs import Inputs, prepare
from octavo.kernels.triton.weights import Matrix
from octavo.models.spec import ModelSpec

Report = dict[str, Any]

KV_TYPES = [dtype for dtype in ("float16", "fp8") if dtype in KV_ITEMSIZE]
LAYERS = 2  # that attention alone runs over: what one reads is not in the cache when the other has run


def seconds(device: torch.device, work: Callable[[], object], repeats: int) -> float:
    """The median time of one call, after two that warm up; on a GPU by its own clock, and without launching each kernel
    from Python, which would be slower than small kernels are."""
    for _ in range(2):
        work()
    call = _captured(work) if device.type == "cuda" else work
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        else:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _captured(work: Callable[[], object]) -> Callable[[], object]:
    """The launches of one call as a graph; as they are if something in them can't be captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        print(f"timed without a graph: {error}", flush=True)
        return work
    graph.replay()
    return graph.replay


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
    for dtype in KV_TYPES:
        for rows in sizes.rows:
            for context in sizes.contexts:
                layout = _layout(spec, dtype)
                if not _fits(device, rows * -(-context // layout.block_size) * layout.block_bytes):
                    continue
                starts = np.arange(rows + 1, dtype=np.int32)
                world = _Attention(device, spec, layout, starts, np.full(rows, context - 1, np.int32))
                took = seconds(device, world.attend, sizes.repeats) / LAYERS
                read = 2 * rows * context * spec.kv_heads * spec.head_dim * KV_ITEMSIZE[dtype]
                case = {"model": name, "dtype": dtype, "rows": rows, "context": context}
                found.append({**case, "seconds": took, "rate": read / took})
                del world
    return found


def prefill_attention(device: torch.device, sizes: Sizes, name: str) -> Report:
    """Operations a second of one prompt's attention: four for each dimension and (query, key) pair."""
    spec, tokens = SHAPES[name], sizes.context
    starts = np.array([0, tokens], np.int32)
    world = _Attention(device, spec, _layout(spec, "float16"), starts, np.arange(tokens, dtype=np.int32))
    took = seconds(device, world.attend, max(2, sizes.repeats // 4)) / LAYERS
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


def _layout(spec: ModelSpec, dtype: str) -> KVLayout:
    return KVLayout(16, spec.kv_heads, spec.head_dim, dtype, (LayerGroup(None, tuple(range(LAYERS))),))


def _fits(device: torch.device, nbytes: int) -> bool:
    return device.type == "cpu" or nbytes < 0.8 * torch.cuda.mem_get_info(device)[0]


class _Attention:
    """Owns: sequences in shuffled blocks of random keys and values, and queries of some of their tokens.

    Promises: ``attend`` launches the attention of these tokens in every layer, and nothing else.
    """

    def __init__(
        self, device: torch.device, spec: ModelSpec, layout: KVLayout, starts: np.ndarray, positions: np.ndarray
    ) -> None:
        rows, held = len(starts) - 1, -(-(int(positions.max()) + 1) // layout.block_size)
        ids = np.random.default_rng(1).permutation(rows * held).astype(np.int32)
        table = ids, np.arange(rows + 1, dtype=np.int32) * held
        self.blocks = TritonBackend(str(device)).store(rows * held, layout.block_bytes, DEVICE)
        for first in range(0, len(self.blocks), 1024):
            some = self.blocks[first : first + 1024]
            if layout.dtype == "fp8":
                some.random_(0, 64)  # bits of numbers up to 2
            else:
                some.view(torch.float16).normal_(0.0, 1.0)
        tokens = len(positions)
        batch = Batch(np.zeros(tokens, np.int32), positions, starts, [table], np.zeros(1, np.int32))
        self.inputs = Inputs(device)
        self.step = self.inputs.send(prepare(batch, layout, spec.heads))
        self.cache = Cache.of(self.blocks, layout)
        self.scratch = attention.Scratch.make(attention.SCRATCH, layout.kv_heads, layout.head_dim, device)
        self.queries = torch.randn(tokens, spec.heads * spec.head_dim, device=device).to(torch.float16)
        self.out = torch.empty_like(self.queries)
        self.scale = spec.head_dim**-0.5

    def attend(self) -> None:
        ids, part = self.step.ids, self.step.groups[0]
        for layer in range(LAYERS):
            attention.attend(
                self.queries, self.cache, layer, ids, part.items, part.joins, self.scratch, self.scale, None, 0.0,
                self.out,
            )  # fmt: skip
