"""Counters and gauges of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Counters:
    """Owns: what has happened since the start.  Promises: never falls."""

    steps: int = 0
    steps_ahead: int = 0  # of the steps, those submitted while the one before them ran
    prompt_tokens: int = 0  # of admitted requests
    computed_tokens: int = 0  # tokens that went through the model, recomputed ones included
    generated_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    drafted_tokens: int = 0  # computed as drafts
    accepted_tokens: int = 0  # of these, the ones that were right
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    preemptions: int = 0
    swaps: int = 0  # of the preemptions, those whose blocks went to the host tier
    recomputes: int = 0  # and those whose tokens are computed again
    demoted: int = 0  # cached blocks that went to the host tier
    disk_written: int = 0
    disk_read: int = 0
    disk_failed: int = 0
    copies: int = 0
    evictions: int = 0
    step_seconds: float = 0.0
    covered_slots: int = 0  # sum over steps: slots of the blocks that running sequences hold
    token_slots: int = 0  # sum over steps: of those, slots that hold a token
    logical_blocks: int = 0  # sum over steps: blocks that running sequences' tables name
    physical_blocks: int = 0  # sum over steps: of those, different ones
    sequence_steps: int = 0  # sum over steps: running sequences


@dataclass(frozen=True)
class Stats:
    """A snapshot: counters since start, and gauges of now.

    ``blocks_used`` + ``blocks_cached`` + ``blocks_free`` = ``blocks``: held by a sequence; free but still holding a
    prefix that can be hit; free and empty.  ``blocks_shared``: of the used ones, those that several
    sequences name.  ``waste`` is the mean share of held slots without a token.
    """

    counters: Counters
    running: int
    waiting: int
    blocks: int
    block_size: int
    block_bytes: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    blocks_peak: int
    blocks_shared: int
    token_budget: int
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def waste(self) -> float:
        c = self.counters
        return 1 - c.token_slots / c.covered_slots if c.covered_slots else 0.0

    @property
    def saving(self) -> float:
        """The share of blocks that sharing saved, over all steps: 1 - physical / logical."""
        c = self.counters
        return 1 - c.physical_blocks / c.logical_blocks if c.logical_blocks else 0.0

    @property
    def mean_running(self) -> float:
        return self.counters.sequence_steps / self.counters.steps if self.counters.steps else 0.0

    def __str__(self) -> str:
        c = self.counters
        drafts = f", {c.accepted_tokens} of {c.drafted_tokens} drafts right" if c.drafted_tokens else ""
        return (
            f"{c.finished} requests finished, {c.generated_tokens} tokens generated in {c.steps} steps "
            f"({self.mean_running:.1f} sequences a step); blocks {self.blocks_used} used, {self.blocks_cached} cached, "
            f"{self.blocks_free} free of {self.blocks} (peak {self.blocks_peak}), waste {100 * self.waste:.1f} %; "
            f"{c.cached_tokens} of {c.prompt_tokens} prompt tokens from cache, {c.preemptions} preemptions "
            f"({c.swaps} swapped), {c.copies} blocks copied, {100 * self.saving:.1f} % saved by sharing{drafts}"
        )
