"""CUDA graphs for steps of few tokens: a ladder of sizes, each recorded once and replayed in one call.

A rung has room for so many tokens, wanted logits and pieces of attention; a step that fits is padded up to it.  Padding
tokens write nowhere, padding items have no rows, and no row depends on another: so the bits are those without graphs.
A graph knows the addresses that its kernels work on, which therefore stay: inputs of the ladder's own, and activations
that it keeps even if larger steps have come to need larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep
from octavo.kernels.triton.inputs import Inputs, Prepared, Sizes, Step

SHORT = 4  # pieces of attention that a token has room for on average, where contexts are short
LONGER = 4  # so many times more there are of them on the next rung of as many tokens
TABLES = 1 << 24  # most block ids that there is room for, which are 64 MiB on the device and twice that on the host

Launch = Callable[[Step], torch.Tensor]


def rungs(most: int) -> list[int]:
    """Numbers of tokens: 1, 2, 4, 8, then in steps of 8 and later of an eighth, so that little is computed in vain."""
    sizes, n = [1, 2, 4], 8
    while n < most:
        sizes.append(n)
        n += max(8, n // 64 * 8)
    return [s for s in sizes if s < most] + [most]


def sizes_of(most: int, layout: KVLayout, heads: int, context: int) -> list[Sizes]:
    """The ladder: each number of tokens with room for short contexts, and powers of two with room for longer ones too.

    A piece that is padding costs its program all the same, so that room for the full context on every rung would be
    dear where contexts are short; and a step of few tokens that takes a rung of twice as many reads the weights once.
    The last rung, and each power of two, hold a token of each of so many sequences at the full context.
    """
    ladder = []
    for n in rungs(most):
        whole = Sizes.of(LargestStep(n, n, n, context), layout, heads)
        whole = replace(whole, ids=min(whole.ids, TABLES))
        room = SHORT * n + 16
        while room < max(whole.items):
            ladder.append(replace(whole, items=tuple(min(items, room) for items in whole.items)))
            room *= LONGER
            if n & (n - 1) and n < most:
                break
        else:
            ladder.append(whole)
    return ladder


@dataclass(frozen=True)
class Rung:
    """A size, and the step's record where there is one (none on a CPU)."""

    sizes: Sizes
    graph: torch.cuda.CUDAGraph | None
    logits: torch.Tensor | None


class Ladder:
    """Owns: the rungs and their inputs; through ``launch`` the activations that its graphs work on.

    Promises: a step that fits no rung is left to others; on the CPU the rungs are padded steps without graphs.
    """

    def __init__(self, device: torch.device, sizes: Sequence[Sizes], launch: Launch) -> None:
        self.device, self.sizes, self.launch = device, sizes, launch
        self.inputs = Inputs(device)
        self.inputs.reserve(max(sizes, key=lambda s: sum(s.places()[-1])))
        self.rungs: list[Rung] = []

    def build(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Records all rungs, the largest first, whose memory the others share."""
        on_gpu = self.device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        made: list[Rung] = []
        for sizes in reversed(self.sizes):
            if on_gpu:
                made.append(self._record(sizes, pool))
            else:
                made.append(Rung(sizes, None, None))
            if progress:
                progress(len(made), len(self.sizes))
        self.rungs = made[::-1]

    def _record(self, sizes: Sizes, pool: object) -> Rung:
        self.inputs.packed.zero_()
        step = self.inputs.step(sizes)
        for group in step.groups:
            group.blocks.fill_(-1)
        self.launch(step)  # whatever is compiled or set up at first use must not be recorded
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = self.launch(step)
        return Rung(sizes, graph, logits)

    def run(self, prepared: Prepared) -> torch.Tensor | None:
        """The logits of a step on the smallest rung that holds it; None if none does."""
        for rung in self.rungs:
            if rung.sizes.hold(prepared.sizes):
                step = self.inputs.send(prepared, rung.sizes)
                if rung.graph is None:
                    return self.launch(step)[: prepared.sizes.logits]
                rung.graph.replay()
                assert rung.logits is not None
                return rung.logits[: prepared.sizes.logits]
        return None
