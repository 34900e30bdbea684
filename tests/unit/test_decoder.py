"""What the decoder asks of the operators, and how weights come into it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import tiny
from conftest import TinyModels
from octavo.core.layout import KVLayout
from octavo.errors import ModelError
from octavo.kernels.reference import ReferenceBackend
from octavo.loading.tensor import Tensor
from octavo.models import decoder
from tiny import Assembled


class Recorder:
    """Operators that write down how they were called; a weight is its own name."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> str:
            self.calls.append((name, args, kwargs))
            return f"v{len(self.calls)}"

        return call


class Names:
    """A backend whose packed weights are counted, and named after what they were packed from."""

    name = "names"

    def __init__(self) -> None:
        self.matrices: list[tuple[str, int, int]] = []
        self.vectors: list[np.ndarray] = []

    def matrix(self, type: str, data: np.ndarray, rows: int, cols: int, read: Any = None) -> str:
        self.matrices.append((type, rows, cols))
        return f"m{len(self.matrices)}"

    def vector(self, data: np.ndarray) -> np.ndarray:
        self.vectors.append(data)
        return data


@pytest.fixture(scope="module")
def llama(tiny_models: TinyModels) -> Assembled:
    return tiny.assemble(tiny_models.get("llama", "Q8_0"))


@pytest.fixture(scope="module")
def gemma(tiny_models: TinyModels) -> Assembled:
    return tiny.assemble(tiny_models.get("gemma3"))


def test_tied_head_is_the_packed_embedding(llama: Assembled) -> None:
    backend: Any = Names()
    weights = decoder.load_weights(backend, llama)
    assert weights.head is weights.embed
    assert len(backend.matrices) == 1 + 7 * 2
    assert backend.matrices[0] == ("Q8_0", tiny.VOCAB, 64)


def test_untied_head_is_another_matrix(tiny_models: TinyModels) -> None:
    backend: Any = Names()
    weights = decoder.load_weights(backend, tiny.assemble(tiny_models.get("llama-untied")))
    assert weights.head != weights.embed and len(backend.matrices) == 2 + 7 * 2


def test_biases_of_queries_keys_and_values_are_one_vector(tiny_models: TinyModels) -> None:
    checkpoint = tiny.assemble(tiny_models.get("qwen2"))
    weights = decoder.load_weights(ReferenceBackend(), checkpoint)
    parts = [checkpoint.tensors[f"layers.1.{p}_bias"].data.view(np.float32) for p in "qkv"]
    bias = weights.layers[1].qkv_bias
    assert bias is not None and np.array_equal(bias, np.concatenate(parts))


def test_progress_counts_every_byte(llama: Assembled) -> None:
    seen: list[tuple[int, int]] = []
    decoder.load_weights(ReferenceBackend(), llama, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (llama.nbytes, llama.nbytes)
    assert seen == sorted(seen) and len(seen) == len(llama.tensors)


def test_a_bad_tensor_is_named(llama: Assembled) -> None:
    def load(**changes: Tensor | None) -> None:
        tensors: dict[str, Any] = {**llama.tensors, **{k.replace("__", "."): v for k, v in changes.items()}}
        decoder.load_weights(
            ReferenceBackend(), Assembled(llama.spec, tiny.Tensors({k: v for k, v in tensors.items() if v}))
        )

    with pytest.raises(ModelError, match=r"layers\.1\.down is missing"):
        load(layers__1__down=None)
    q = llama.tensors["layers.0.q"]
    with pytest.raises(ModelError, match=r"layers\.0\.q has shape \(32, 128\).*\(64, 64\)"):
        load(layers__0__q=replace(q, shape=(32, 128)))
    with pytest.raises(ModelError, match=r"final_norm is F16"):
        load(final_norm=Tensor("final_norm", "F16", (64,), np.zeros(128, np.uint8)))


def test_projections_are_parts_of_one_product_and_residuals_are_fused(llama: Assembled) -> None:
    ops: Any = Recorder()
    weights = decoder.load_weights(ReferenceBackend(), llama)
    decoder.build(ops, llama.spec, weights)
    layer = ["norm", "linear", "rope_write", "attend", "linear", "norm", "linear", "gate", "linear"]
    assert [c[0] for c in ops.calls] == ["embed", *layer, *layer, "pick", "norm", "linear", "output"]
    assert ops.calls[2][1][1] == weights.layers[0].qkv and len(weights.layers[0].qkv) == 3
    assert ops.calls[7][1][1] == weights.layers[0].gate_up and len(weights.layers[0].gate_up) == 2
    assert [c[2].get("residual") for c in ops.calls[1:10]] == [None] * 4 + ["v1"] + [None] * 3 + ["v6"]


def test_gemma_norms_before_the_residual_and_windows_by_layer(gemma: Assembled) -> None:
    ops: Any = Recorder()
    decoder.build(ops, gemma.spec, decoder.load_weights(ReferenceBackend(), gemma))
    names = [c[0] for c in ops.calls]
    assert names.count("norm") == 6 * 4 + 1
    assert sum(c[0] == "norm" and c[2].get("residual") is not None for c in ops.calls) == 6 * 2
    assert not any(c[0] == "linear" and c[2].get("residual") is not None for c in ops.calls)
    assert [c[1][3] for c in ops.calls if c[0] == "attend"] == [16, 16, 16, 16, 16, None]
    assert ops.calls[0][1][1] == 8.0  # root of the hidden size


def test_layout_of_windowed_models(gemma: Assembled) -> None:
    layout = decoder.kv_layout(gemma.spec, 4, "float16")
    assert isinstance(layout, KVLayout) and layout.windows.count(None) == 1
    assert sorted(i for g in layout.groups for i in g.layers) == list(range(6))
