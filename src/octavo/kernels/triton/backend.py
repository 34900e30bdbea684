"""The GPU backend: torch tensors and Triton kernels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

from octavo.config import format_size
from octavo.core.layout import KVLayout
from octavo.core.plan import DEVICE
from octavo.errors import ConfigError
from octavo.kernels.backend import Later, Ops, SampleBatch, Sampled
from octavo.kernels.triton import interpreter, move, weights
from octavo.kernels.triton import sample as sampling
from octavo.kernels.triton.device import first_line
from octavo.kernels.triton.inputs import Drawn
from octavo.kernels.triton.program import TritonProgram
from octavo.kernels.triton.swap import Swap

Array = np.ndarray


class TritonBackend:
    """Triton kernels on one GPU; on the CPU where they are interpreted.

    Owns: the streams that kernels and swaps run in, and the tokens drawn last.

    Promises: an output row has the same bits whatever rows run with it, unless ``gemm`` is "cublas".
    """

    recalls = True

    def __init__(self, device: str | None = None, gemm: str = "fixed") -> None:
        if gemm not in ("fixed", "cublas"):
            raise ValueError(f"gemm is fixed or cublas, not {gemm}")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        if self.device.index is not None:  # launches, pinned memory and streams go by the current device
            torch.cuda.set_device(self.device)
        self.gemm = gemm
        interpreter.repair()
        self.asynchronous = self.device.type == "cuda"
        self.drawn = Drawn()
        self.swap = Swap(self.device)
        self._hosts: set[int] = set()  # where stores of the host tier begin
        self.name = f"triton-{self._architecture()}"

    def _architecture(self) -> str:
        if self.device.type == "cpu":
            return "interpreted"
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"sm_{major}{minor}"

    @cached_property
    def gpu(self) -> str | None:
        """What computes, for people; of two GPUs of one capability the answers are the same, unless by cuBLAS."""
        if self.device.type == "cpu":
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        return f"{torch.cuda.get_device_name(self.device)}, compute capability {major}.{minor}"

    @cached_property
    def build(self) -> str:
        """A hash of the kernels' source and of what compiles and runs it."""
        state = hashlib.blake2b(digest_size=16)
        for path in sorted(Path(__file__).parent.glob("*.py")):
            state.update(path.read_bytes())
        state.update(f"{triton.__version__} {torch.__version__}".encode())
        return state.hexdigest()

    def matrix(
        self, type: str, data: Array, rows: int, cols: int, read: Callable[[int], None] | None = None
    ) -> weights.Weight:
        return weights.pack(type, data, rows, cols, self.device, read)

    def vector(self, data: Array) -> Tensor:
        return torch.from_numpy(np.array(data, dtype=np.float32)).to(self.device)

    def program(self, build: Callable[[Ops], None], layout: KVLayout, heads: int) -> TritonProgram:
        return TritonProgram(build, layout, heads, self.device, library=self.gemm == "cublas", drawn=self.drawn)

    def store(self, count: int, nbytes: int, tier: int) -> Tensor:
        """On the device, or in pinned host memory, which the device reads and writes too.

        Raises ConfigError if so much of the host's memory can't be pinned.
        """
        if tier == DEVICE:
            return torch.empty(count, nbytes, dtype=torch.uint8, device=self.device)
        try:
            host = torch.empty(count, nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        except RuntimeError as error:
            raise ConfigError(
                f"a host tier of {format_size(count * nbytes)} can't be had in memory that the GPU reads "
                f"({first_line(error)}); a smaller swap_memory works, or 0, which is none",
                "swap_memory",
            ) from error
        self._hosts.add(host.data_ptr())
        return host

    def block(self, blocks: Tensor, slot: int) -> Array:
        self.swap.finish()
        row: Array = blocks[slot].cpu().numpy()  # of a host store the very memory
        return row

    def move(self, source: Tensor, target: Tensor, pairs: Array) -> None:
        if source is target:
            move.move(source, pairs, self.device)
        elif source.data_ptr() in self._hosts:
            self.swap.into(source, target, pairs)
        else:
            self.swap.out(source, target, pairs)

    def sample(self, logits: Tensor, batch: SampleBatch) -> Sampled:
        return self.draw(logits, batch)()

    def draw(self, logits: Tensor, batch: SampleBatch) -> Later:
        later, self.drawn.tokens = sampling.begin(logits, batch)
        return later

    def lost(self) -> str | None:
        """A failed assertion or a bad address in a kernel makes every later call fail, in this process."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception as error:
                return f"the GPU has failed for good ({first_line(error)}): only a new process can use it again"
        return None

    def score(self, logits: Tensor, targets: Array, top: int) -> Sampled:
        return sampling.score(logits, targets, top)
