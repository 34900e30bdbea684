"""Sampling on the device, one program a sample: a few passes over the row, no sort.

A row of logits is read from the cache of the device once for each pass, and a pass takes microseconds.  What filters
need is found like this:

- The k-th best of a row is at least the k-th largest of the maxima over any k or more parts of it.  The first pass
  keeps such maxima, in the lanes of a tile; what is not below their k-th largest is a little more than k tokens.
- Tokens that weigh less than half of what top-p cuts off, shared among all tokens, are cut off for sure.
- What is left is listed, in order of id.  In the list the bar is found by halving the range of the ordered bit
  patterns of floats, counting tokens for top-k and adding weights for top-p; ties at the bar are counted by id.

Sums are float64 and in an order that only the vocabulary and the tile's length decide.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Words of a sample's own parameters, 4 bytes each, in this order (see octavo.kernels.triton.sample).
WORDS = tl.constexpr(16)
ROW = tl.constexpr(0)
TEMPERATURE = tl.constexpr(1)
TOP_K = tl.constexpr(2)
TOP_P = tl.constexpr(3)
MIN_P = tl.constexpr(4)
REPETITION = tl.constexpr(5)
PRESENCE = tl.constexpr(6)
FREQUENCY = tl.constexpr(7)
SEED = tl.constexpr(8)  # two words, the low one first
BRANCH = tl.constexpr(10)
POSITION = tl.constexpr(11)
SLOT = tl.constexpr(12)  # of the copy of the row that masks, bias and penalties go into; -1: the row as it is
MASK = tl.constexpr(13)
WANTED = tl.constexpr(14)  # whether a report is
TARGET = tl.constexpr(15)  # the token to report of, -1: the one drawn

GREEDY_BELOW = tl.constexpr(1e-5)
LOWEST = tl.constexpr(-2147483648)  # no float's ordered bits
NO_ID = tl.constexpr(2147483647)  # above every token id


@triton.jit
def _float(word):
    return word.to(tl.float32, bitcast=True)


@triton.jit
def _ordered(x):
    """int32 in the order of the floats; -0 and 0 are one.  x is not NaN."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _unordered(key):
    """The float whose ordered bits these are."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, top, temperature):
    return tl.exp((x - top) / temperature)


@triton.jit
def _finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def _tile(x, ids, listed, start, n, BLOCK: tl.constexpr):
    """Which lanes hold a token, their ids and their logits: n tokens of a list if ``listed``, else a row's first n."""
    at = start + tl.arange(0, BLOCK)
    here = at < n
    found = tl.load(ids + at, mask=here & listed, other=0)
    token = tl.where(listed, found, at)
    value = tl.load(x + token, mask=here, other=float("-inf"))
    return here, token, value


@triton.jit
def _scan(x, n, BLOCK: tl.constexpr):
    """The largest logit of each lane, the lowest id that has it, and whether any logit is NaN."""
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.full([BLOCK], 0, tl.int32)
    odd = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n, other=float("-inf"))
        odd |= (value != value).to(tl.int32)
        first = tl.where(value > lanes, at, first)
        lanes = tl.where(value > lanes, value, lanes)
    return lanes, first, tl.max(odd, axis=0) > 0


# ---- what filters keep -----------------------------------------------------------------------------------------------


@triton.jit
def _bar_of_lanes(lanes, k):
    """A key that at least k of the lanes' keys reach, and no higher one with fewer than k beyond it."""
    keys = _ordered(lanes)
    low = tl.full([], -2147483648, tl.int64)
    high = tl.max(keys, axis=0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    return low.to(tl.int32)


@triton.jit
def _list(x, n, bar, light, top, temperature, ids, BLOCK: tl.constexpr):
    """Writes the ids of tokens that reach the bar and are not too light, in order; how many, and the lowest key."""
    count = tl.full([], 0, tl.int32)
    lowest = tl.full([], 2147483647, tl.int32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < n
        value = tl.load(x + at, mask=here, other=float("-inf"))
        key = _ordered(value)
        keep = here & (key >= bar) & (_weight(value, top, temperature) >= light)
        lowest = tl.minimum(lowest, tl.min(tl.where(keep, key, 2147483647), axis=0))
        place = count + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(ids + place, at, mask=keep)
        count += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()
    return count, lowest


@triton.jit
def _count(x, ids, listed, n, bar, BLOCK: tl.constexpr):
    """How many of the tokens reach the bar."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        here, _, value = _tile(x, ids, listed, start, n, BLOCK)
        count += tl.sum((here & (_ordered(value) >= bar)).to(tl.int32), axis=0)
    return count


@triton.jit
def _tie(x, ids, listed, n, bar, number, BLOCK: tl.constexpr):
    """The id of the so many-th token (from 1) that is just at the bar; NO_ID if there are not so many."""
    found = tl.full([], 2147483647, tl.int32)
    before = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        here, token, value = _tile(x, ids, listed, start, n, BLOCK)
        tied = here & (_ordered(value) == bar)
        place = before + tl.cumsum(tied.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(tied & (place == number), token, NO_ID), axis=0))
        before += tl.sum(tied.to(tl.int32), axis=0)
    return found


@triton.jit
def _kept(value, token, bar, last):
    """Of the tokens at the bar those up to an id are kept."""
    key = _ordered(value)
    return (key > bar) | ((key == bar) & (token <= last))


@triton.jit
def _best(x, ids, listed, n, lowest, highest, k, BLOCK: tl.constexpr):
    """The bar and the last id at it that just k of the tokens pass; all keys are in the range given."""
    low, high = lowest.to(tl.int64), highest.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        count = _count(x, ids, listed, n, middle.to(tl.int32), BLOCK)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count > k, high, tl.where(count == k, middle, middle - 1))
    bar = low.to(tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    if _count(x, ids, listed, n, bar, BLOCK) > k:
        over = _count(x, ids, listed, n, bar + 1, BLOCK)
        last = _tie(x, ids, listed, n, bar, k - over, BLOCK)
    return bar, last


@triton.jit
def _mass(x, ids, listed, n, over, bar, last, top, temperature, BLOCK: tl.constexpr):
    """The weight of the kept tokens that reach ``over``."""
    total = tl.full([], 0.0, tl.float64)
    for start in range(0, n, BLOCK):
        here, token, value = _tile(x, ids, listed, start, n, BLOCK)
        counts = here & _kept(value, token, bar, last) & (_ordered(value) >= over)
        weight = tl.where(counts, _weight(value, top, temperature), 0.0)
        total += tl.sum(weight.to(tl.float64), axis=0)
    return total


@triton.jit
def _nucleus(x, ids, listed, n, goal, lowest, bar, last, top, temperature, BLOCK: tl.constexpr):
    """The bar and the last id of the shortest run of the best kept tokens whose weight reaches the goal."""
    low, high = lowest.to(tl.int64), _ordered(top).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        enough = _mass(x, ids, listed, n, middle.to(tl.int32), bar, last, top, temperature, BLOCK) >= goal
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    new = low.to(tl.int32)
    over = tl.full([], 0.0, tl.float64)
    if low < _ordered(top).to(tl.int64):
        over = _mass(x, ids, listed, n, new + 1, bar, last, top, temperature, BLOCK)
    each = _weight(_unordered(new), top, temperature).to(tl.float64)
    ties = tl.ceil(tl.minimum((goal - over) / tl.maximum(each, 1e-300), 2147483646.0)).to(tl.int32)
    end = _tie(x, ids, listed, n, new, tl.maximum(ties, 1), BLOCK)
    return new, tl.where(new == bar, tl.minimum(end, last), end)


# ---- the draw --------------------------------------------------------------------------------------------------------


@triton.jit
def _uniform(own):
    """A number in [0, 1) from the sample's seed, branch and position."""
    low = tl.load(own + SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(own + SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    position = tl.load(own + POSITION).to(tl.uint32, bitcast=True)
    branch = tl.load(own + BRANCH).to(tl.uint32, bitcast=True)
    none = position - position
    a, b, _, _ = tl.philox((high << 32) | low, position, branch, none, none)
    bits = ((a.to(tl.uint64) << 32) | b.to(tl.uint64)) >> 11
    return bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _weights(x, ids, listed, start, n, bar, last, min_p, top, temperature, BLOCK: tl.constexpr):
    """Ids and what each token of a tile weighs in the draw."""
    here, token, value = _tile(x, ids, listed, start, n, BLOCK)
    weight = _weight(value, top, temperature)
    keep = here & _kept(value, token, bar, last) & (weight >= min_p)
    return token, tl.where(keep, weight, 0.0)


@triton.jit
def _drawn(x, ids, listed, n, u, bar, last, min_p, top, temperature, BLOCK: tl.constexpr):
    """The first id at which the running weight exceeds u times the whole; a token of weight 0 is never drawn."""
    total = tl.full([], 0.0, tl.float64)
    final = tl.full([], -1, tl.int32)
    for start in range(0, n, BLOCK):
        token, weight = _weights(x, ids, listed, start, n, bar, last, min_p, top, temperature, BLOCK)
        total += tl.sum(weight.to(tl.float64), axis=0)
        final = tl.maximum(final, tl.max(tl.where(weight > 0, token, -1), axis=0))
    goal = u * total
    running = tl.full([], 0.0, tl.float64)
    begin = tl.full([], 0, tl.int32)
    searching = n > BLOCK
    while searching:
        _, weight = _weights(x, ids, listed, begin, n, bar, last, min_p, top, temperature, BLOCK)
        after = running + tl.sum(weight.to(tl.float64), axis=0)
        passed = after <= goal
        running = tl.where(passed, after, running)
        begin = tl.where(passed, begin + BLOCK, begin)
        searching = passed & (begin + BLOCK < n)
    token, weight = _weights(x, ids, listed, begin, n, bar, last, min_p, top, temperature, BLOCK)
    past = (running + tl.cumsum(weight.to(tl.float64), axis=0) > goal) & (weight > 0)
    found = tl.min(tl.where(past, token, NO_ID), axis=0)
    # Rounding may take the goal past the end of the tile that holds it.
    behind = tl.max(tl.where(weight > 0, token, -1), axis=0)
    return tl.where(found < NO_ID, found, tl.where(behind >= 0, behind, final))


@triton.jit
def _sampled(x, own, lanes, top, V, ids, BLOCK: tl.constexpr):
    """A token drawn from a usable row at a temperature above 0."""
    temperature = _float(tl.load(own + TEMPERATURE))
    k = tl.load(own + TOP_K)
    top_p = _float(tl.load(own + TOP_P))
    some = (k > 0) & (k < V)
    cut = top_p < 1
    start = tl.full([], -2147483648, tl.int32)  # what is below it is not listed
    light = tl.full([], 0.0, tl.float32)
    bar = tl.full([], -2147483648, tl.int32)
    last = tl.full([], 2147483647, tl.int32)
    total = tl.full([], 0.0, tl.float64)
    if some:
        if k <= BLOCK:
            start = _bar_of_lanes(lanes, k)
    elif cut:
        total = _mass(x, ids, False, V, bar, bar, last, top, temperature, BLOCK)
        light = (0.5 * (1.0 - top_p.to(tl.float64)) * total / V).to(tl.float32)
    n, lowest = V, bar
    listed = some | cut
    if listed:
        n, lowest = _list(x, V, start, light, top, temperature, ids, BLOCK)
    if some:
        bar, last = _best(x, ids, listed, n, lowest, _ordered(top), k, BLOCK)
        if cut:
            total = _mass(x, ids, listed, n, bar, bar, last, top, temperature, BLOCK)
    if cut:
        goal = top_p.to(tl.float64) * total
        bar, last = _nucleus(x, ids, listed, n, goal, tl.maximum(lowest, bar), bar, last, top, temperature, BLOCK)
    min_p = _float(tl.load(own + MIN_P))
    return _drawn(x, ids, listed, n, _uniform(own), bar, last, min_p, top, temperature, BLOCK)


@triton.jit(do_not_specialize=["V", "width"])
def draw(logits, stride, words, copies, lists, V, out, width, BLOCK: tl.constexpr):
    """The token of each sample, out[s, 0]: -1 if its row holds NaN or +inf, or everything is banned; and no report."""
    s = tl.program_id(0)
    own = words + s * WORDS
    slot = tl.load(own + SLOT)
    raw = logits + tl.load(own + ROW).to(tl.int64) * stride
    lanes, first, odd = _scan(raw, V, BLOCK)
    top = tl.max(lanes, axis=0)
    usable = _finite(top) & (odd == 0)
    x = raw
    if slot >= 0:
        x = copies + slot.to(tl.int64) * V
        lanes, first, odd = _scan(x, V, BLOCK)
        top = tl.max(lanes, axis=0)
        usable = usable & _finite(top) & (odd == 0)
    token = tl.full([], -1, tl.int32)
    if usable:
        if _float(tl.load(own + TEMPERATURE)) < GREEDY_BELOW:
            token = tl.min(tl.where(lanes == top, first, NO_ID), axis=0)
        else:
            token = _sampled(x, own, lanes, top, V, lists + s.to(tl.int64) * V, BLOCK)
    mine = out + s.to(tl.int64) * width
    tl.store(mine, token)
    tl.store(mine + 1, 0)
    tl.store(mine + 2, 0)


# ---- reports ---------------------------------------------------------------------------------------------------------


@triton.jit
def _position(x, V, token, value, BLOCK: tl.constexpr):
    """The token's rank, 1 for the likeliest; ties go by id."""
    rank = tl.full([], 1, tl.int32)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        other = tl.load(x + at, mask=at < V, other=float("-inf"))
        ahead = (at < V) & ((other > value) | ((other == value) & (at < token)))
        rank += tl.sum(ahead.to(tl.int32), axis=0)
    return rank


@triton.jit
def _pack(x, ids, listed, n, bar, last, kept, BLOCK: tl.constexpr):
    """Writes the ids that pass the bar, in order."""
    count = tl.full([], 0, tl.int32)
    for start in range(0, n, BLOCK):
        here, token, value = _tile(x, ids, listed, start, n, BLOCK)
        keep = here & _kept(value, token, bar, last)
        place = count + tl.cumsum(keep.to(tl.int32), axis=0) - 1
        tl.store(kept + place, token, mask=keep)
        count += tl.sum(keep.to(tl.int32), axis=0)
    tl.debug_barrier()


@triton.jit
def _tell_best(x, kept, k, top, log_total, ids, logprobs, SIDE: tl.constexpr):
    """Puts k tokens, given in order of id, best first: each one's place is how many are ahead of it."""
    for start in range(0, k, SIDE):
        at = start + tl.arange(0, SIDE)
        here = at < k
        token = tl.load(kept + at, mask=here, other=0)
        value = tl.load(x + token, mask=here, other=float("-inf"))
        key = _ordered(value)
        place = tl.full([SIDE], 0, tl.int32)
        for other in range(0, k, SIDE):
            by = other + tl.arange(0, SIDE)
            theirs = tl.load(kept + by, mask=by < k, other=0)
            theirs_key = _ordered(tl.load(x + theirs, mask=by < k, other=float("-inf")))
            beats = theirs_key[None, :] > key[:, None]
            ahead = beats | ((theirs_key[None, :] == key[:, None]) & (by[None, :] < at[:, None]))
            place += tl.sum((ahead & (by < k)[None, :]).to(tl.int32), axis=1)
        logprob = (value.to(tl.float64) - top.to(tl.float64) - log_total).to(tl.float32)
        tl.store(ids + place, token, mask=here)
        tl.store(logprobs + place, logprob.to(tl.int32, bitcast=True), mask=here)


@triton.jit(do_not_specialize=["V", "K", "width"])
def report(logits, stride, words, lists, kept, V, K, out, width, BLOCK: tl.constexpr, SIDE: tl.constexpr):
    """out[s] int32: token, log-probability, rank, K best ids and their log-probabilities (bits of float32).

    Where nothing is wanted, or the row is not usable: log-probability 0, rank 0, ids -1, log-probabilities -inf; the
    token of a score is then -1.
    """
    s = tl.program_id(0)
    own = words + s * WORDS
    mine = out + s.to(tl.int64) * width
    x = logits + tl.load(own + ROW).to(tl.int64) * stride
    target = tl.load(own + TARGET)
    if target >= 0:
        token = target
    else:
        token = tl.load(mine)
    lanes, _, odd = _scan(x, V, BLOCK)
    top = tl.max(lanes, axis=0)
    usable = _finite(top) & (odd == 0)
    if (target >= 0) & (usable == 0):
        token = tl.full([], -1, tl.int32)
    tl.store(mine, token)
    best_ids, best_logprobs = mine + 3, mine + 3 + K
    if (tl.load(own + WANTED) != 0) & usable & (token >= 0):
        everything = tl.full([], -2147483648, tl.int32)
        sure = tl.full([], 2147483647, tl.int32)
        list_ = lists + s.to(tl.int64) * V
        total = _mass(x, list_, False, V, everything, everything, sure, top, 1.0, BLOCK)
        log_total = tl.log(total)
        value = tl.load(x + token)
        logprob = (value.to(tl.float64) - top.to(tl.float64) - log_total).to(tl.float32)
        tl.store(mine + 1, logprob.to(tl.int32, bitcast=True))
        tl.store(mine + 2, _position(x, V, token, value, BLOCK))
        if K > 0:
            start = everything
            if K <= BLOCK:
                start = _bar_of_lanes(lanes, K)
            n, lowest = _list(x, V, start, 0.0, top, 1.0, list_, BLOCK)
            bar, last = _best(x, list_, True, n, lowest, _ordered(top), K, BLOCK)
            few = kept + s.to(tl.int64) * K
            _pack(x, list_, True, n, bar, last, few, BLOCK)
            _tell_best(x, few, K, top, log_total, best_ids, best_logprobs, SIDE)
    else:
        tl.store(mine + 1, 0)
        tl.store(mine + 2, 0)
        for first in range(0, K, SIDE):
            at = first + tl.arange(0, SIDE)
            tl.store(best_ids + at, tl.full([SIDE], -1, tl.int32), mask=at < K)
            none = tl.full([SIDE], float("-inf"), tl.float32)
            tl.store(best_logprobs + at, none.to(tl.int32, bitcast=True), mask=at < K)
