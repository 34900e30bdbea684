"""Which build of the CPU kernels to run: the best that this machine has, if it computes what the plain one does."""

from __future__ import annotations

import importlib
import logging
from functools import cache
from typing import Any

import numpy as np

from octavo.errors import ConfigError

log = logging.getLogger(__name__)


def runnable_isas() -> list[str]:
    """Instruction sets that this machine runs and Octavo was built for, best first; "scalar" is always the last."""
    scalar = _module("scalar")
    if scalar is None:
        raise ImportError("octavo's CPU kernels are not built: install octavo, or run `pip install -e .` in its source")
    return [isa for isa in scalar.runnable_isas() if _module(isa) is not None]


@cache
def load_kernels(isa: str | None = None) -> Any:
    """The kernel module of an instruction set; by default of the best that passes a self-check of milliseconds.

    Raises ConfigError for one that the machine doesn't run or that isn't built.
    """
    isas = runnable_isas()
    if isa is not None:
        if isa not in isas:
            raise ConfigError(f"isa: {isa!r} doesn't run here; these do: {', '.join(isas)}", "isa")
        return _module(isa)
    for name in isas:
        problem = "" if name == "scalar" else self_check(_module(name), _module("scalar"))
        if not problem:
            return _module(name)
        log.warning("the %s kernels fail their self-check (%s); trying the next", name, problem)
    raise AssertionError("scalar is always there")


def self_check(module: Any, oracle: Any) -> str:
    """What is wrong with a module, compared with the scalar build on a tiny model; "" if nothing."""
    try:
        expected, got = _tiny_run(oracle), _tiny_run(module)
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    for what, right, found in zip(("exact", "fast"), expected, got, strict=True):
        error = float(np.max(np.abs(right - found)))
        if not error <= 1e-3 * float(np.max(np.abs(right))):
            return f"{what} results are off by {error:g}"
    return ""


def _module(isa: str) -> Any | None:
    try:
        return importlib.import_module(f"octavo.kernels._cpu_{isa}")
    except ModuleNotFoundError:
        return None


def _tiny_run(module: Any) -> list[np.ndarray]:
    """Logits of one layer over 20 tokens with weights of several types, on the exact and on the fast path."""
    return [_tiny_model(module, module.Cpu(1, exact)) for exact in (True, False)]


def _tiny_model(module: Any, cpu: Any) -> np.ndarray:
    rng = np.random.default_rng(7)
    width, heads, kv_heads, head_dim, vocab, block = 64, 4, 2, 16, 48, 16

    def floats(rows: int, cols: int) -> Any:
        data = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(0.1)
        return cpu.pack("F32", data.reshape(-1).view(np.uint8), rows, cols)

    def quantised(rows: int, cols: int) -> Any:
        blocks = np.zeros((rows * cols // 32, 34), dtype=np.uint8)
        blocks[:, 0:2] = np.full(len(blocks), 0.002, dtype=np.float16).view(np.uint8).reshape(-1, 2)
        blocks[:, 2:] = rng.integers(-127, 128, (len(blocks), 32), dtype=np.int8).view(np.uint8)
        return cpu.pack("Q8_0", blocks.reshape(-1), rows, cols)

    ones = np.ones(width, dtype=np.float32)
    inv_freq = (0.5 ** np.arange(head_dim // 2)).astype(np.float32)
    program = module.Program(cpu, block, kv_heads, head_dim, 1, "float16", 1, heads, 8)
    widths = (
        width,
        width,
        (heads + 2 * kv_heads) * head_dim,
        heads * head_dim,
        heads * head_dim,
        2 * width,
        width,
        width,
    )
    x, normed, qkv, q, mixed, both, gated, y = (program.buffer(n, "tokens") for n in widths)
    logits = program.buffer(vocab, "logits")
    picked = program.buffer(width, "logits")
    program.segment(False)
    program.embed(x, floats(vocab, width), 8.0)
    program.norm(normed, x, ones, 1e-5, -1)
    program.linear(qkv, normed, [quantised((heads + 2 * kv_heads) * head_dim, width)], None, -1)
    program.rope_write(q, qkv, 0, 0, inv_freq, 1.0, None, None, 0.0)
    program.segment(False)
    program.attend(mixed, q, 0, 0, 0.25, 9, 0.0)
    program.linear(both, mixed, [quantised(2 * width, width)], None, -1)
    program.gate(gated, both, "silu")
    program.linear(y, gated, [quantised(width, width)], None, x)
    program.segment(True)
    program.pick(picked, y)
    program.linear(logits, picked, [floats(vocab, width)], None, -1)
    program.output(logits, 30.0)
    n = 20
    blocks = np.zeros((2, 2 * kv_heads * head_dim * block * 2), dtype=np.uint8)
    steps = np.arange(n, dtype=np.int32)
    table = (np.array([1, 0], dtype=np.int32), np.array([0, 2], dtype=np.int32))
    return np.array(program.run(steps, steps, np.array([0, n], dtype=np.int32), [table], steps, blocks))
