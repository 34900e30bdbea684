"""How large the KV cache becomes on a GPU; and the step that is run to find out, on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conftest import TinyModels
from octavo.config import EngineConfig
from octavo.core.layout import KVLayout, LayerGroup
from octavo.core.plan import LargestStep
from octavo.engine.gpu_memory import GpuMemory, largest_step, plan_gpu_memory, room_for, swap_buffers
from octavo.errors import ConfigError

LAYOUT = KVLayout(16, 2, 32, "float16", (LayerGroup(None, (0, 1)),))  # blocks of 8 KiB
MIB, GIB = 1 << 20, 1 << 30
H100 = GpuMemory("GPU 0 (NVIDIA H100)", 80 * GIB, 1 * GIB, 16 * GIB, 3 * GIB)


def test_a_gpu_keeps_what_its_share_leaves() -> None:
    """A pure function of the total, what is taken, and the share."""
    plan = plan_gpu_memory(EngineConfig(max_running=10**4), LAYOUT, 10**6, H100)
    assert plan.nbytes == (int(0.9 * 80 * GIB) - 20 * GIB) // LAYOUT.block_bytes * LAYOUT.block_bytes
    assert "90% of GPU 0 (NVIDIA H100)" in plan.why
    half = plan_gpu_memory(EngineConfig(max_running=10**4, gpu_memory=0.5), LAYOUT, 10**6, H100)
    assert half.nbytes == 20 * GIB
    useful = plan_gpu_memory(EngineConfig(max_running=4), LAYOUT, 64, H100)
    assert useful.blocks == 4 * 4 and useful.why == "all that can be used"


def test_a_size_that_is_set_holds_on_a_gpu_if_it_fits() -> None:
    assert plan_gpu_memory(EngineConfig(kv_blocks=1000), LAYOUT, 512, H100).blocks == 1000
    assert plan_gpu_memory(EngineConfig(kv_memory="59GiB"), LAYOUT, 512, H100).nbytes == 59 * GIB
    for settings in ({"kv_memory": "61GiB"}, {"kv_blocks": 61 * GIB // LAYOUT.block_bytes}):
        with pytest.raises(
            ConfigError, match="61.0 GiB is beyond the 60.0 GiB .*NVIDIA H100.* tokens would fit"
        ) as error:
            plan_gpu_memory(EngineConfig(**settings), LAYOUT, 512, H100)
        assert error.value.field == next(iter(settings))


def test_a_gpu_too_small_is_said_with_all_figures() -> None:
    """What was found, what is needed, what works instead."""
    small = replace(H100, total=20 * GIB)
    with pytest.raises(ConfigError) as error:
        plan_gpu_memory(EngineConfig(), LAYOUT, 512, small)
    said = str(error.value)
    assert "\n" not in said and error.value.field == "gpu_memory"
    for words in ("20.0 GiB", "18.0 GiB", "weights 16.0 GiB", "largest step 3.0 GiB", "others 1.0 GiB", "device cpu"):
        assert words in said
    with pytest.raises(ConfigError, match="so that no KV cache fits"):
        plan_gpu_memory(EngineConfig(kv_blocks=5), LAYOUT, 512, small)


def test_the_largest_step_is_what_the_scheduler_may_make() -> None:
    assert largest_step(EngineConfig(max_batched_tokens=2048), 4096, 128) == LargestStep(2048, 256, 384, 4096)
    assert largest_step(EngineConfig(max_batched_tokens=64), 4096, 128) == LargestStep(64, 64, 64, 4096)
    chosen = largest_step(EngineConfig(max_running=5000, speculate=4), 10**6, 7)
    assert (chosen.tokens, chosen.rows, chosen.logits) == (5064, 5000, 5064)


@pytest.mark.parametrize("windows", [(None, None), (None, 16)])
def test_the_largest_step_runs(windows: tuple[int | None, ...]) -> None:
    """On the reference, in place of a GPU: all of its tokens, rows and logits, up to the context's end."""
    torch = pytest.importorskip("torch")
    from kernel_worlds import Shape, decoder

    from octavo.kernels.reference import ReferenceBackend
    from octavo.kernels.triton.profile import largest_batch, measure

    backend, shape = ReferenceBackend(), Shape(windows=windows)
    program = backend.program(decoder(backend, shape), shape.layout(), shape.heads)
    for tokens, rows, logits, context in [(40, 8, 12, 50), (8, 8, 8, 3), (30, 1, 30, 20), (41, 8, 8, 5)]:
        most = LargestStep(tokens, rows, logits, context)
        batch = largest_batch(shape.layout(), most)
        assert batch.starts[-1] == len(batch.tokens) == min(tokens, context * rows)
        assert batch.positions.max() == context - 1 and len(batch.starts) == rows + 1
        assert len(batch.logits_at) == min(logits, len(batch.tokens)) == len(set(batch.logits_at.tolist()))
        assert measure(backend, program, shape.layout(), torch.device("cpu"), most) is None


def test_a_gpu_is_sized_twice(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before loading, by the weights to come, so that what can't fit is refused at once; then by what a step took."""
    from octavo.engine import load as loading
    from octavo.kernels.reference import ReferenceBackend
    from octavo.loading import open_model

    checkpoint = open_model(str(tiny_models.folder("llama")))
    config = EngineConfig(kv_dtype="float32", max_batched_tokens=24)
    layout = loading.layout_of(checkpoint, config)
    asked: list[int] = []
    total = 100 * MIB

    def gpu_memory(backend: object, weights: int, swap: int = 0) -> GpuMemory:
        asked.append(weights)
        return GpuMemory("GPU", total, MIB, weights, swap=swap)

    def measured(backend: object, program: object, layout: object, most: LargestStep, coming: GpuMemory) -> GpuMemory:
        return replace(coming, weights=MIB, step=most.tokens * MIB, graphs=3 * MIB)

    monkeypatch.setattr(loading, "on_gpu", lambda backend: True)
    monkeypatch.setattr(loading, "gpu_memory", gpu_memory)
    monkeypatch.setattr(loading, "measured_memory", measured)
    monkeypatch.setattr(loading, "swap_buffers", lambda config, layout: 2 * MIB)
    monkeypatch.setattr(EngineConfig, "max_running", 10**6)
    _, memory = loading.load(checkpoint, config, ReferenceBackend(), layout)
    assert asked == [checkpoint.nbytes]
    assert memory.nbytes <= (90 - 1 - 1 - 24 - 3 - 2) * MIB < memory.nbytes + layout.block_bytes
    total, asked[:] = 1000, []
    with pytest.raises(ConfigError, match="no KV cache fits"):
        loading.load(checkpoint, config, ReferenceBackend(), layout)
    assert asked == [checkpoint.nbytes], "refused before it was loaded"


def test_the_buffers_of_the_swap_are_counted_where_there_is_one() -> None:
    pytest.importorskip("torch")
    assert swap_buffers(EngineConfig(), LAYOUT) == 2 * 64 * MIB
    assert swap_buffers(EngineConfig(swap_memory=0), LAYOUT) == 0
    assert swap_buffers(EngineConfig(preempt="recompute"), LAYOUT) == 0
    large = replace(LAYOUT, block_size=1 << 18)  # 128 MiB
    assert swap_buffers(EngineConfig(swap_memory="1GiB"), large) == 2 * large.block_bytes


def test_memory_that_runs_out_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found, what is needed, what works instead; other errors, and those of the CPU, stay what they are."""
    from octavo.engine import gpu_memory as memory

    def loading(error: Exception, on_gpu: bool) -> None:
        monkeypatch.setattr(memory, "on_gpu", lambda backend: on_gpu)
        monkeypatch.setattr(memory, "gpu_memory", lambda backend, weights: replace(H100, weights=weights))
        with room_for("while its weights were loaded", object(), EngineConfig(), 90 * GIB):  # type: ignore[arg-type]
            raise error

    short = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the documentation")
    with pytest.raises(ConfigError) as raised:
        loading(short, True)
    said = str(raised.value)
    assert "\n" not in said and "Tried" not in said and said.endswith("device cpu works without")
    for words in (
        "H100",
        "out of memory while its weights were loaded",
        "80.0 GiB",
        "need 90.0 GiB",
        "others have 1.0",
    ):
        assert words in said
    for error, on_gpu in ((short, False), (RuntimeError("CUDA error: illegal address"), True)):
        with pytest.raises(RuntimeError, match="CUDA"):
            loading(error, on_gpu)


def test_a_host_tier_that_cant_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from octavo.core.plan import HOST
    from octavo.kernels.triton.backend import TritonBackend

    def empty(*shape: int, **given: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    backend = TritonBackend("cpu")
    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(ConfigError, match=r"host tier of 4.0 GiB can't be had .*out of memory\); .*0, which") as raised:
        backend.store(1 << 20, 4096, HOST)
    assert raised.value.field == "swap_memory" and "\n" not in str(raised.value)


def test_inspect_counts_on_a_gpu(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from octavo.cli import inspect
    from octavo.kernels.triton.device import Gpu

    monkeypatch.setattr(inspect, "choose_device", lambda device, backend: "cuda")
    monkeypatch.setattr(inspect, "usable_gpus", lambda: [Gpu(0, "NVIDIA H100", (9, 0), 79 * GIB, 80 * GIB)])
    assert inspect.run(str(tiny_models.gguf("llama", "Q8_0")), None, {"gpu_memory": 0.1, "max_running": 65536}) == 0
    assert "what 10% of GPU NVIDIA H100, before a step's working memory leaves" in capsys.readouterr().out


def test_memory_is_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have is neither free nor this process's; a step's is the peak above what was there before, once."""
    torch = pytest.importorskip("torch")
    from octavo.engine.gpu_memory import measured_memory
    from octavo.kernels.triton import profile

    own = 16 * GIB  # the weights
    for name, value in {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (70 * GIB - own, 80 * GIB),
        "memory_reserved": lambda: own,
        "max_memory_reserved": lambda: 19 * GIB,
        "reset_peak_memory_stats": lambda: None,
        "get_device_name": lambda: "NVIDIA H100",
    }.items():
        assert hasattr(torch.cuda, name)
        monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value())
    held = profile.memory_of(torch.device("cuda:0"))
    assert held == profile.Held("NVIDIA H100", 80 * GIB, 54 * GIB, 16 * GIB) and held.others == 10 * GIB

    class Empty:
        device = torch.device("cuda:0")

        def store(self, count: int, nbytes: int, tier: int) -> np.ndarray:
            return np.zeros((count, nbytes), np.uint8)

        def reserve(self, most: LargestStep) -> None:
            nonlocal own
            own += GIB  # activations, that stay

        def sample(self, logits: object, batch: object) -> None: ...

        def run(self, batch: object, blocks: object) -> np.ndarray:
            return np.zeros((2, 1 << 22), np.float32)

    some: Any = Empty()
    found = measured_memory(some, some, LAYOUT, LargestStep(4, 2, 2, 8), GpuMemory("GPU", 80 * GIB, 0, 1, swap=5))
    histories = 8 * 8 * 8  # of eight draws over eight tokens
    assert found == GpuMemory("GPU", 80 * GIB, 10 * GIB, 16 * GIB, 3 * GIB + histories, 0, 5)
