"""How the ranks of a tensor-parallel engine exchange arrays: torch.distributed, NCCL between GPUs, gloo on the CPU."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from octavo.errors import ConfigError


class ProcessGroup:
    """This process's place among the ranks.

    Owns: torch.distributed's default group of this process.

    Promises: what comes back is the ranks' columns, unchanged and in the order of ranks; an exchange that another rank
    does not take part in raises within the timeout.  With NCCL it ends when it is aborted, which
    :class:`octavo.execute.team.Team` sees to: NCCL's own way of not waiting would end this process without a word.
    """

    def __init__(self, rank: int, size: int, folder: Path, device: Any, timeout: float) -> None:
        """Meets the others by a file in ``folder``; ``device``: where exchanged tensors lie, None for NumPy arrays."""
        if dist.is_initialized():
            raise ConfigError("tensor_parallel: this process is part of a torch.distributed group", "tensor_parallel")
        self.rank, self.size = rank, size
        on_gpu = device is not None and device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(device)
        store = dist.FileStore(str(folder / "store"), size)
        with _set("GLOO_SOCKET_IFNAME", _loopback()), _set("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"), _undisturbed():
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
                **({"device_id": device} if on_gpu else {}),
            )

    def gather(self, part: Any, widths: Sequence[int]) -> Any:
        if not len(part):
            return self._like(part, torch.zeros(0, sum(widths), dtype=_tensor(part).dtype, device=_tensor(part).device))
        own = self._padded(part, max(widths))
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return self._like(part, _beside(parts, widths))

    def select(self, part: Any, owner: np.ndarray) -> Any:
        own = _tensor(part).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        whose = torch.from_numpy(owner).to(own.device)
        return self._like(part, torch.stack(parts)[whose, torch.arange(len(own), device=own.device)])

    def collect(self, part: Any, widths: Sequence[int]) -> Any:
        if self.rank:
            if len(part):
                dist.gather(self._padded(part, max(widths)), dst=0)
            return part
        if not len(part):
            return self.gather(part, widths)
        own = self._padded(part, max(widths))
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.gather(own, parts, dst=0)
        return self._like(part, _beside(parts, widths))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """End an exchange that this process waits in, from another thread: NCCL does not see that a rank is gone."""
        end = getattr(dist.distributed_c10d, "_abort_process_group", None)
        if end is not None and dist.is_initialized() and dist.get_backend() == "nccl":
            end()

    def _padded(self, part: Any, width: int) -> torch.Tensor:
        """All ranks' tensors have one shape: up to a column more than some have."""
        own = _tensor(part)
        if own.shape[1] == width:
            return own.contiguous()
        return torch.nn.functional.pad(own, (0, width - own.shape[1]))

    def _like(self, part: Any, whole: torch.Tensor) -> Any:
        return whole.numpy() if isinstance(part, np.ndarray) else whole


def _tensor(part: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(part)) if isinstance(part, np.ndarray) else part


def _beside(parts: Sequence[torch.Tensor], widths: Sequence[int]) -> torch.Tensor:
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Threads that begin in here get no signals: one that came in the middle of gloo's reading would end the group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _set(name: str, value: str | None) -> Iterator[None]:
    """An environment variable for the time of joining, when torch reads it, unless the user has set it."""
    if value is None or name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def _loopback() -> str | None:
    """All ranks are on this machine: gloo is to listen where nobody else can connect."""
    return "lo" if "lo" in [name for _, name in socket.if_nameindex()] else None
