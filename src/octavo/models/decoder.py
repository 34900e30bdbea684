"""The decoder, once for all families: what differs is in the spec.

Weights are packed by a backend when they are loaded; after that they are opaque here.  The names of a checkpoint's
tensors are the canonical ones::

    embed  final_norm  head (absent when tied)
    layers.{i}.attn_norm  q k v  q_bias k_bias v_bias  q_norm k_norm  o o_bias  attn_post_norm
    layers.{i}.mlp_norm   gate up  down  mlp_post_norm
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from octavo.core.layout import KVLayout, group_layers
from octavo.errors import ModelError
from octavo.kernels.backend import Backend, Ops, Program, Value, Vector, Weight
from octavo.loading.tensor import Tensor
from octavo.models.spec import ModelSpec

Progress = Callable[[int, int], None]  # bytes of weights packed so far, bytes in all


class Tensors(Protocol):
    """Weights by their canonical names."""

    def get(self, name: str, /) -> Tensor | None: ...

    def release(self, name: str, nbytes: int | None = None, /) -> None:
        """The tensor's first so many bytes (all without a number) have been packed."""


class Checkpoint(Protocol):
    """What the decoder needs of a loaded model file."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def tensors(self) -> Tensors: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Layer:
    """One layer's packed weights; what a family doesn't have is None."""

    attn_norm: Vector
    qkv: tuple[Weight, ...]  # q, k, v: parts of one product
    qkv_bias: Vector | None
    q_norm: Vector | None
    k_norm: Vector | None
    o: Weight
    o_bias: Vector | None
    attn_post_norm: Vector | None
    mlp_norm: Vector
    gate_up: tuple[Weight, ...]  # gate, up: parts of one product
    down: Weight
    mlp_post_norm: Vector | None


@dataclass(frozen=True)
class Weights:
    """A model's packed weights.  ``head`` is ``embed`` itself when they are tied: one copy."""

    embed: Weight
    layers: tuple[Layer, ...]
    ropes: tuple[Vector, ...]
    final_norm: Vector
    head: Weight


def build(ops: Ops, spec: ModelSpec, weights: Weights) -> None:
    """The forward pass, from token ids to logits, in terms of the operators."""
    x = ops.embed(weights.embed, spec.embed_scale)
    for i, layer in enumerate(weights.layers):
        kind = spec.layers[i]
        y = ops.norm(x, layer.attn_norm, spec.norm_eps)
        y = ops.linear(y, layer.qkv, bias=layer.qkv_bias)
        rope, scale = weights.ropes[kind.rope], spec.ropes[kind.rope].scale
        y = ops.rope_write(y, i, rope, scale, layer.q_norm, layer.k_norm, spec.norm_eps)
        y = ops.attend(y, i, spec.scale, kind.window, spec.attention_softcap)
        x = _add(ops, x, y, layer.o, layer.o_bias, layer.attn_post_norm, spec.norm_eps)
        y = ops.norm(x, layer.mlp_norm, spec.norm_eps)
        y = ops.gate(ops.linear(y, layer.gate_up), spec.activation)
        x = _add(ops, x, y, layer.down, None, layer.mlp_post_norm, spec.norm_eps)
    x = ops.norm(ops.pick(x), weights.final_norm, spec.norm_eps)
    ops.output(ops.linear(x, (weights.head,)), spec.logit_softcap)


def _add(
    ops: Ops, x: Value, y: Value, weight: Weight, bias: Vector | None, post_norm: Vector | None, eps: float
) -> Value:
    """x + y . W^T + bias, with a norm of the product before the sum where the family has one."""
    if post_norm is None:
        return ops.linear(y, (weight,), bias, residual=x)
    return ops.norm(ops.linear(y, (weight,), bias), post_norm, eps, residual=x)


def kv_layout(spec: ModelSpec, block_size: int, dtype: str) -> KVLayout:
    """The cache's layout for a model."""
    groups = group_layers(tuple(layer.window for layer in spec.layers))
    return KVLayout(block_size, spec.kv_heads, spec.head_dim, dtype, groups)


def compile_model(backend: Backend, spec: ModelSpec, weights: Weights, layout: KVLayout) -> Program:
    """A program that runs the model on ``backend``, reading and writing K and V in blocks of ``layout``."""
    return backend.program(lambda ops: build(ops, spec, weights), layout, spec.heads)


def load_weights(backend: Backend, checkpoint: Checkpoint, progress: Progress | None = None) -> Weights:
    """Packs a checkpoint's tensors; ``progress`` hears after each one how many bytes are done, of how many.

    Raises ModelError when a tensor is missing or has another shape than the spec says.
    """
    spec = checkpoint.spec
    pack = _Packer(backend, checkpoint, progress)
    width = spec.heads * spec.head_dim
    embed = pack.matrix("embed", spec.vocab, spec.hidden)
    layers = tuple(_load_layer(pack, spec, f"layers.{i}.", width) for i in range(len(spec.layers)))
    return Weights(
        embed=embed,
        layers=layers,
        ropes=tuple(backend.vector(np.array(rope.inv_freq, dtype=np.float32)) for rope in spec.ropes),
        final_norm=pack.vector("final_norm", spec.hidden),
        head=embed if spec.tied else pack.matrix("head", spec.vocab, spec.hidden),
    )


def _load_layer(pack: _Packer, spec: ModelSpec, at: str, width: int) -> Layer:
    kv_width = spec.kv_heads * spec.head_dim
    norms, heads = spec.post_norms, spec.qk_norm
    biases = ((at + "q_bias", width), (at + "k_bias", kv_width), (at + "v_bias", kv_width))
    return Layer(
        attn_norm=pack.vector(at + "attn_norm", spec.hidden),
        qkv=(
            pack.matrix(at + "q", width, spec.hidden),
            pack.matrix(at + "k", kv_width, spec.hidden),
            pack.matrix(at + "v", kv_width, spec.hidden),
        ),
        qkv_bias=pack.joined(biases) if spec.qkv_bias else None,
        q_norm=pack.vector(at + "q_norm", spec.head_dim) if heads else None,
        k_norm=pack.vector(at + "k_norm", spec.head_dim) if heads else None,
        o=pack.matrix(at + "o", spec.hidden, width),
        o_bias=pack.vector(at + "o_bias", spec.hidden) if spec.o_bias else None,
        attn_post_norm=pack.vector(at + "attn_post_norm", spec.hidden) if norms else None,
        mlp_norm=pack.vector(at + "mlp_norm", spec.hidden),
        gate_up=(
            pack.matrix(at + "gate", spec.intermediate, spec.hidden),
            pack.matrix(at + "up", spec.intermediate, spec.hidden),
        ),
        down=pack.matrix(at + "down", spec.hidden, spec.intermediate),
        mlp_post_norm=pack.vector(at + "mlp_post_norm", spec.hidden) if norms else None,
    )


class _Packer:
    """Owns: the count of bytes packed.  Promises: what it returns had the shape that was asked for."""

    def __init__(self, backend: Backend, checkpoint: Checkpoint, progress: Progress | None) -> None:
        self.backend, self.tensors, self.progress = backend, checkpoint.tensors, progress
        self.done, self.total = 0, checkpoint.nbytes

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        tensor = self._find(name, (rows, cols))
        # What is packed leaves memory at once: else the file would lie there beside its packed copy.
        packed = self.backend.matrix(tensor.type, tensor.data, rows, cols, partial(self.tensors.release, name))
        self.tensors.release(name)
        self._count(tensor)
        return packed

    def vector(self, name: str, size: int) -> Vector:
        return self.joined(((name, size),))

    def joined(self, parts: tuple[tuple[str, int], ...]) -> Vector:
        """One vector from several, end to end."""
        values = []
        for name, size in parts:
            tensor = self._find(name, (size,))
            if tensor.type != "F32":
                raise ModelError(f"tensor {name} is {tensor.type}; norms and biases must be F32")
            values.append(np.ascontiguousarray(tensor.data).view(np.float32))
            self._count(tensor)
        return self.backend.vector(np.concatenate(values))

    def _find(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"tensor {name} is missing from the model")
        if tensor.shape != shape:
            raise ModelError(f"tensor {name} has shape {tensor.shape}, but the model's settings need {shape}")
        return tensor

    def _count(self, tensor: Tensor) -> None:
        self.done += tensor.nbytes
        if self.progress:
            self.progress(self.done, self.total)
