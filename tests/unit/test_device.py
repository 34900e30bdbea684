"""Which device is computed on, and what is said of GPUs that cannot be; torch.cuda is faked."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.backends import make_backend, without_effect
from octavo.errors import ConfigError
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.triton import device

GIB = 1 << 30


class FakeCuda:
    """One H100 that is well, unless told otherwise."""

    def __init__(self, **amiss: Any) -> None:
        self.count = amiss.get("count", 1)
        self.capability = amiss.get("capability", (9, 0))
        self.free = amiss.get("free", 70 * GIB)
        self.error = amiss.get("error")
        self.silent = amiss.get("silent")
        self.asked: list[int] = []
        self.built = amiss.get("built", ["sm_80", "sm_86", "sm_90"])

    def init(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def device_count(self) -> int:
        return int(self.count)

    def get_device_properties(self, index: int) -> Any:
        major, minor = self.capability
        return SimpleNamespace(name="NVIDIA H100", major=major, minor=minor, total_memory=80 * GIB)

    def get_arch_list(self) -> list[str]:
        return list(self.built)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        if self.silent:
            raise RuntimeError(self.silent)
        self.asked.append(index)
        return self.free, 80 * GIB


def faked(monkeypatch: pytest.MonkeyPatch, cuda: str | None = "12.8", hip: str | None = None, **amiss: Any) -> None:
    torch = SimpleNamespace(
        __version__="2.9.0", version=SimpleNamespace(cuda=cuda, hip=hip), cuda=FakeCuda(**amiss), spec=None
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    monkeypatch.setattr(device, "driver_seen", lambda root=Path("/"): True)
    monkeypatch.setattr(device, "driver_version", lambda root=Path("/"): "470.57.02")


def test_a_gpu_that_is_well_is_taken(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    faked(monkeypatch)
    with caplog.at_level(logging.INFO, "octavo"):
        assert device.choose_device("auto", "auto") == "cuda"
    assert "NVIDIA H100" in caplog.text and "9.0" in caplog.text
    assert device.choose_device("cuda", "auto") == "cuda"
    assert device.choose_device("cpu", "auto") == "cpu"
    assert device.choose_device("auto", "cpu") == device.choose_device("auto", "reference") == "cpu"


AMISS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "torch for the CPU": ({"cuda": None}, ("torch 2.9.0", "CPU alone", "built for CUDA")),
    "torch for ROCm": ({"cuda": None, "hip": "6.2"}, ("ROCm", "CUDA")),
    "too old a driver": (
        {"error": "The NVIDIA driver on your system is too old (found version 11040).\nPlease update"},
        ("470.57.02", "CUDA 12.8", "found version 11040", "needed"),
    ),
    "another driver than libcuda": (
        {"error": "Error 803: system has unsupported display driver / cuda driver combination"},
        ("803", "470.57.02", "needed"),
    ),
    "no GPU behind the driver": ({"count": 0}, ("finds 0 GPUs", "1 are needed")),
    "too old a GPU": ({"capability": (7, 5)}, ("NVIDIA H100", "7.5", "8.0")),
    "too new a GPU for torch": ({"capability": (12, 0)}, ("12.0", "sm_90", "newer torch")),
    "too little memory": ({"free": GIB // 2}, ("512.0 MiB of 80.0 GiB", "1.0 GiB is needed")),
    "a GPU that does not answer": ({"silent": "unknown error"}, ("unknown error", "needed")),
}


@pytest.mark.parametrize("name", AMISS)
def test_what_is_amiss_is_said_in_one_sentence(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was found, what is needed and what works instead; on auto it is a warning, and the CPU computes."""
    amiss, words = AMISS[name]
    faked(monkeypatch, **amiss)
    with pytest.raises(ConfigError) as raised:
        device.choose_device("cuda", "auto")
    said = str(raised.value)
    assert raised.value.field == "device" and "\n" not in said and said.endswith("--device cpu works instead")
    for word in words:
        assert word in said
    with caplog.at_level(logging.WARNING, "octavo"):
        assert device.choose_device("auto", "auto") == "cpu"
    assert words[0] in caplog.text and "CPU" in caplog.text
    assert words[0] in device.described()


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_driver_without_the_gpu_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"{package} cannot be imported .*\[gpu\].*--device cpu works instead"):
        device.choose_device("cuda", "auto")
    assert device.choose_device("auto", "auto") == "cpu"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "driver_seen", lambda root=Path("/"): False)
    with pytest.raises(ConfigError, match="no driver of NVIDIA's is found .* --device cpu works instead"):
        make_backend(EngineConfig(device="cuda"))
    assert device.choose_device("auto", "auto") == "cpu"
    assert device.described().startswith("none")


def test_too_few_gpus_for_the_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    faked(monkeypatch, count=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(ConfigError, match="finds 2 GPUs .*CUDA_VISIBLE_DEVICES.* 4 are needed"):
        device.choose_device("cuda", "auto", 4)
    assert device.choose_device("cuda", "auto", 2) == "cuda"


def test_a_rank_touches_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for a GPU's memory takes some of it for the process that asks."""
    faked(monkeypatch, count=4)
    gpus = device.usable_gpus(4, own=2)
    assert [gpu.free is None for gpu in gpus] == [True, True, False, True]
    assert sys.modules["torch"].cuda.asked == [2] and str(gpus[0]) == "0: NVIDIA H100, 80.0 GiB, compute capability 9.0"


def test_code_for_newer_gpus_is_not_run_on_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine code runs within its generation, portable code on all later ones."""
    for built, capability, runs in [
        (["sm_80"], (8, 9), True),
        (["sm_89"], (8, 6), False),
        (["sm_90"], (12, 0), False),
        (["sm_90", "compute_90"], (12, 0), True),
        ([], (12, 0), True),
    ]:
        faked(monkeypatch, built=built, capability=capability)
        assert device.choose_device("auto", "auto") == ("cuda" if runs else "cpu"), built


def test_the_driver_is_seen_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert not device.driver_seen(tmp_path) and device.driver_version(tmp_path) == ""
    told = tmp_path / "proc/driver/nvidia/version"
    told.parent.mkdir(parents=True)
    told.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n")
    assert device.driver_seen(tmp_path) and device.driver_version(tmp_path) == "550.54.15"
    told.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n")
    assert device.driver_version(tmp_path) == "535.54.03"


def test_settings_of_a_gpu_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for field, value in [
        ("device", "gpu"),
        ("gemm", "fast"),
        ("gpu_memory", 0.0),
        ("gpu_memory", 1.1),
        ("gpu_memory", "most"),
        ("tensor_parallel", 0),
        ("backend", "rocm"),
    ]:
        with pytest.raises(ConfigError) as raised:
            EngineConfig.of(**{field: value})
        assert raised.value.field == field
    with pytest.raises(ConfigError, match="computes on the CPU"):
        make_backend(EngineConfig(device="cuda", backend="reference"))
    with pytest.raises(ConfigError, match="gemm cublas is for a GPU"):
        make_backend(EngineConfig(device="cpu", gemm="cublas"))
    for backend in ("auto", "reference"):
        with pytest.raises(ConfigError, match="fp8 is for a GPU; on the CPU int8"):
            make_backend(EngineConfig(device="cpu", kv_dtype="fp8", backend=backend))
    assert isinstance(make_backend(EngineConfig(backend="reference")), ReferenceBackend)


def test_settings_without_effect_are_said(caplog: pytest.LogCaptureFixture) -> None:
    given = {"threads": 3, "isa": "avx512", "compute": "exact", "gpu_memory": 0.5}
    on_gpu = without_effect(EngineConfig(**given, device="cuda", backend="triton"))
    assert [said.split()[:2] for said in on_gpu] == [["threads", "3"], ["isa", "avx512"], ["compute", "exact"]]
    on_cpu = without_effect(EngineConfig(**{**given, "isa": None}, device="cpu", backend="cpu"))
    assert on_cpu == ["gpu_memory 0.5 is for a GPU"]
    with caplog.at_level(logging.WARNING, "octavo"):
        make_backend(EngineConfig(backend="reference", threads=3))
    assert caplog.text.count("threads 3 is for the CPU's kernels, and has no effect here") == 1


def test_on_a_machine_without_a_driver_torch_is_not_imported() -> None:
    """Starting must not wait for it."""
    code = (
        "import sys; from octavo.config import EngineConfig; from octavo.engine.build import make_backend\n"
        "from octavo.kernels.triton import device; device.driver_seen = lambda root=None: False\n"
        "make_backend(EngineConfig(threads=1)); sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
