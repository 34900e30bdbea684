"""How many tokens one step may compute: fixed, or chosen so that a step takes about a target time."""

from __future__ import annotations

from collections.abc import Callable

TARGET_SECONDS = 0.2
LOWEST, HIGHEST, FIRST = 64, 4096, 512


class TokenBudget:
    """Owns: the token budget of a step, and the measured tokens a second behind it.

    Promises: a fixed budget never changes.  The chosen one follows measured steps slowly, in powers of two, and each
    change is reported.  It changes when things are computed, never what is computed.
    """

    def __init__(
        self,
        fixed: int | None = None,
        target: float = TARGET_SECONDS,
        report: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.fixed = fixed
        self.target = target
        self.tokens = fixed or FIRST
        self.rate = 0.0
        self._report = report

    def step(self, running: int) -> int:
        """Tokens for the next step.  A chosen budget is about prompts: it never makes running decodes take turns."""
        return self.fixed or max(self.tokens, running + LOWEST)

    def measured(self, tokens: int, seconds: float) -> None:
        """A step computed so many tokens in so long; small steps say little about prefill and are ignored."""
        if self.fixed or tokens < LOWEST or seconds <= 0:
            return
        rate = tokens / seconds
        self.rate = rate if not self.rate else 0.7 * self.rate + 0.3 * rate
        wanted = max(LOWEST, min(HIGHEST, self.rate * self.target))
        # Change only when the wish is clearly outside the current power of two.
        if wanted >= 2.2 * self.tokens or wanted <= 0.7 * self.tokens:
            chosen = LOWEST
            while chosen * 2 <= wanted:
                chosen *= 2
            if chosen != self.tokens:
                self.tokens = chosen
                self._report(
                    f"prefill chunk {chosen} tokens: {self.rate:.0f} tokens/s measured, "
                    f"{self.target * 1000:.0f} ms a step wanted"
                )
