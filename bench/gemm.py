"""Matrix products alone, against what the machine can do: one row by the weights it reads, many by multiplications.

    python bench/gemm.py [--type Q4_1 --type F32 ...] [--shape 576x1536 ...] [--rows 1 --rows 64 ...] [--isa NAME]

A shape is columns x rows of W (K x N).  Each product runs against as many different matrices as no cache holds.
Figures are shares: for one row of the read bandwidth (bytes of packed weights over the time, against a plain read of
memory), for several of what float fma reaches in registers (two operations a weight and row; the integer products of
the fast path may pass 100 %).  All are measured in turn, round by round; medians are printed.  Exits with 1 if one is
missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import common
import numpy as np

from octavo.core.layout import KVLayout, LayerGroup
from octavo.kernels.backend import Batch, Program
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.threads import choose_threads
from octavo.loading.tensor import TYPES

READ_SHARE = 0.85  # of the read bandwidth, one row
FMA_SHARE = 0.75  # of the fma peak, float weights, 64 rows and more
FAST_GAIN = {"Q4_0": 1.5, "Q4_1": 1.5, "Q4_K": 1.5, "Q5_0": 1.1, "Q5_1": 1.1, "Q5_K": 1.1, "Q6_K": 1.1, "Q8_0": 1.1}
FAR = 192 << 20  # bytes of weights that no cache holds
LAYOUT = KVLayout(16, 1, 1, "float32", (LayerGroup(None, (0,)),))
SMOLLM2 = ("576x960", "576x576", "576x3072", "1536x576", "576x49152")
LLAMA3 = ("4096x4096", "4096x14336", "14336x4096")


@dataclass
class Product:
    """Owns: matrices of one type and shape, and a program that multiplies the same rows by each of them."""

    type: str
    K: int
    N: int
    backend: CpuBackend
    copies: int = field(init=False)
    nbytes: int = field(init=False)
    program: Program = field(init=False)

    def __post_init__(self) -> None:
        per, size = TYPES[self.type]
        raw = random_weights(self.type, self.N * self.K // per * size)
        first = self.backend.matrix(self.type, raw, self.N, self.K)
        self.nbytes = first.nbytes
        self.copies = max(1, -(-FAR // self.nbytes))
        matrices = [first, *(self.backend.matrix(self.type, raw, self.N, self.K) for _ in range(self.copies - 1))]
        rows = np.random.default_rng(2).standard_normal((64, self.K), dtype=np.float32)
        table = self.backend.matrix("F32", rows.reshape(-1).view(np.uint8), *rows.shape)

        def build(ops: Any) -> None:
            x = ops.embed(table)
            for matrix in matrices:
                y = ops.linear(x, [matrix])
            ops.output(ops.pick(y))

        self.program = self.backend.program(build, LAYOUT, 1)
        self.blocks = np.zeros((1, LAYOUT.block_bytes), np.uint8)

    def seconds(self, rows: int) -> float:
        """Of one product; short ones are repeated."""
        steps = np.arange(rows, dtype=np.int32)
        blocks = -(-rows // LAYOUT.block_size)
        tables = [(np.zeros(blocks, np.int32), np.array([0, blocks], np.int32))]
        batch = Batch(steps % 64, steps, np.array([0, rows], np.int32), tables, np.zeros(1, np.int32))
        turns, began = 0, time.perf_counter()
        while True:
            self.program.run(batch, self.blocks)
            turns += 1
            spent = time.perf_counter() - began
            if spent > 0.02:
                return spent / turns / self.copies


def random_weights(type: str, nbytes: int) -> np.ndarray:
    """Bytes that are finite weights of the type, whatever they are."""
    rng = np.random.default_rng(1)
    if type == "F32":
        return rng.standard_normal(nbytes // 4, dtype=np.float32).view(np.uint8)
    raw = rng.integers(0, 256, nbytes, dtype=np.uint8)
    raw[1::2] &= 0x3B  # no half-precision number among them is infinite
    return raw


def sets(given: argparse.Namespace) -> list[tuple[str, int, int]]:
    found = []
    for type in given.type:
        for shape in given.shape:
            K, N = (int(x) for x in shape.split("x"))
            if K % TYPES[type][0] == 0:
                found.append((type, K, N))
    return found


def measure(given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Seconds of each (path, type, shape, rows), and the machine's own rates beside them."""
    exact, fast = (CpuBackend(threads, compute, given.isa) for compute in ("exact", "fast"))
    memory = np.ones(512 << 20, np.uint8)
    figures: dict[str, Any] = {}
    for type, K, N in sets(given):
        products = {"exact": Product(type, K, N, exact)}
        if type not in ("F32", "F16", "BF16"):
            products["fast"] = Product(type, K, N, fast)
        times: dict[tuple[str, int], list[float]] = {(p, m): [] for p in products for m in given.rows}
        read, fma = [], []
        for round in range(given.rounds + 1):
            reads, peaks = exact.kernels.probe_read(memory, threads), exact.kernels.probe_fma(4_000_000, threads)
            for path, rows in times:
                seconds = products[path].seconds(rows)
                if round:  # the first touches memory and wakes threads
                    times[path, rows].append(seconds)
            if round:
                read.append(reads)
                fma.append(peaks)
        figures[f"{type} {K}x{N}"] = {
            "nbytes": products["exact"].nbytes,
            "read": statistics.median(read),
            "fma": statistics.median(fma),
            "seconds": {f"{path} {rows}": statistics.median(t) for (path, rows), t in times.items()},
        }
        line(f"{type} {K}x{N}", K * N, figures[f"{type} {K}x{N}"], given.rows)
    return figures


def shares(work: int, figure: dict[str, Any], path: str, rows: int) -> tuple[float, float]:
    """Of the read bandwidth and of the fma peak."""
    seconds = figure["seconds"][f"{path} {rows}"]
    return figure["nbytes"] / seconds / figure["read"], 2 * work * rows / seconds / figure["fma"]


def line(name: str, work: int, figure: dict[str, Any], rows: list[int]) -> None:
    for path in ("exact", "fast"):
        if f"{path} {rows[0]}" not in figure["seconds"]:
            continue
        cells = []
        for m in rows:
            of_read, of_fma = shares(work, figure, path, m)
            cells.append(f"{m}: {of_read:.0%} of read" if m == 1 else f"{m}: {of_fma:.0%} of fma")
        print(f"{name:18} {path:6} " + "   ".join(f"{c:18}" for c in cells), flush=True)


def verdicts(figures: dict[str, Any]) -> bool:
    good = True
    for name, figure in figures.items():
        type, shape = name.split()
        K, N = (int(x) for x in shape.split("x"))
        times = figure["seconds"]
        for key in times:
            path, rows = key.split()
            of_read, of_fma = shares(K * N, figure, path, int(rows))
            best = path == "fast" or type in ("F32", "F16", "BF16")
            if rows == "1" and best:
                good &= common.verdict(f"{name}, 1 row, {path}: share of the read bandwidth", of_read, READ_SHARE)
            if int(rows) >= 64 and path == "exact":
                good &= common.verdict(f"{name}, {rows} rows: share of fma", of_fma, FMA_SHARE)
        if "fast 64" in times and K * N > 1 << 18:
            gain = times["exact 64"] / times["fast 64"]
            good &= common.verdict(f"{name}, 64 rows: integer over float products", gain, FAST_GAIN[type])
    return good


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/gemm.py", description=(__doc__ or "").splitlines()[0])
    p.add_argument("--type", action="append", choices=list(TYPES), help="default: F32, F16, Q4_1, Q5_1, Q6_K, Q8_0")
    p.add_argument("--shape", action="append", help="KxN (default: those of SmolLM2-135M and Llama-3-8B)")
    p.add_argument("--rows", action="append", type=int, help="default: 1, 4, 16, 64, 256")
    p.add_argument("--rounds", type=int, default=5, help="measured rounds after one warm-up (default: %(default)s)")
    p.add_argument("--threads", type=int, help="default: the CPUs this process may use")
    p.add_argument("--isa", help="a kernel build by name (default: the best that runs here)")
    given = p.parse_args()
    given.type = given.type or ["F32", "F16", "Q4_1", "Q5_1", "Q6_K", "Q8_0"]
    given.shape = given.shape or [*SMOLLM2, *LLAMA3]
    given.rows = given.rows or [1, 4, 16, 64, 256]
    if min(given.rounds, *given.rows) < 1:
        p.error("rounds and rows must be at least 1")
    return given


def main() -> int:
    given = arguments()
    threads = given.threads or choose_threads().count
    isa = CpuBackend(threads, "exact", given.isa).isa
    print(f"{isa}, {threads} threads\n")
    figures = measure(given, threads)
    print()
    good = verdicts(figures)
    common.save("gemm", {"isa": isa, "arguments": {**vars(given), "threads": threads}, "figures": figures})
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
