"""Sampling and scoring on the device: what :class:`octavo.kernels.backend.SampleBatch` says, without a sort.

Everything that a call needs goes over in one copy, and its results come back in one.  Large batches run in parts, so
that working memory stays bounded; a sample's token depends on its own row and parameters alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kernels.backend import Later, SampleBatch, Sampled
from octavo.kernels.triton import sample_changes, sample_kernels
from octavo.kernels.triton.move import sent

Array = np.ndarray

WORDS = 16  # of a sample's own parameters; their order is in sample_kernels
WORKSPACE = 256 << 20  # bytes for copies of rows and lists of tokens
LARGEST_TILE = 4096
SIDE = 64  # of the square tiles in which the best tokens are put in order


def sample(logits: torch.Tensor, batch: SampleBatch) -> Sampled:
    """Draws len(batch.row) tokens from logits float32 [R, V] on the device.  Raises ValueError for bad samples."""
    return begin(logits, batch)[0]()


def begin(logits: torch.Tensor, batch: SampleBatch) -> tuple[Later, torch.Tensor]:
    """The same without waiting: what waits for the results, and the tokens int32 [len(batch.row)] on the device."""
    rows, vocab = logits.shape
    check_samples(batch, rows, vocab)
    count = len(batch.row)
    top = max(0, min(int(np.max(batch.logprobs, initial=0)), vocab))
    parts = [_draw(logits, _part(batch, first, last), top) for first, last in _parts(count, vocab)]
    if len(parts) == 1:
        return _later(parts, top), parts[0][:, 0]
    tokens = torch.empty(count, dtype=torch.int32, device=logits.device)
    for (first, last), part in zip(_parts(count, vocab), parts, strict=True):
        tokens[first:last] = part[:, 0]
    return _later(parts, top), tokens


def score(logits: torch.Tensor, targets: Array, top: int) -> Sampled:
    """Log-probability and rank of targets int32 [R] under logits float32 [R, V], and the ``top`` best tokens."""
    rows, vocab = logits.shape
    targets = np.ascontiguousarray(targets, np.int32)
    if len(targets) != rows:
        raise ValueError("there must be one target for each row of logits")
    if ((targets < 0) | (targets >= vocab)).any():
        raise ValueError("a target is outside the vocabulary")
    top = max(0, min(top, vocab))
    parts = []
    for first, last in _parts(rows, vocab):
        own = np.zeros((last - first, WORDS), np.int32)
        own[:, 0] = np.arange(first, last)
        own[:, 14], own[:, 15] = 1, targets[first:last]
        words = sent(own.reshape(-1), logits.device)
        parts.append(_report(logits, words, last - first, top, _outputs(last - first, top, logits.device)))
    return _later(parts, top)()


def _parts(count: int, vocab: int) -> list[tuple[int, int]]:
    """Ranges of samples whose working memory fits: a copy of the row and a list of ids for each."""
    size = max(1, WORKSPACE // (8 * max(1, vocab)))
    return [(first, min(count, first + size)) for first in range(0, count, size)]


def tile_of(vocab: int) -> int:
    return min(LARGEST_TILE, max(128, 1 << (vocab - 1).bit_length()))


def warps_of(tile: int) -> int:
    return 8 if tile > 1024 else 4


def check_samples(batch: SampleBatch, rows: int, vocab: int) -> None:
    """What would make a sample read or write what is not its own is an error of whoever made the batch."""
    n = len(batch.row)
    columns = ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "seed", "branch",
               "position", "logprobs")  # fmt: skip
    if any(len(getattr(batch, name)) != n for name in columns):
        raise ValueError("all parameters must have one item for each sample")
    if n and not vocab:
        raise ValueError("the logits have no columns")
    _require(((batch.row >= 0) & (batch.row < rows)).all(), "a sample's row is outside the logits")
    _require((batch.temperature >= 0).all(), "a temperature is negative or NaN")
    _require((batch.top_p > 0).all(), "a top_p is not above 0")
    _require(((batch.min_p >= 0) & (batch.min_p <= 1)).all(), "a min_p is not in 0..1")
    _require((batch.repetition > 0).all(), "a repetition penalty is not positive")
    for offsets, ids, values in (batch.bias, batch.history):
        _require(len(offsets) == n + 1 and len(ids) == len(values), "offsets, ids or values are too few or too many")
        _require(offsets[0] == 0 and offsets[-1] == len(ids), "offsets must run from 0 to the number of ids")
        _require((np.diff(offsets) >= 0).all(), "offsets must not fall")
        outside = ids[(ids < 0) | (ids >= vocab)]
        _require(not len(outside), f"token id {outside[:1].tolist()} is outside the vocabulary of {vocab}")
    if batch.mask is not None and batch.masks is not None:
        _require(len(batch.mask) == n, "a mask must have one item for each sample")
        inside = (batch.mask >= -1) & (batch.mask < len(batch.masks))
        _require(inside.all(), "a sample's mask is outside the masks")
        _require(not len(batch.masks) or 32 * batch.masks.shape[1] >= vocab, "masks have fewer bits than tokens")


def _require(holds: bool | np.bool_, complaint: str) -> None:
    if not holds:
        raise ValueError(complaint)


def _part(batch: SampleBatch, first: int, last: int) -> SampleBatch:
    """Samples first .. last-1 of a batch."""
    if first == 0 and last == len(batch.row):
        return batch

    def ragged(arrays: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        offsets, ids, values = arrays
        inside = slice(offsets[first], offsets[last])
        return offsets[first : last + 1] - offsets[first], ids[inside], values[inside]

    own = {name: value[first:last] for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
    own.pop("masks", None)
    fields = {**vars(batch), **own, "bias": ragged(batch.bias), "history": ragged(batch.history)}
    return SampleBatch(**fields)


# ---- what goes over --------------------------------------------------------------------------------------------------


@dataclass
class Sent:
    """A batch on the device: all of it as int32 words, and where in them what is."""

    words: torch.Tensor
    changed: int  # samples whose row gets a mask, bias or penalties
    places: tuple[int, ...]


def send(batch: SampleBatch, device: torch.device) -> Sent:
    n = len(batch.row)
    masked = batch.mask is not None and batch.masks is not None and batch.masks.size > 0
    mask = np.asarray(batch.mask, np.int32) if masked else np.full(n, -1, np.int32)
    changed = np.flatnonzero((np.diff(batch.bias[0]) > 0) | (np.diff(batch.history[0]) > 0) | (mask >= 0))
    slot = np.full(n, -1, np.int32)
    slot[changed] = np.arange(len(changed))
    seed = np.ascontiguousarray(batch.seed, "<u8").view(np.int32).reshape(n, 2)
    own = np.empty((n, WORDS), np.int32)
    columns = (batch.row, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.repetition, batch.presence,
               batch.frequency, seed[:, 0], seed[:, 1], batch.branch, batch.position, slot, mask,
               np.asarray(batch.logprobs) >= 0, np.full(n, -1, np.int32))  # fmt: skip
    for i, column in enumerate(columns):
        own[:, i] = _words(column) if np.asarray(column).dtype.kind == "f" else column
    pieces = [own.reshape(-1), changed.astype(np.int32)]
    for offsets, ids, values in (batch.bias, batch.history):
        pieces += [np.asarray(offsets, np.int32), np.asarray(ids, np.int32), _words(values)]
    width = 0
    if batch.masks is not None and masked:
        width = batch.masks.shape[1]
        pieces.append(np.ascontiguousarray(batch.masks, np.uint32).view(np.int32).reshape(-1))
    starts = np.cumsum([0, *(len(piece) for piece in pieces)]).tolist()
    return Sent(sent(np.concatenate(pieces), device), len(changed), (*starts[1:8], starts[8] if width else 0, width))


def _words(values: Array) -> Array:
    """Bits of float32, or integers as they are."""
    values = np.asarray(values)
    if values.dtype.kind == "f":
        return np.ascontiguousarray(values, np.float32).view(np.int32)
    return np.asarray(values, np.int32)


# ---- what runs -------------------------------------------------------------------------------------------------------


def _draw(logits: torch.Tensor, batch: SampleBatch, top: int) -> torch.Tensor:
    """Results of some samples, int32 [n, 3 + 2 top], on the device."""
    count, vocab = len(batch.row), logits.shape[1]
    sent, device = send(batch, logits.device), logits.device
    tile = tile_of(vocab)
    warps = warps_of(tile)
    out = _outputs(count, top, device)
    copies = torch.empty((max(1, sent.changed), vocab), dtype=torch.float32, device=device)
    lists = torch.empty((count, vocab), dtype=torch.int32, device=device)
    if sent.changed:
        sample_changes.prepare[(sent.changed,)](
            logits, logits.stride(0), sent.words, *sent.places, copies, vocab, BLOCK=tile, num_warps=warps
        )
    sample_kernels.draw[(count,)](
        logits, logits.stride(0), sent.words, copies, lists, vocab, out, out.shape[1], BLOCK=tile, num_warps=warps
    )
    if not (np.asarray(batch.logprobs) >= 0).any():
        return out
    return _report(logits, sent.words, count, top, out, lists)


def _report(
    logits: torch.Tensor,
    words: torch.Tensor,
    count: int,
    top: int,
    out: torch.Tensor,
    lists: torch.Tensor | None = None,
) -> torch.Tensor:
    vocab, tile = logits.shape[1], tile_of(logits.shape[1])
    if lists is None:
        lists = torch.empty((count, vocab), dtype=torch.int32, device=logits.device)
    kept = torch.empty((count, max(1, top)), dtype=torch.int32, device=logits.device)
    sample_kernels.report[(count,)](
        logits, logits.stride(0), words, lists, kept, vocab, top, out, out.shape[1],
        BLOCK=tile, SIDE=SIDE, num_warps=warps_of(tile),
    )  # fmt: skip
    return out


def _outputs(count: int, top: int, device: torch.device) -> torch.Tensor:
    """Of each sample: token, log-probability, rank, best ids, their log-probabilities; the kernels write all of it."""
    return torch.empty((count, 3 + 2 * top), dtype=torch.int32, device=device)


def _later(parts: list[torch.Tensor], top: int) -> Later:
    """Sends the results to the host; what is returned waits for them."""
    if not parts or parts[0].device.type != "cuda":
        return lambda: _sampled([part.numpy() for part in parts], top)
    # Only pinned memory is written while the CPU goes on, and an event is all that says when.
    there = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
    for host, part in zip(there, parts, strict=True):
        host.copy_(part, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(parts[0].device))

    def wait() -> Sampled:
        arrived.synchronize()
        return _sampled([host.numpy() for host in there], top)

    return wait


def _sampled(parts: list[Array], top: int) -> Sampled:
    """Results as arrays, copied out of the ``parts``."""
    words = np.concatenate(parts) if parts else np.empty((0, 3 + 2 * top), np.int32)

    def floats(columns: Array) -> Array:
        return np.ascontiguousarray(columns).view(np.float32)

    return Sampled(
        token=words[:, 0].copy(),
        logprob=floats(words[:, 1]),
        rank=words[:, 2].copy(),
        top_ids=words[:, 3 : 3 + top].copy(),
        top_logprobs=floats(words[:, 3 + top :]),
    )
