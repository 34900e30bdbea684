"""An engine's settings, checked once; every error names its field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from octavo.core.layout import KV_ITEMSIZE
from octavo.errors import ConfigError

_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12,
          "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip


def parse_size(value: Any, field: str) -> int:
    """Bytes from an integer or a text such as "512MiB", "2GB", "1.5g"; at least 1.  Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(f'{field} must be a number of bytes or a text such as "2GiB", not {value!r}', field)
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if not found or found[2].lower() not in _UNITS:
            raise ConfigError(f'{field} must be a size such as "512MiB" or "2GB", not {value!r}', field)
        value = int(float(found[1]) * _UNITS[found[2].lower()])
    if value < 1:
        raise ConfigError(f"{field} must be above 0, not {value}", field)
    return int(value)


def format_size(size: float) -> str:
    """Bytes for people, in powers of 1,024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up.

    - ``kv_memory``: bytes (or "2GiB") for K and V; ``kv_blocks``: the same as a number of blocks; neither: chosen
      from what the process may use, with head room
    - ``kv_dtype``: float16, float32, bfloat16, or with half of float16's memory int8 (on a CPU) or fp8
      (on a GPU); ``block_size``: token slots a block
    - ``max_batched_tokens``: tokens a step; None: chosen so that a step takes about 0.2 s, and logged
    - ``max_running``: sequences that hold blocks at a time; ``max_context``: most tokens of one sequence
    - ``compute``: "fast" (8-bit activations against quantised weights) or "exact" (float activations)
    - ``threads``: None: the CPUs that the process may use; ``isa``: a kernel build by name, None: the best that runs
    - ``generation_defaults``: whether the model's generation config fills parameters that a request does not give
    - ``policy``: "fcfs", "priority" (lower number first), "shortest" (fewest tokens to go) or "fair" (a share for each
      user, ``user_weights`` maps users to shares other than 1)
    - ``swap_memory``: bytes of host memory for blocks of preempted sequences and of the prefix cache that the pool has
      no room for (0: none; None: a tenth of what the process may use, 1 GiB at most)
    - ``preempt``: "auto" (swap or recompute, by estimated cost), "swap" or "recompute"
    - ``kv_disk``: bytes of disk for prefixes that fall out of memory, which survive a restart; ``kv_disk_path``: where
    - ``speculate``: most tokens that a step drafts by prompt lookup for one sequence, to be verified together (0 or
      None: none); on text that repeats its prompt several come out right at once, on other text nothing is drafted
    - ``device``: "auto" (a GPU if one can be computed on, else the CPU), "cpu" or "cuda"
    - ``gpu_memory``: the share of a GPU's memory that weights, activations and K and V may take together
    - ``gemm``: on a GPU, "fixed" (sums in an order that is a row's own) or "cublas" (faster for some shapes; the same
      request may get other bytes in another batch)
    - ``tensor_parallel``: how many GPUs, or processes on the CPU, share the heads and the weights
    - ``backend``: "auto" (the device's own), "cpu", "triton" or "reference" (NumPy, slow: the definition of right)
    - ``audit``: recount all blocks after each step (slow; for tests)
    """

    kv_memory: int | str | None = None
    kv_blocks: int | None = None
    kv_dtype: str = "float16"
    block_size: int = 16
    max_batched_tokens: int | None = None
    max_running: int = 256
    max_context: int | None = None
    prefix_cache: bool = True
    threads: int | None = None
    compute: str = "fast"
    isa: str | None = None
    generation_defaults: bool = True
    policy: str = "fcfs"
    user_weights: Mapping[str, float] | None = None
    swap_memory: int | str | None = None
    preempt: str = "auto"
    kv_disk: int | str | None = None
    kv_disk_path: str | None = None
    speculate: int | None = None
    device: str = "auto"
    gpu_memory: float = 0.9
    gemm: str = "fixed"
    tensor_parallel: int = 1
    backend: str = "auto"
    audit: bool = False

    def __post_init__(self) -> None:
        self._within("block_size", 1, 4096)
        self._within("max_running", 1, 65536)
        for name, high in (
            ("kv_blocks", 2**31 - 2),
            ("max_batched_tokens", 2**20),
            ("max_context", 2**30),
            ("threads", 1024),
        ):
            if getattr(self, name) is not None:
                self._within(name, 1, high)
        if self.speculate is not None:
            self._within("speculate", 0, 64)
        self._one_of("kv_dtype", tuple(KV_ITEMSIZE))
        self._one_of("compute", ("fast", "exact"))
        self._one_of("device", ("auto", "cpu", "cuda"))
        self._one_of("gemm", ("fixed", "cublas"))
        self._one_of("backend", ("auto", "cpu", "triton", "reference"))
        self._within("tensor_parallel", 1, 64)
        share = self.gpu_memory
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError(f"gpu_memory must be a share above 0 and up to 1, not {share!r}", "gpu_memory")
        self._one_of("policy", ("fcfs", "priority", "shortest", "fair"))
        self._check_weights()
        for name in ("prefix_cache", "generation_defaults", "audit"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be true or false, not {getattr(self, name)!r}", name)
        self._one_of("preempt", ("auto", "swap", "recompute"))
        if self.swap_memory not in (None, 0, "0"):
            object.__setattr__(self, "swap_memory", parse_size(self.swap_memory, "swap_memory"))
        if self.kv_disk is not None:
            object.__setattr__(self, "kv_disk", parse_size(self.kv_disk, "kv_disk"))
            if self.tensor_parallel > 1:
                raise ConfigError("kv_disk keeps the blocks of one process, tensor_parallel has several", "kv_disk")
            if not self.prefix_cache:
                raise ConfigError("kv_disk keeps the prefix cache: it needs prefix_cache", "kv_disk")
        elif self.kv_disk_path is not None:
            raise ConfigError("kv_disk_path is of no use without kv_disk", "kv_disk_path")
        if self.kv_memory is not None:
            if self.kv_blocks is not None:
                raise ConfigError("kv_memory and kv_blocks both set the size of the KV cache: give one", "kv_memory")
            object.__setattr__(self, "kv_memory", parse_size(self.kv_memory, "kv_memory"))

    def _check_weights(self) -> None:
        if self.user_weights is None:
            return
        if self.policy != "fair":
            raise ConfigError('user_weights go with policy="fair"', "user_weights")
        for user, weight in self.user_weights.items():
            if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < 1e9:
                raise ConfigError(f"user_weights: a weight must be above 0, not {weight!r} ({user})", "user_weights")

    def _within(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{name} must be an integer in [{low}, {high}], not {value!r}", name)

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}", name)

    @classmethod
    def of(cls, **settings: Any) -> EngineConfig:
        """Like the constructor, but an unknown setting is a ConfigError that lists the known ones."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise ConfigError(f"{name} is not a setting of the engine; there are {', '.join(known)}", name)
        return cls(**settings)
