"""CUDA graphs for steps of few tokens: a ladder of sizes, each recorded once and replayed in one call.

A rung has room for so many tokens, wanted logits and pieces of attention; a step that fits is padded up to it.  Padding
tokens write nowhere, padding items have no rows, and no row depends on another: so the bits are those without graphs.
A graph knows the addresses that its kernels work on, which therefore stay: inputs of the ladder's own, and activations
that are given up only together with the graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.kernels.triton.inputs import Inputs, Prepared, Sizes, Step

TABLE = 1024  # blocks of a token's table that there is room for, on average

Launch = Callable[[Step], torch.Tensor]


def rungs(most: int) -> list[int]:
    """Numbers of tokens: 1, 2, 4, 8, then in steps of 8 and later of an eighth, so that little is computed in vain."""
    sizes, n = [1, 2, 4], 8
    while n < most:
        sizes.append(n)
        n += max(8, n // 64 * 8)
    return [s for s in sizes if s < most] + [most]


@dataclass(frozen=True)
class Rung:
    """A size, and the step's record where there is one."""

    sizes: Sizes
    graph: torch.cuda.CUDAGraph | None
    logits: torch.Tensor | None


class Ladder:
    """Owns: the rungs and their inputs.

    Promises: a step that fits no rung is left to others; on the CPU the rungs are padded steps without graphs.
    """

    def __init__(self, device: torch.device, groups: int, most: int) -> None:
        self.device = device
        self.inputs = Inputs(device)
        self.sizes = [Sizes(n, n, (4 * n + 16,) * groups, (n + 8,) * groups, n * TABLE * groups) for n in rungs(most)]
        self.inputs.reserve(self.sizes[-1])
        self.rungs: list[Rung] = []

    def build(self, launch: Launch, progress: Callable[[int, int], None] | None = None) -> None:
        """Records all rungs, the largest first, whose memory the others share."""
        on_gpu = self.device.type == "cuda"
        pool = torch.cuda.graph_pool_handle() if on_gpu else None
        made: list[Rung] = []
        for sizes in reversed(self.sizes):
            if on_gpu:
                made.append(self._record(sizes, launch, pool))
            else:
                made.append(Rung(sizes, None, None))
            if progress:
                progress(len(made), len(self.sizes))
        self.rungs = made[::-1]

    def _record(self, sizes: Sizes, launch: Launch, pool: object) -> Rung:
        self.inputs.packed.zero_()
        step = self.inputs.step(sizes)
        for group in step.groups:
            group.blocks.fill_(-1)
        launch(step)  # whatever is compiled or set up at first use must not be recorded
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = launch(step)
        return Rung(sizes, graph, logits)

    def run(self, prepared: Prepared, launch: Launch) -> torch.Tensor | None:
        """The logits of a step on the smallest rung that holds it; None if none does."""
        for rung in self.rungs:
            if rung.sizes.hold(prepared.sizes):
                step = self.inputs.send(prepared, rung.sizes)
                if rung.graph is None:
                    return launch(step)[: prepared.sizes.logits]
                rung.graph.replay()
                assert rung.logits is not None
                return rung.logits[: prepared.sizes.logits]
        return None
