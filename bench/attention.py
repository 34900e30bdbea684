"""Attention alone, against what the machine can do: decode by the memory it reads, prefill by its multiplications.

    python bench/attention.py [--context 8192] [--heads 9 --kv-heads 3 --head-dim 64] [--threads N] [--isa NAME]

Decode: one token that attends to ``--context`` earlier ones, in as many layers as make K and V far larger than any
cache; its rate is the bytes of K and V over the time, and its share is of a plain read of memory with as many threads.
Prefill: a prompt of ``--prompt`` tokens in one step; its rate is four operations for each dimension and (query, key)
pair that causality leaves, and its share is of what fma reaches in registers.  All are measured in turn, round by
round; medians are printed.  Exits with 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np

from octavo.core.layout import KVLayout, LayerGroup
from octavo.core.plan import DEVICE
from octavo.kernels.backend import Batch, Program
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import STORAGE
from octavo.kernels.threads import choose_threads

READ_SHARE = 0.75  # of the read bandwidth, for decode in float16
FMA_SHARE = 0.60  # of the fma peak, for prefill in float16
FAR = 256 << 20  # bytes of K and V that no cache holds
LAYERS = 4  # of a prefill
ROWS = 64  # distinct tokens: random queries, keys and values


@dataclass
class World:
    """Owns: a pool that holds one sequence's K and V in every layer, in shuffled blocks.

    Promises: ``attend`` runs the attention of some tokens at the sequence's end in every layer, and nothing that costs
    time beside it.
    """

    backend: CpuBackend
    layout: KVLayout
    heads: int
    length: int
    blocks: np.ndarray = field(init=False)
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        count = -(-self.length // self.layout.block_size)
        self.ids = np.random.default_rng(1).permutation(count).astype(np.int32)
        self.blocks = self.backend.store(count, self.layout.block_bytes, DEVICE)
        layers = self.layout.groups[0].layers
        qkv, queries = self.table(self.heads + 2 * self.layout.kv_heads), self.table(self.heads)
        inv_freq = self.backend.vector((1e4 ** -np.linspace(0, 1, self.layout.head_dim // 2)).astype(np.float32))

        def write(ops: Any) -> None:
            for layer in layers:
                written = ops.rope_write(ops.embed(qkv), layer, inv_freq, 1.0)
            ops.output(ops.pick(written))

        def attend(ops: Any) -> None:
            for layer in layers:
                mixed = ops.attend(ops.embed(queries), layer, self.layout.head_dim**-0.5, None)
            ops.output(ops.pick(mixed))

        filler = self.backend.program(write, self.layout, self.heads)
        self.program = self.backend.program(attend, self.layout, self.heads)
        for first in range(0, self.length, 1024):
            filler.run(self.batch(first, min(1024, self.length - first)), self.blocks)

    def table(self, heads: int) -> Any:
        rows = np.random.default_rng(heads).standard_normal((ROWS, heads * self.layout.head_dim), dtype=np.float32)
        return self.backend.matrix("F32", rows.reshape(-1).view(np.uint8), *rows.shape)

    def batch(self, first: int, tokens: int) -> Batch:
        steps = np.arange(first, first + tokens, dtype=np.int32)
        ends = np.array([0, len(self.ids)], np.int32)
        return Batch(steps % ROWS, steps, np.array([0, tokens], np.int32), [(self.ids, ends)], np.zeros(1, np.int32))

    def attend(self, tokens: int) -> float:
        """Seconds a layer."""
        batch = self.batch(self.length - tokens, tokens)
        began = time.perf_counter()
        self.program.run(batch, self.blocks)
        return (time.perf_counter() - began) / len(self.layout.groups[0].layers)


def layout(given: argparse.Namespace, dtype: str, layers: int) -> KVLayout:
    groups = (LayerGroup(None, tuple(range(layers))),)
    return KVLayout(given.block_size, given.kv_heads, given.head_dim, dtype, groups)


def measure(given: argparse.Namespace, threads: int) -> dict[str, list[float]]:
    """Rates of each round: bytes a second of "read" and "decode DTYPE", operations of "fma" and "prefill DTYPE"."""
    backend = CpuBackend(threads, "exact", given.isa)
    memory = np.ones(2 * FAR, np.uint8)
    runs: dict[str, Callable[[], float]] = {
        "read": lambda: backend.kernels.probe_read(memory, threads),
        "fma": lambda: backend.kernels.probe_fma(4_000_000, threads),
    }
    for dtype in given.dtype:
        one = layout(given, dtype, 1)
        layer_bytes = one.block_bytes * -(-given.context // given.block_size)
        long = World(backend, layout(given, dtype, -(-FAR // layer_bytes)), given.heads, given.context)
        short = World(backend, layout(given, dtype, LAYERS), given.heads, given.prompt)
        pairs = given.prompt * (given.prompt + 1) // 2
        work = 4 * pairs * given.heads * given.head_dim
        runs[f"decode {dtype}"] = lambda w=long, n=layer_bytes: n / w.attend(1)
        runs[f"prefill {dtype}"] = lambda w=short, n=work: n / w.attend(given.prompt)
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for round in range(given.rounds + 1):
        for name, run in runs.items():
            rate = run()
            if round:  # the first touches memory and wakes threads
                rates[name].append(rate)
    return rates


def report(given: argparse.Namespace, rates: dict[str, list[float]]) -> bool:
    """Prints the table and the verdicts; whether all figures are reached."""
    middle = {name: statistics.median(values) for name, values in rates.items()}
    base = "float16" if "float16" in given.dtype else given.dtype[0]
    size = {dtype: layout(given, dtype, 1).bytes_per_token for dtype in given.dtype}
    time_of = {dtype: given.context * size[dtype] / middle[f"decode {dtype}"] for dtype in given.dtype}
    lines = []
    for dtype in given.dtype:
        decode, prefill = middle[f"decode {dtype}"], middle[f"prefill {dtype}"]
        lines.append(
            [
                dtype,
                f"{size[dtype]:.0f}",
                f"{time_of[dtype] * 1e6:.0f}",
                f"{decode / 1e9:.1f}",
                f"{decode / middle['read']:.0%}",
                f"{prefill / 1e9:.0f}",
                f"{prefill / middle['fma']:.0%}",
            ]
        )
    print(f"read of memory {middle['read'] / 1e9:.1f} GB/s, fma {middle['fma'] / 1e9:.0f} GFLOP/s\n")
    head = ["KV", "bytes/token", f"decode at {given.context}, us", "GB/s", "of read", "prefill, GFLOP/s", "of fma"]
    common.table(head, lines)
    print()
    good = True
    if base == "float16":
        good &= common.verdict(
            "float16 decode, of the read bandwidth", middle["decode float16"] / middle["read"], READ_SHARE
        )
        good &= common.verdict("float16 prefill, of fma", middle["prefill float16"] / middle["fma"], FMA_SHARE)
        if "int8" in time_of:
            good &= common.verdict("int8 decode, times as fast as float16", time_of["float16"] / time_of["int8"], 1.0)
    return good


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    p.add_argument("--context", type=int, default=8192, help="tokens that a decode step sees (default: %(default)s)")
    p.add_argument("--prompt", type=int, default=2048, help="tokens of the prefill (default: %(default)s)")
    p.add_argument("--heads", type=int, default=9, help="query heads (default: %(default)s, as SmolLM2-135M)")
    p.add_argument("--kv-heads", type=int, default=3)
    p.add_argument("--head-dim", type=int, default=64)
    p.add_argument("--block-size", type=int, default=16)
    p.add_argument("--dtype", action="append", choices=list(STORAGE), help="of K and V (may be given again)")
    p.add_argument("--rounds", type=int, default=7, help="measured rounds after one warm-up (default: %(default)s)")
    p.add_argument("--threads", type=int, help="default: the CPUs this process may use")
    p.add_argument("--isa", help="a kernel build by name (default: the best that runs here)")
    given = p.parse_args()
    given.dtype = given.dtype or list(STORAGE)
    if min(given.context, given.prompt, given.rounds, given.heads, given.kv_heads, given.head_dim) < 1:
        p.error("every number must be at least 1")
    return given


def main() -> int:
    given = arguments()
    threads = given.threads or choose_threads().count
    rates = measure(given, threads)
    name = CpuBackend(threads, "exact", given.isa).isa
    print(f"{name}, {threads} threads, {given.heads} heads, {given.kv_heads} KV heads of {given.head_dim}, ", end="")
    good = report(given, rates)
    common.save("attention", {"isa": name, "arguments": {**vars(given), "threads": threads}, "rates": rates})
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
