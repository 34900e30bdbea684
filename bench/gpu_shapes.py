"""Models of known shapes with random weights that are made on the device, and how large each measurement is."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.core.layout import KVLayout
from octavo.kernels.triton.backend import TritonBackend
from octavo.kernels.triton.weights import Matrix
from octavo.loading.tensor import Tensor
from octavo.models.decoder import kv_layout
from octavo.models.spec import LayerSpec, ModelSpec, RopeSpec
from octavo.models.weights import needed


def llama(
    hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, layers: int, context: int, theta: float
) -> ModelSpec:
    dim = hidden // heads
    frequencies = tuple(float(np.float32(theta ** (-2 * i / dim))) for i in range(dim // 2))
    return ModelSpec(
        family="llama",
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate=intermediate,
        vocab=vocab,
        layers=(LayerSpec(),) * layers,
        ropes=(RopeSpec(frequencies),),
        max_context=context,
    )


SHAPES = {
    "llama-3.1-8b": llama(4096, 32, 8, 14336, 128256, 32, 131072, 5e5),
    "llama-2-13b": llama(5120, 40, 40, 13824, 32000, 40, 4096, 1e4),
    "dry": llama(64, 4, 2, 96, 128, 2, 512, 1e4),
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured: of a real run, or of a dry one that only shows that every part works."""

    models: tuple[str, ...]
    copied: int  # bytes of a copy
    product: int  # side of the square matrices
    batches: tuple[int, ...]  # of products and of the engine
    context: int  # of attention alone
    contexts: tuple[int, ...]  # over which decode attention is measured
    rows: tuple[int, ...]  # sequences that decode attention runs over
    prompt: int  # tokens ahead of the engine's decode
    steps: int  # decode steps that are timed
    requests: int  # of the shared load
    alone: int  # of them, those that transformers answers one at a time
    static: tuple[int, ...]  # batch sizes of transformers' generate
    load_context: int  # prompt and answer of a request of the load
    lengths: tuple[float, float]  # mean tokens of prompt and answer
    kernel_tests: tuple[str, ...]
    repeats: int


TESTS = ("tests/unit", "tests/scenarios", "-k", "triton")

REAL = Sizes(
    models=("llama-3.1-8b", "llama-2-13b"),
    copied=4 << 30,
    product=8192,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    context=8192,
    contexts=(512, 2048, 8192, 32768),
    rows=(1, 8, 64),
    prompt=128,
    steps=64,
    requests=512,
    alone=8,
    static=(8, 16, 32, 64, 128, 256),
    load_context=2048,
    lengths=(161, 338),
    kernel_tests=TESTS,
    repeats=20,
)

QUICK = Sizes(
    **{
        **vars(REAL),
        "models": ("llama-3.1-8b",),
        "batches": (1, 64, 256),
        "contexts": (8192,),
        "rows": (64,),
        "requests": 128,
        "alone": 3,
        "static": (32, 128),
        "repeats": 8,
    }
)

DRY = Sizes(
    models=("dry",),
    copied=1 << 16,
    product=32,
    batches=(1, 3),
    context=40,
    contexts=(40,),
    rows=(2,),
    prompt=6,
    steps=2,
    requests=3,
    alone=1,
    static=(2,),
    load_context=24,
    lengths=(6, 4),
    kernel_tests=("tests/unit/test_device.py", "-k", "no_driver"),
    repeats=2,
)


class RandomBackend(TritonBackend):
    """Triton kernels over weights that nobody trained: each is drawn on the device, whatever it is packed from."""

    def matrix(
        self, type: str, data: np.ndarray, rows: int, cols: int, read: Callable[[int], None] | None = None
    ) -> Matrix:
        made = torch.Generator(self.device).manual_seed(zlib.crc32(f"{rows} {cols}".encode()))
        values = torch.empty(rows, cols, dtype=torch.bfloat16, device=self.device)
        values.normal_(0.0, cols**-0.5, generator=made)
        return Matrix(rows, cols, values)


class RandomTensors:
    """Tensors of the right names and shapes; matrices have no bytes, norms are ones."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shapes = {tensor.name: tensor.shape for tensor in needed(spec, spec.vocab)}

    def get(self, name: str) -> Tensor | None:
        shape = self._shapes.get(name)
        if shape is None:
            return None
        if len(shape) == 1:
            return Tensor(name, "F32", shape, np.ones(shape, np.float32).view(np.uint8))
        return Tensor(name, "BF16", shape, np.empty(0, np.uint8))

    def release(self, name: str | None = None, nbytes: int | None = None) -> None:
        """They lie in no file."""

    @property
    def nbytes(self) -> int:
        found: list[Any] = [self.get(name) for name in self._shapes]
        return sum(tensor.nbytes for tensor in found)


class RandomCheckpoint:
    """What loading needs of a model file."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec, self.tensors = spec, RandomTensors(spec)

    @property
    def nbytes(self) -> int:
        return self.tensors.nbytes


def layout_of(spec: ModelSpec, block_size: int = 16, dtype: str = "float16") -> KVLayout:
    return kv_layout(spec, block_size, dtype)


def read_bytes(spec: ModelSpec) -> int:
    """Bytes of weights that a decode step reads: all but the embedding, of which it reads a row a sequence."""
    return RandomTensors(spec).nbytes - 2 * spec.vocab * spec.hidden


def token_bytes(spec: ModelSpec) -> int:
    """Bytes of K and V of one token in 16 bits."""
    return 4 * spec.kv_heads * spec.head_dim * len(spec.layers)


def token_operations(spec: ModelSpec) -> int:
    """Multiplications and additions of one token in all products with weights."""
    return read_bytes(spec)  # two bytes a weight, two operations a weight
