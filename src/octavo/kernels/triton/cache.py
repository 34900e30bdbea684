"""The blocks of the device tier as the kernels see them: one array of the cache's type, and where a layer lies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.core.layout import KV_ITEMSIZE, KVLayout
from octavo.errors import ConfigError

STORED = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.uint8,  # bits: see rounding.py
}


def check(layout: KVLayout) -> None:
    """Raises ConfigError for a cache that these kernels don't read."""
    if layout.dtype not in STORED:
        raise ConfigError(
            f"kv_dtype {layout.dtype} is for the CPU; on a GPU there are {', '.join(STORED)} (fp8 is as small)",
            "kv_dtype",
        )


def computed(layout: KVLayout) -> torch.dtype:
    """The type that queries, keys and values are multiplied in."""
    return torch.float16 if layout.dtype == "fp8" else STORED[layout.dtype]


@dataclass(frozen=True)
class Cache:
    """``data`` [pool, items of a block]."""

    layout: KVLayout
    data: torch.Tensor

    @staticmethod
    def of(blocks: torch.Tensor, layout: KVLayout) -> Cache:
        """From uint8 [pool, block_bytes]."""
        return Cache(layout, blocks.view(STORED[layout.dtype]))

    @property
    def fp8(self) -> bool:
        return self.layout.dtype == "fp8"

    @property
    def block_stride(self) -> int:
        return int(self.data.shape[1])

    def offset(self, layer: int) -> int:
        """Items of a block before the K of a layer of the model."""
        lay = self.layout
        return lay.places[layer][1] * (lay.layer_bytes // KV_ITEMSIZE[lay.dtype])
