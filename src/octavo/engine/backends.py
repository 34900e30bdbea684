"""Which kernels compute, by the settings and by what this machine has."""

from __future__ import annotations

import logging
from dataclasses import replace

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kernels.backend import Backend
from octavo.kernels.triton.device import choose_device, interpret

log = logging.getLogger("octavo.engine")


def settled(config: EngineConfig, rank: int = 0) -> EngineConfig:
    """The settings with device and backend chosen.  Raises ConfigError for those that can't be had together."""
    device = choose_device(config.device, config.backend, config.tensor_parallel, rank)
    name = ("triton" if device == "cuda" else "cpu") if config.backend == "auto" else config.backend
    if name != "triton":
        if config.kv_dtype == "fp8":
            raise ConfigError("kv_dtype fp8 is for a GPU; on the CPU int8 takes as little memory", "kv_dtype")
        if config.gemm != "fixed":
            raise ConfigError(f"gemm {config.gemm} is for a GPU; on the CPU sums have a fixed order anyway", "gemm")
    if name == "cpu" and config.tensor_parallel > 1:
        raise ConfigError(
            f"tensor_parallel {config.tensor_parallel} is for GPUs, and the CPU computes here: its kernels share the "
            "work between threads in one process",
            "tensor_parallel",
        )
    return replace(config, device=device, backend=name)


def without_effect(config: EngineConfig) -> list[str]:
    """Settings, of those that :func:`settled` has left, that do nothing for what computes here.

    They only tune, so that a command may go from one machine to another; those that would change answers are refused.
    """
    found = []
    if config.backend != "cpu":
        if config.threads is not None:
            found.append(f"threads {config.threads} is for the CPU's kernels")
        if config.isa is not None:
            found.append(f"isa {config.isa} is for the CPU's kernels")
        if config.compute != "fast":
            found.append(f"compute {config.compute} is for the CPU's kernels (elsewhere activations are floats anyway)")
    if config.device != "cuda" and config.gpu_memory != EngineConfig.gpu_memory:
        found.append(f"gpu_memory {config.gpu_memory:g} is for a GPU")
    return found


def make_backend(config: EngineConfig, rank: int = 0) -> Backend:
    """The kernels that the settings name, on the GPU of a rank; raises ConfigError for a device that can't be had.

    Only what is chosen is imported: torch takes a second, and need not be installed.
    """
    config = settled(config, rank)
    if rank == 0:
        for idle in without_effect(config):
            log.warning("%s, and has no effect here", idle)
    if config.backend == "triton":
        return _triton(config, rank)
    if config.backend == "reference":
        from octavo.kernels.reference import ReferenceBackend

        return ReferenceBackend()
    from octavo.kernels.cpu import CpuBackend

    return CpuBackend(threads=config.threads, compute=config.compute, isa=config.isa)


def _triton(config: EngineConfig, rank: int) -> Backend:
    if config.gemm == "cublas" and rank == 0:
        log.warning("gemm cublas: the same request may get other bytes in another batch")
    if config.device == "cpu":
        interpret()
    from octavo.kernels.triton.backend import TritonBackend

    return TritonBackend(f"cuda:{rank}" if config.device == "cuda" else "cpu", gemm=config.gemm)
