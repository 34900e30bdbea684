"""What the bytes of every weight type mean: the definition that kernels are tested against.

The block formats are those of ggml (github.com/ggml-org/ggml, ``ggml-common.h``).  A row is a run of blocks; a block
of 32 weights (256 for the K types) has one or two float16 scales and packed small integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.errors import ModelError

Array = np.ndarray

# One block of each type, field after field, as it lies in the file.
BLOCKS: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "Q8_0": np.dtype([("d", "<f2"), ("q", "i1", 32)]),
    "Q4_0": np.dtype([("d", "<f2"), ("q", "u1", 16)]),
    "Q4_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]),
    "Q5_0": np.dtype([("d", "<f2"), ("h", "<u4"), ("q", "u1", 16)]),
    "Q5_1": np.dtype([("d", "<f2"), ("m", "<f2"), ("h", "<u4"), ("q", "u1", 16)]),
    "Q4_K": np.dtype([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("q", "u1", (4, 32))]),
    "Q5_K": np.dtype([("d", "<f2"), ("m", "<f2"), ("s", "u1", 12), ("h", "u1", 32), ("q", "u1", (4, 32))]),
    "Q6_K": np.dtype([("q", "u1", (2, 2, 32)), ("h", "u1", (2, 32)), ("s", "i1", 16), ("d", "<f2")]),
}


def block_weights(type: str) -> int:
    """How many weights one block of a type holds."""
    return 256 if type.endswith("_K") else 32 if type.startswith("Q") else 1


def dequantize(type: str, data: Array, rows: int, cols: int) -> Array:
    """float32 [rows, cols] from the raw bytes (uint8) of a weight of one of the types in ``BLOCKS``.

    Raises ModelError when the type is unknown or the number of bytes isn't what the shape needs.
    """
    if type not in BLOCKS:
        raise ModelError(f"weight type {type} isn't supported; supported are {', '.join(BLOCKS)}")
    per, block = block_weights(type), BLOCKS[type]
    if cols % per or data.nbytes != rows * (cols // per) * block.itemsize:
        raise ModelError(f"a {type} weight of {rows} x {cols} can't have {data.nbytes} bytes")
    blocks = np.ascontiguousarray(data).reshape(-1).view(np.uint8).view(block)
    with np.errstate(invalid="ignore", over="ignore"):  # a file may hold any bits: they become NaN, as in the kernels
        return _UNPACK[type](blocks).reshape(rows, cols)


def bfloat16_to_float32(bits: Array) -> Array:
    """float32 of the same shape from uint16 bits: a bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """uint16 bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (upper & np.uint32(1))) >> np.uint64(16)
    quiet = upper | np.uint32(0x40)  # adding to a NaN's bits could make it an infinity
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def _column(field: Array) -> Array:
    return field.astype(np.float32)[:, None]


def _scaled(b: Array, q: Array, less: int = 0) -> Array:
    """d * (q - less) for the integers [n, 32] of each block."""
    values: Array = _column(b["d"]) * (q.astype(np.float32) - less)
    return values


def _nibbles(q: Array) -> Array:
    """[n, 32] from [n, 16] bytes: low halves are weights 0..15, high halves 16..31."""
    return np.concatenate([q & 0x0F, q >> 4], axis=1)


def _fifth_bits(h: Array) -> Array:
    """[n, 32], 0 or 16, from [n] uint32: bit i belongs to weight i."""
    return ((h[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def _q8_0(b: Array) -> Array:
    return _scaled(b, b["q"])


def _q4_0(b: Array) -> Array:
    return _scaled(b, _nibbles(b["q"]), less=8)


def _q4_1(b: Array) -> Array:
    values: Array = _scaled(b, _nibbles(b["q"])) + _column(b["m"])
    return values


def _q5_0(b: Array) -> Array:
    return _scaled(b, _nibbles(b["q"]) | _fifth_bits(b["h"]), less=16)


def _q5_1(b: Array) -> Array:
    values: Array = _scaled(b, _nibbles(b["q"]) | _fifth_bits(b["h"])) + _column(b["m"])
    return values


def _six_bit_pairs(s: Array) -> tuple[Array, Array]:
    """Scales and minimums, each uint8 [n, 8] of 6 bits, from 12 bytes.

    Bytes 0..3 hold scales 0..3 in their low 6 bits, bytes 4..7 minimums 0..3.  Bytes 8..11 hold the low 4 bits of
    scales 4..7 (low halves) and of minimums 4..7 (high halves); their upper 2 bits are on top of bytes 0..7.
    """
    a, b, c = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([a & 0x3F, (c & 0x0F) | (a >> 6 << 4)], axis=1)
    minimums = np.concatenate([b & 0x3F, (c >> 4) | (b >> 6 << 4)], axis=1)
    return scales, minimums


def _scale_and_shift(b: Array, q: Array) -> Array:
    """[n, 256] from the integers [n, 8, 32] of a Q4_K or Q5_K block: scale * q - minimum, per 32 weights."""
    scales, minimums = _six_bit_pairs(b["s"])
    scale = (_column(b["d"]) * scales.astype(np.float32))[:, :, None]
    shift = (_column(b["m"]) * minimums.astype(np.float32))[:, :, None]
    values: Array = scale * q.astype(np.float32) - shift
    return values.reshape(len(b), 256)


def _q4_k(b: Array) -> Array:
    return _scale_and_shift(b, _halves(b["q"]))


def _q5_k(b: Array) -> Array:
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # bit j of byte i belongs to weight 32 j + i
    high = ((b["h"][:, None, :] >> shifts) & 1) << 4
    return _scale_and_shift(b, _halves(b["q"]) | high)


def _halves(q: Array) -> Array:
    """[n, 8, 32] from [n, 4, 32] bytes: low halves are sub-block 2 j, high halves 2 j + 1."""
    return np.stack([q & 0x0F, q >> 4], axis=2).reshape(len(q), 8, 32)


def _q6_k(b: Array) -> Array:
    # Each half of 128 weights: 64 bytes of low nibbles (low halves first), 32 bytes with the upper two bits of four.
    low = np.stack([b["q"] & 0x0F, b["q"] >> 4], axis=2).reshape(len(b), 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = ((b["h"][:, :, None, :] >> shifts) & 3) << 4
    q = (low | high).astype(np.float32).reshape(len(b), 16, 16) - 32
    scale = _column(b["d"]) * b["s"].astype(np.float32)  # one per 16 weights
    values: Array = scale[:, :, None] * q
    return values.reshape(len(b), 256)


_UNPACK: dict[str, Callable[[Array], Array]] = {
    "F32": lambda b: b.astype(np.float32),
    "F16": lambda b: b.astype(np.float32),
    "BF16": bfloat16_to_float32,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
