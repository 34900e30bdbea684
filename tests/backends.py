"""The backends that this machine can run, by name: the reference, and the CPU kernels of each instruction set."""

from __future__ import annotations

from octavo.kernels.backend import Backend
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import ReferenceBackend
from octavo.kernels.select import load_kernels

# What the machine runs, whether it was built or not: a module that is missing fails its tests.
NATIVE: list[str] = load_kernels("scalar").runnable_isas()


def exact(name: str) -> Backend:
    """A backend on its exact path."""
    return ReferenceBackend() if name == "reference" else CpuBackend(threads=1, compute="exact", isa=name)


def fast(name: str) -> Backend:
    """CPU kernels on the fast path, which rounds activations to 8 bits where weights are quantised."""
    return CpuBackend(threads=1, compute="fast", isa=name)
