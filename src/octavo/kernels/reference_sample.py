"""Sampling and scoring in NumPy: the definition of right for every backend's sampler.

All arithmetic is float64.  The steps and their order are those of :class:`octavo.kernels.backend.SampleBatch`.
"""

from __future__ import annotations

import numpy as np

from octavo.kernels.backend import SampleBatch, Sampled

Array = np.ndarray

GREEDY_BELOW = 1e-5  # temperatures under it are as good as none


def sample(logits: Array, batch: SampleBatch) -> Sampled:
    """Draws len(batch.row) tokens from logits float32 [R, V]."""
    tokens = np.array([_sample_one(logits[row], batch, s) for s, row in enumerate(batch.row)], dtype=np.int32)
    wanted = np.asarray(batch.logprobs)
    return _report(logits, np.asarray(batch.row), tokens, wanted >= 0, max(0, int(wanted.max(initial=0))))


def score(logits: Array, targets: Array, top: int) -> Sampled:
    """Log-probability and rank of targets int32 [R] under logits float32 [R, V], and the ``top`` best tokens."""
    tokens = np.array([t if _usable(row) else -1 for t, row in zip(targets, logits, strict=True)], dtype=np.int32)
    return _report(logits, np.arange(len(tokens)), tokens, np.ones(len(tokens), dtype=bool), top)


def _usable(logits: Array) -> bool:
    """No NaN, no +inf, and something to choose."""
    return bool(np.isfinite(np.max(logits)))


def log_softmax(logits: Array) -> Array:
    """float64 over the last axis."""
    shifted = logits.astype(np.float64) - np.max(logits, axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.sum(np.exp(shifted), axis=-1, keepdims=True)))


def best_first(values: Array) -> Array:
    """Ids by falling value, ties by rising id."""
    return np.argsort(-values, kind="stable")


def _sample_one(logits: Array, batch: SampleBatch, s: int) -> int:
    if not _usable(logits):
        return -1
    z = _penalised(_masked(logits.astype(np.float64), batch, s), batch, s)
    if not _usable(z):
        return -1
    temperature = float(batch.temperature[s])
    if temperature < GREEDY_BELOW:
        return int(np.argmax(z))
    z = (z - np.max(z)) / temperature
    weights = np.exp(_filtered(z, int(batch.top_k[s]), float(batch.top_p[s]), float(batch.min_p[s])))
    u = uniform(int(batch.seed[s]), int(batch.branch[s]), int(batch.position[s]))
    running = np.cumsum(weights)
    drawn = int(np.searchsorted(running, u * running[-1], side="right"))
    return min(drawn, int(np.flatnonzero(weights)[-1]))  # u * total may round up to the total


def _masked(z: Array, batch: SampleBatch, s: int) -> Array:
    if batch.mask is None or batch.masks is None or batch.mask[s] < 0:
        return z
    bits = np.unpackbits(batch.masks[batch.mask[s]].astype("<u4").view(np.uint8), bitorder="little")
    return np.where(bits[: len(z)] > 0, z, -np.inf)


def _penalised(z: Array, batch: SampleBatch, s: int) -> Array:
    offsets, ids, values = batch.bias
    mine = slice(offsets[s], offsets[s + 1])
    np.add.at(z, ids[mine], values[mine].astype(np.float64))
    offsets, ids, counts = batch.history
    mine = slice(offsets[s], offsets[s + 1])
    ids, counts = ids[mine], counts[mine].astype(np.float64)
    old = z[ids]
    repetition = float(batch.repetition[s])
    new = np.where(old > 0, old / repetition, old * repetition)
    z[ids] = new - float(batch.frequency[s]) * counts - float(batch.presence[s]) * (counts > 0)
    return z


def _filtered(z: Array, top_k: int, top_p: float, min_p: float) -> Array:
    """z with -inf for what the filters drop; the best token always stays."""
    order = best_first(z)
    if top_k > 0:
        order = order[:top_k]
    p = np.exp(z[order] - z[order[0]])
    p /= np.sum(p)
    if top_p < 1:
        before = np.cumsum(p) - p
        order, p = order[before < top_p], p[before < top_p]
    order = order[p >= min_p * p[0]] if len(order) else order
    kept = np.full_like(z, -np.inf)
    kept[order] = z[order]
    return kept


def _report(logits: Array, rows: Array, tokens: Array, wanted: Array, top: int) -> Sampled:
    n = len(tokens)
    top = min(top, logits.shape[1])
    out = Sampled(
        token=tokens,
        logprob=np.zeros(n, dtype=np.float32),
        rank=np.zeros(n, dtype=np.int32),
        top_ids=np.full((n, top), -1, dtype=np.int32),
        top_logprobs=np.full((n, top), -np.inf, dtype=np.float32),
    )
    for s in np.flatnonzero(wanted & (tokens >= 0)):
        row, token = logits[rows[s]], tokens[s]
        logprobs = log_softmax(row)
        out.logprob[s] = logprobs[token]
        out.rank[s] = 1 + np.count_nonzero(row > row[token]) + np.count_nonzero(row[:token] == row[token])
        best = best_first(row)[:top]
        out.top_ids[s], out.top_logprobs[s] = best, logprobs[best]
    return out


def uniform(seed: int, branch: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    words = philox4x32((position, branch, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return float((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror and Shaw 2011): four 32-bit words."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = (c & mask for c in counter)
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & mask, (p0 >> 32) ^ c3 ^ k1, p0 & mask
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c0, c1, c2, c3
