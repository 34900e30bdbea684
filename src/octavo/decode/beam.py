"""Beam search over candidates, by the rules of Hugging Face transformers (5.x) for scores and stopping.

Pure: knows tokens and log-probabilities, no blocks.  Each round takes the best candidates of every running beam and
says which beams go on, from which parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Candidates = Sequence[tuple[int, float]]  # (token, log-probability), best first

NEVER = -1.0e9


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output: its tokens, and the sum of its log-probabilities over length^length_penalty."""

    tokens: tuple[int, ...]
    score: float


@dataclass(frozen=True, slots=True)
class Child:
    """A beam of the next round: it continues running beam ``parent`` with ``token``."""

    parent: int
    token: int
    score: float


@dataclass
class BeamSearch:
    """Owns: the running beams' tokens and scores, and the finished hypotheses.

    Promises: the same sequences and scores as transformers' ``generate(num_beams=width, do_sample=False)``.

    - ``ends``: tokens that finish a beam; ``most``: tokens after which every beam finishes
    - ``early_stopping``: True ends once ``width`` hypotheses are finished; False ends when the best running beam, at
      its present length, cannot beat the worst finished one; "never" when it could not at any length
    """

    width: int
    most: int
    ends: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    running: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    scores: list[float] = field(default_factory=lambda: [0.0])
    finished: list[Hypothesis] = field(default_factory=list)
    length: int = 0
    done: bool = False
    improvable: bool = True  # a running beam might still beat a finished one

    @property
    def kept(self) -> int:
        """Candidates to take from each beam: enough for ``width`` to go on even if the best all end."""
        return max(2, 1 + len(self.ends)) * self.width

    def advance(self, candidates: Sequence[Candidates]) -> list[Child]:
        """One round; ``candidates[i]`` are running beam i's.  Returns the next running beams, [] when it is done."""
        ranked = [
            Child(parent, token, self.scores[parent] + logprob)
            for parent, best in enumerate(candidates)
            for token, logprob in best
        ]
        ranked.sort(key=lambda c: -c.score)  # stable: equal scores stay in the order of parent and rank
        ranked = ranked[: self.kept]
        self.length += 1
        full = self.length >= self.most
        ending = [full or c.token in self.ends for c in ranked]
        self._finish([c for c, end in zip(ranked[: self.width], ending, strict=False) if end])
        going = [c for c, end in zip(ranked, ending, strict=True) if not end][: self.width]
        # With nothing to go on, transformers looks at the best ended candidate instead, pushed below all others.
        best = going[0].score if going else (ranked[0].score if ranked else 0.0) + NEVER
        self._judge(best)
        open_beam = not (len(self.finished) >= self.width and self.early_stopping is True)
        self.done = not (self.improvable and open_beam and going)
        self.running = [(*self.running[c.parent], c.token) for c in going]
        self.scores = [c.score for c in going]
        return [] if self.done else going

    def _finish(self, ended: Sequence[Child]) -> None:
        if not self.improvable or (self.early_stopping is True and len(self.finished) >= self.width):
            return
        for child in ended:
            tokens = (*self.running[child.parent], child.token)
            self.finished.append(Hypothesis(tokens, child.score / self.length**self.length_penalty))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]

    def _judge(self, best: float) -> None:
        """Whether the best running score could still beat the worst finished one."""
        length = self.length
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.most
        possible = best / length**self.length_penalty
        # An unfinished place counts as -1e9, so that anything beats it.
        worst = self.finished[-1].score if len(self.finished) == self.width else NEVER
        self.improvable = self.improvable and possible > worst
