"""Time, passed in from outside: the real clock, or one that a simulation moves."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""


class RealClock:
    def now(self) -> float:
        return time.perf_counter()


class SimulatedClock:
    """Moves only when told to."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds
