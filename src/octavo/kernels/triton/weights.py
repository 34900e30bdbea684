"""Weights on the device: 16 bits or 32 bits as they are, or GGUF's small integers, packed anew for the kernels.

All of GGUF's block types are one form here.  A row's weights come in groups of 32 (Q6_K: 16); with n a row, k a
column, g = k // group and s = k // span (a block of the file)::

    weight[n, k] = scale[s, n] * part[g, n] * integer[n, k] - shift[s, n] * part_shift[g, n]

``scale`` and ``shift`` are float16 as in the file, the parts 8-bit integers; types without one of them leave it out.
Integers of 4 bits are two a byte (the low half is the group's first 16 columns), others have a byte each.  They lie
[k // group][n][k % group], and the scales [.][n], so that the rows that one program multiplies lie together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from octavo.errors import ModelError
from octavo.kernels.dequant import BLOCKS, block_weights

Array = np.ndarray

PLAIN = {"F32": (torch.float32, np.int32), "F16": (torch.float16, np.int16), "BF16": (torch.bfloat16, np.int16)}
ROWS = 8192  # rows of the file that are packed at a time, which bounds the memory for it


@dataclass(frozen=True, eq=False)
class Matrix:
    """Weights of 16 or 32 bits, [rows, cols]."""

    rows: int
    cols: int
    data: torch.Tensor

    @property
    def input(self) -> torch.dtype:
        """The type that activations are rounded to before they are multiplied."""
        return self.data.dtype

    @property
    def form(self) -> tuple[object, ...]:
        """Matrices of one form can be parts of one product."""
        return self.cols, self.data.dtype


@dataclass(frozen=True, eq=False)
class Grouped:
    """Small integers with scales, as the head of this file describes them; 0 bits too many are stored for none."""

    rows: int
    cols: int
    bits: int
    group: int
    span: int
    offset: int  # what is subtracted from the stored integer
    data: torch.Tensor
    scale: torch.Tensor
    part: torch.Tensor | None
    shift: torch.Tensor | None
    part_shift: torch.Tensor | None

    @property
    def input(self) -> torch.dtype:
        return torch.bfloat16

    @property
    def form(self) -> tuple[object, ...]:
        has = tuple(x is None for x in (self.part, self.shift, self.part_shift))
        return self.cols, self.bits, self.group, self.span, self.offset, *has


Weight = Matrix | Grouped


def pack(
    type: str, data: Array, rows: int, cols: int, device: torch.device, read: Callable[[int], None] | None = None
) -> Weight:
    """A weight of one of ``loading.tensor.TYPES`` from its raw bytes; ``read`` hears which bytes are done with.

    Raises ModelError for an unknown type, or a number of bytes that isn't what the shape needs.
    """
    if type not in BLOCKS:
        raise ModelError(f"weight type {type} isn't supported; supported are {', '.join(BLOCKS)}")
    per, block = block_weights(type), BLOCKS[type]
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    if cols % per or raw.nbytes != rows * (cols // per) * block.itemsize:
        raise ModelError(f"a {type} weight of {rows} x {cols} can't have {raw.nbytes} bytes")
    pieces = raw.view(block).reshape(rows, cols // per)
    return _plain(type, pieces, device, read) if type in PLAIN else _grouped(type, pieces, device, read)


def _plain(type: str, values: Array, device: torch.device, read: Callable[[int], None] | None) -> Matrix:
    dtype, bits = PLAIN[type]
    out = torch.empty(values.shape, dtype=dtype, device=device)
    whole = out.view(torch.int32 if bits is np.int32 else torch.int16)
    for first in range(0, len(values), ROWS):
        piece = values[first : first + ROWS]
        whole[first : first + len(piece)].copy_(torch.from_numpy(piece.view(bits).copy()))
        _done(read, values, first + len(piece))
    rows, cols = values.shape
    return Matrix(rows, cols, out)


def _grouped(type: str, blocks: Array, device: torch.device, read: Callable[[int], None] | None) -> Grouped:
    form = FORMS[type]
    rows, count = blocks.shape
    span = block_weights(type)
    groups = count * span // form.group
    quants = torch.empty(groups, rows, form.group * form.bits // 8, dtype=torch.uint8, device=device)

    def parts(there: bool, n: int, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.empty(n, rows, dtype=dtype, device=device) if there else None

    scale = torch.empty(count, rows, dtype=torch.float16, device=device)
    shift = parts(form.shift is not None, count, torch.float16)
    part = parts(form.parts is not None, groups, torch.int8)
    part_shift = parts(form.parts is not None and form.shift is not None, groups, torch.int8)
    for first in range(0, rows, ROWS):
        piece = blocks[first : first + ROWS]
        inside = slice(first, first + len(piece))
        flat = piece.reshape(-1)

        def put(target: torch.Tensor | None, values: Array, inside: slice = inside) -> None:
            if target is not None:  # [rows, ...] becomes [..., rows]
                turned = np.ascontiguousarray(
                    values.reshape(inside.stop - inside.start, len(target), -1).swapaxes(0, 1)
                )
                target[:, inside].copy_(torch.from_numpy(turned).view(target.dtype).reshape(target[:, inside].shape))

        put(quants, form.integers(flat))
        put(scale, flat["d"])
        if form.shift is not None:
            put(shift, form.shift(flat))
        if form.parts is not None:
            scales, shifts = form.parts(flat)
            put(part, scales)
            put(part_shift, shifts)
        _done(read, blocks, first + len(piece))
    cols = count * span
    return Grouped(rows, cols, form.bits, form.group, span, form.offset, quants, scale, part, shift, part_shift)


def _done(read: Callable[[int], None] | None, pieces: Array, rows: int) -> None:
    if read is not None:
        read(rows * pieces.shape[1] * pieces.itemsize)


# ---- GGUF's blocks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """How a block type becomes the common form: functions from blocks [n] to arrays [n, ...]."""

    bits: int
    integers: Callable[[Array], Array]  # uint8, in the order of columns; of 4 bits, two a byte
    offset: int = 0
    group: int = 32
    shift: Callable[[Array], Array] | None = None
    parts: Callable[[Array], tuple[Array, Array]] | None = None


def _halves(q: Array) -> Array:
    """uint8 [n, 32] from [n, 16] bytes: low halves are columns 0..15, high halves 16..31."""
    return np.concatenate([q & 0x0F, q >> 4], axis=1)


def _with_fifth(b: Array) -> Array:
    high = ((b["h"][:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4
    return np.asarray(_halves(b["q"]) | high)


def _repaired(q: Array) -> Array:
    """uint8 [n, 8, 16], columns j and j + 16 a byte, from [n, 4, 32] bytes that hold columns j and j + 32."""
    low, high = q & 0x0F, q >> 4
    groups = np.stack([low, high], axis=2).reshape(len(q), 8, 32)
    return np.asarray(groups[..., :16] | (groups[..., 16:] << 4))


def _q5_k(b: Array) -> Array:
    groups = np.stack([b["q"] & 0x0F, b["q"] >> 4], axis=2).reshape(len(b), 8, 32)
    high = ((b["h"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1) << 4
    return np.asarray(groups | high)


def _q6_k(b: Array) -> Array:
    low = np.stack([b["q"] & 0x0F, b["q"] >> 4], axis=2).reshape(len(b), 2, 4, 32)
    high = ((b["h"][:, :, None, :] >> np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]) & 3) << 4
    return np.asarray(low | high)


def _six_bits(b: Array) -> tuple[Array, Array]:
    """Scales and minimums, uint8 [n, 8], of a Q4_K or Q5_K block (dequant.py says how they are packed)."""
    s = b["s"]
    low, high, both = s[:, 0:4], s[:, 4:8], s[:, 8:12]
    scales = np.concatenate([low & 0x3F, (both & 0x0F) | (low >> 6 << 4)], axis=1)
    return scales, np.concatenate([high & 0x3F, (both >> 4) | (high >> 6 << 4)], axis=1)


FORMS = {
    "Q8_0": Form(8, lambda b: b["q"].view(np.uint8) ^ 0x80, offset=128),
    "Q4_0": Form(4, lambda b: b["q"], offset=8),
    "Q4_1": Form(4, lambda b: b["q"], shift=lambda b: -b["m"]),
    "Q5_0": Form(8, _with_fifth, offset=16),
    "Q5_1": Form(8, _with_fifth, shift=lambda b: -b["m"]),
    "Q4_K": Form(4, lambda b: _repaired(b["q"]), shift=lambda b: b["m"], parts=_six_bits),
    "Q5_K": Form(8, _q5_k, shift=lambda b: b["m"], parts=_six_bits),
    "Q6_K": Form(8, _q6_k, offset=32, group=16, parts=lambda b: (b["s"], b["s"])),
}
