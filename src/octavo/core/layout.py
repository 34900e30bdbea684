"""How the key-value cache of a model is laid out in blocks: plain data, no bytes.

A *block* (also: page) holds ``block_size`` token slots for ``layers_per_block`` layers.  Layers that see the same
window are cut into *groups* of that many layers, and every group draws blocks from the one pool, so all blocks are
equal.  Inside a block the order is layer, then K and V, then head::

    block = [ layer 0: K [kv_heads][head_dim][block_size], V [kv_heads][block_size][head_dim] ]
            [ layer 1: K ...                                V ...                              ]
            ...

K is kept transposed (slots innermost), so that scores are computed with slots in the lanes of a vector and no
horizontal sum; V has the head dimension innermost for the same reason.

With ``int8`` a layer is::

    K [kv_heads][head_dim / 2][block_size][2], V [kv_heads][block_size][head_dim]
    scales [kv_heads][key_groups, then 1 for V][block_size], bfloat16

Each token and head has a scale for V and one for every 32 dimensions of K, of which a few may be far larger than all
others.  Pairs of K's dimensions lie together, as scores are then sums of integer products, two at a time.

``fp8`` (e4m3, no scales) is for GPUs, and int8 for CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from octavo.errors import ConfigError

KV_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1}
KEY_GROUP = 32  # dimensions of an int8 key that share a scale
SCALE_ITEMSIZE = 2


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one block table: their window (``None``: full attention) and their numbers in the model."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True)
class KVLayout:
    """Shape of every block and the groups that draw from the pool."""

    block_size: int
    kv_heads: int
    head_dim: int
    dtype: str
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        if self.dtype == "int8" and self.head_dim % 2:
            raise ConfigError(f"kv_dtype int8 needs an even head_dim, this model's is {self.head_dim}", "kv_dtype")

    @property
    def layers_per_block(self) -> int:
        return max(len(g.layers) for g in self.groups)

    @property
    def plane_items(self) -> int:
        """Items of K (or V) of one layer in one block."""
        return self.kv_heads * self.head_dim * self.block_size

    @property
    def plane_bytes(self) -> int:
        return self.plane_items * KV_ITEMSIZE[self.dtype]

    @property
    def key_groups(self) -> int:
        """Scales of one token and head of K."""
        return -(-self.head_dim // KEY_GROUP) if self.dtype == "int8" else 0

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of one layer in one block."""
        return self.kv_heads * (self.key_groups + 1) * self.block_size * SCALE_ITEMSIZE if self.key_groups else 0

    @property
    def layer_bytes(self) -> int:
        return 2 * self.plane_bytes + self.scale_bytes

    @property
    def block_bytes(self) -> int:
        return self.layers_per_block * self.layer_bytes

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Model layer -> (group, position of the layer inside that group's blocks)."""
        return {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}

    @property
    def windows(self) -> tuple[int | None, ...]:
        return tuple(g.window for g in self.groups)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token slot takes over all groups, while no window has slid past it."""
        return len(self.groups) * self.block_bytes / self.block_size


def group_layers(windows: tuple[int | None, ...]) -> tuple[LayerGroup, ...]:
    """Cut a model's layers, given each one's window, into groups of equal layer count.

    The group size is the greatest common divisor of the number of layers of each window, unless that would make many
    thin groups; then the smallest class sets it and the last group of a class may be padded.
    """
    classes: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        classes.setdefault(window, []).append(layer)
    counts = [len(v) for v in classes.values()]
    size = gcd(*counts)
    if size * 2 < min(counts):  # e.g. 4 and 29 layers: padding one block of four wastes less than 33 groups of one
        size = min(counts)
    return tuple(
        LayerGroup(window, tuple(layers[i : i + size]))
        for window, layers in classes.items()
        for i in range(0, len(layers), size)
    )
