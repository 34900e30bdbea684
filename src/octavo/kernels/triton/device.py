"""Which device an engine computes on, and what is wrong with a GPU that it cannot compute on.

torch is imported only where a driver of NVIDIA's is seen: elsewhere starting must not wait for it.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.config import format_size
from octavo.errors import ConfigError

log = logging.getLogger("octavo.device")

CAPABILITY = (8, 0)  # Ampere: the first with bfloat16 and asynchronous copies
LEAST_FREE = 1 << 30  # bytes; less holds no model worth a GPU
INSTALL = "pip install '.[gpu]' in a clone of Octavo"


@dataclass(frozen=True)
class Gpu:
    """A GPU that Octavo can compute on; how much is ``free`` only if it was asked."""

    index: int
    name: str
    capability: tuple[int, int]
    free: int | None
    total: int

    def __str__(self) -> str:
        major, minor = self.capability
        size = format_size(self.total)
        memory = size if self.free is None else f"{format_size(self.free)} of {size} free"
        return f"{self.index}: {self.name}, {memory}, compute capability {major}.{minor}"


class Unusable(Exception):
    """Why a GPU cannot be computed on: what was found and what is needed, without a full stop."""


def choose_device(device: str, backend: str, count: int = 1, own: int = 0) -> str:
    """ "cpu" or "cuda".  Raises ConfigError in one sentence where ``count`` GPUs were asked for and can't be had.

    ``own``: the one of them that this process computes on.

    With "auto" a GPU is taken if all is well with it; if there is a driver but something is amiss, a warning says what.
    """
    if backend in ("cpu", "reference"):
        if device == "cuda":
            raise ConfigError(f"the backend {backend} computes on the CPU: give --device cuda or --backend", "device")
        return "cpu"
    if device == "cpu":
        return "cpu"
    if device == "auto" and not driver_seen():
        return "cpu"
    try:
        gpus = usable_gpus(count, own)
    except Unusable as problem:
        if device == "cuda":
            raise ConfigError(f"device cuda: {problem}; --device cpu works instead", "device") from None
        log.warning("no GPU is used: %s; computing on the CPU", problem)
        return "cpu"
    log.info("computing on %s", "; ".join(f"GPU {gpu}" for gpu in gpus))
    return "cuda"


def interpret() -> None:
    """Let Triton's kernels run on the CPU, in its interpreter: slow, for tests.  Before triton is first imported."""
    if "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # the one way in which Triton is told
    try:
        import triton
    except ImportError as error:
        raise ConfigError(
            f"the backend triton needs triton and torch ({first_line(error)}): {INSTALL}", "backend"
        ) from None
    if not triton.knobs.runtime.interpret:
        raise ConfigError("the backend triton on the CPU needs TRITON_INTERPRET=1 from the start", "backend")


def driver_seen(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver is there, told without torch."""
    if any((root / path).exists() for path in ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def driver_version(root: Path = Path("/")) -> str:
    """Of the kernel's driver, such as 550.54.15; "" where it doesn't tell."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found[1] if found else ""


def usable_gpus(count: int = 1, own: int | None = 0) -> list[Gpu]:
    """The first ``count`` GPUs; raises Unusable unless Octavo can compute on all of them.

    Only ``own``, if any, is asked for its memory: that takes some of it for this process, of no use on the others.
    """
    if not driver_seen():
        raise Unusable("no driver of NVIDIA's is found on this machine, and a GPU with one is needed")
    torch = _torch()
    _check_build(torch)
    try:
        torch.cuda.init()
        found = torch.cuda.device_count()
    except Exception as error:  # torch raises RuntimeError or AssertionError, with the driver's words
        raise Unusable(_mismatch(torch, first_line(error))) from None
    if found < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        raise Unusable(f"torch finds {found} GPUs{limit}, and {count} are needed")
    return [_gpu(torch, index, index == own) for index in range(count)]


def _torch() -> Any:
    found = []
    for name in ("torch", "triton"):
        try:
            found.append(importlib.import_module(name))
        except ImportError as error:
            why = first_line(error)
            raise Unusable(f"{name} cannot be imported ({why}), and the gpu extra is needed: {INSTALL}") from None
    return found[0]


def _check_build(torch: Any) -> None:
    if getattr(torch.version, "hip", None):
        raise Unusable(f"torch {torch.__version__} is built for ROCm, and one built for CUDA is needed")
    if torch.version.cuda is None:
        raise Unusable(
            f"torch {torch.__version__} is built for the CPU alone, and one built for CUDA is needed "
            "(pip install torch, without a CPU index)"
        )


def _mismatch(torch: Any, words: str) -> str:
    version = driver_version()
    driver = f"the driver {version}" if version else "the driver"
    return (
        f"{driver} does not run torch {torch.__version__} built for CUDA {torch.version.cuda} ({words}), and a driver "
        "at least as new as that CUDA, or a torch built for an older one, is needed"
    )


def _gpu(torch: Any, index: int, own: bool = True) -> Gpu:
    found = torch.cuda.get_device_properties(index)  # takes none of its memory
    name, major, minor = found.name, found.major, found.minor
    if (major, minor) < CAPABILITY:
        raise Unusable(
            f"GPU {index}, {name}, has compute capability {major}.{minor}, and "
            f"{CAPABILITY[0]}.{CAPABILITY[1]} (Ampere) or newer is needed"
        )
    built = torch.cuda.get_arch_list()
    if built and not any(_runs(entry, major, minor) for entry in built):
        raise Unusable(
            f"GPU {index}, {name}, has compute capability {major}.{minor}, and torch {torch.__version__} is built for "
            f"{', '.join(built)} only, so a newer torch is needed"
        )
    if not own:
        return Gpu(index, name, (major, minor), None, found.total_memory)
    try:
        free, total = torch.cuda.mem_get_info(index)
    except Exception as error:
        raise Unusable(
            f"GPU {index}, {name}, does not answer ({first_line(error)}), and one that does is needed"
        ) from None
    if free < LEAST_FREE:
        raise Unusable(
            f"GPU {index}, {name}, has {format_size(free)} of {format_size(total)} free, and at least "
            f"{format_size(LEAST_FREE)} is needed"
        )
    return Gpu(index, name, (major, minor), free, total)


def _runs(entry: str, major: int, minor: int) -> bool:
    """Whether code built for ``sm_89`` or ``compute_90`` runs: machine code within a generation, the other on."""
    found = re.match(r"(sm|compute)_(\d+)(\d)", entry)
    if found is None:
        return False
    built = int(found[2]), int(found[3])
    return built <= (major, minor) and (found[1] == "compute" or built[0] == major)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def described() -> str:
    """For people: the GPUs with what drives them, or why there is none."""
    if not driver_seen():
        return "none: no driver of NVIDIA's is found"
    try:
        usable_gpus()
        torch, gpus = _torch(), []
        for index in range(torch.cuda.device_count()):
            try:
                gpus.append(str(_gpu(torch, index)))
            except Unusable as problem:
                gpus.append(f"not usable: {problem}")
        versions = f"torch {torch.__version__} for CUDA {torch.version.cuda}, triton {_version('triton')}"
        return "\n".join([*gpus, f"driver {driver_version() or 'unknown'}, {versions}"])
    except Unusable as problem:
        return f"not usable: {problem}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
