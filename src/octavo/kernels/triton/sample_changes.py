"""What changes a row of logits before a token is drawn from it: masks, bias and penalties, in a copy of the row."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.sample_kernels import FREQUENCY, MASK, PRESENCE, REPETITION, ROW, SLOT, WORDS, _float

TIES = tl.constexpr(64)  # entries that are looked through for repeated ids together


@triton.jit
def _earlier(ids, here, entries, start, stop, RANGE: tl.constexpr):
    """How many entries of the tile before each one have its id."""
    lane = tl.arange(0, RANGE)
    other = tl.load(entries + start + lane, mask=start + lane < stop, other=-1)
    same = (ids[:, None] == other[None, :]) & (lane[None, :] < lane[:, None]) & here[:, None]
    return tl.sum(same.to(tl.int32), axis=1)


@triton.jit
def _add_bias(x, ids, values, start, stop):
    """x[id] += value, in order; an id may come several times."""
    for first in range(start, stop, TIES):
        at = first + tl.arange(0, TIES)
        here = at < stop
        id = tl.load(ids + at, mask=here, other=-1)
        value = _float(tl.load(values + at, mask=here, other=0)).to(tl.float64)
        turn = _earlier(id, here, ids, first, stop, TIES)
        for now in range(0, tl.max(turn, axis=0) + 1):
            mine = here & (turn == now)
            old = tl.load(x + id, mask=mine, other=0.0)
            tl.store(x + id, (old.to(tl.float64) + value).to(tl.float32), mask=mine)
            tl.debug_barrier()


@triton.jit
def _penalise(x, ids, counts, start, stop, repetition, presence, frequency):
    """Each id comes once."""
    for first in range(start, stop, TIES):
        at = first + tl.arange(0, TIES)
        here = at < stop
        id = tl.load(ids + at, mask=here, other=0)
        count = tl.load(counts + at, mask=here, other=0).to(tl.float64)
        old = tl.load(x + id, mask=here, other=0.0).to(tl.float64)
        new = tl.where(old > 0, old / repetition, old * repetition)
        new = new - frequency * count - tl.where(count > 0, presence, 0.0)
        tl.store(x + id, new.to(tl.float32), mask=here)


@triton.jit(do_not_specialize=["changed", "biases", "bias_ids", "bias_values", "histories", "history_ids",
                               "history_counts", "masks", "mask_words", "V"])  # fmt: skip
def prepare(
    logits, stride, words, changed, biases, bias_ids, bias_values, histories, history_ids, history_counts, masks,
    mask_words, copies, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """A copy of the row of each changed sample, with its mask, bias and penalties.

    ``words`` holds everything that was sent; the numbers after it say where what is: which samples are changed, the
    offsets, ids and values of biases and of histories, and the masks.
    """
    s = tl.load(words + changed + tl.program_id(0))
    own = words + s * WORDS
    raw = logits + tl.load(own + ROW).to(tl.int64) * stride
    x = copies + tl.load(own + SLOT).to(tl.int64) * V
    mask = tl.load(own + MASK)
    bits = words + masks + tl.maximum(mask, 0).to(tl.int64) * mask_words
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < V
        value = tl.load(raw + at, mask=here, other=0.0)
        word = tl.load(bits + at // 32, mask=here & (mask >= 0), other=-1)
        value = tl.where(((word >> (at % 32)) & 1) != 0, value, float("-inf"))
        tl.store(x + at, value, mask=here)
    tl.debug_barrier()  # what follows reads what other threads have written
    first, last = tl.load(words + biases + s), tl.load(words + biases + s + 1)
    _add_bias(x, words + bias_ids, words + bias_values, first, last)
    first, last = tl.load(words + histories + s), tl.load(words + histories + s + 1)
    repetition = _float(tl.load(own + REPETITION)).to(tl.float64)
    presence = _float(tl.load(own + PRESENCE)).to(tl.float64)
    frequency = _float(tl.load(own + FREQUENCY)).to(tl.float64)
    _penalise(x, words + history_ids, words + history_counts, first, last, repetition, presence, frequency)
