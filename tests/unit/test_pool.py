"""The block pool against a list: counts, and which free block comes next."""

from __future__ import annotations

import random
from typing import Any

import pytest

from octavo.paging.pool import BlockPool


@pytest.mark.parametrize("seed", range(20))
def test_against_a_list(seed: int) -> None:
    """Blocks without content are reused first, then the ones given back longest ago; a held block is never taken."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 5, 12])
    forgotten: list[tuple[int, Any]] = []
    pool = BlockPool(size, lambda block, content: forgotten.append((block, content)))
    counts, content = [0] * size, [None] * size
    free = list(range(size))  # the next one first
    for step in range(400):
        verb, block = (
            rng.choice(["take", "take", "hold", "drop", "drop", "drop", "name", "forget"]),
            rng.randrange(size),
        )
        told = len(forgotten)
        if verb == "take":
            if not free:
                with pytest.raises(RuntimeError, match="no free block"):
                    pool.take()
                continue
            want = free.pop(0)
            assert pool.take() == want
            assert forgotten[told:] == ([(want, content[want])] if content[want] is not None else [])
            counts[want], content[want] = 1, None
        elif verb == "hold":
            pool.hold(block)
            if counts[block] == 0:
                free.remove(block)
            counts[block] += 1
        elif verb == "drop":
            if counts[block] == 0:
                with pytest.raises(RuntimeError, match="dropped more often"):
                    pool.drop(block)
                continue
            pool.drop(block)
            counts[block] -= 1
            if counts[block] == 0:
                free.insert(len(free) if content[block] is not None else 0, block)
        elif verb == "name":
            if counts[block] == 0 or content[block] is not None:
                with pytest.raises(RuntimeError, match="cannot be named"):
                    pool.name(block, step)
                continue
            pool.name(block, step)
            content[block] = step  # type: ignore[call-overload]
        else:
            pool.forget(block)
            assert forgotten[told:] == ([(block, content[block])] if content[block] is not None else [])
            if content[block] is not None and counts[block] == 0:
                free.remove(block)
                free.insert(0, block)
            content[block] = None
        assert pool.free_order() == free and pool.free == len(free)
        assert list(pool.counts) == counts and pool.content == content
        assert pool.cached == sum(content[b] is not None for b in free)


def test_a_pool_has_a_block() -> None:
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0)
