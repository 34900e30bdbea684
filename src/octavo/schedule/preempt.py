"""Swap a victim's blocks out, or drop them and compute them again: by what it costs to get them back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.sequence import Sequence
from octavo.paging.kv import KV

RATE = 500.0  # tokens a second of prefill, until some have been measured


@dataclass
class SwapChoice:
    """Owns: what a byte moved and a token computed cost.

    ``mode``: "swap" and "recompute" always do so; "auto" swaps when moving the blocks out and back takes less time
    than computing their tokens.  ``bandwidth``: bytes a second between the tiers; ``rate``: tokens a second of
    prefill, as measured so far (0: unknown).
    """

    kv: KV
    mode: str
    block_bytes: int
    bandwidth: float
    rate: Callable[[], float] = lambda: 0.0

    def costs(self, tokens: int, blocks: int) -> tuple[float, float]:
        """Estimated seconds to swap ``blocks`` out and back, and to recompute ``tokens``."""
        swap = 2 * blocks * self.block_bytes / self.bandwidth if self.bandwidth > 0 else float("inf")
        return swap, tokens / (self.rate() or RATE)

    def __call__(self, sequence: Sequence) -> bool:
        if self.kv.host is None or self.mode == "recompute":
            return False
        if self.mode == "swap":
            return True
        tables = self.kv.holdings[sequence.number].tables
        swap, recompute = self.costs(sequence.computed, sum(len(t) - t.head for t in tables))
        return swap <= recompute
