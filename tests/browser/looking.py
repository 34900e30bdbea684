"""What the browser's tests share: servers worth looking at, and waiting for a page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from serving import Served, scripted, served

SHOTS = Path(__file__).parents[2] / "build" / "browser"  # what the pages looked like

PROMPT = "Tell of the sea, please, and of the old map that was found in a book: "
STORY = "The sea is wide and deep, and salt, and nobody has counted its waves. " * 4
ANSWERS = {"sea": STORY, "again": "Once more.", **{f"q{i}": f"Answer {i}. " * 30 for i in range(80)}}


def come_true(page: Any, expression: str, seconds: float = 20.0) -> None:
    """Wait for it; by evaluating from outside, since the page's policy lets nobody evaluate text inside."""
    end = time.monotonic() + seconds
    asked = f"() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }}"
    while not page.evaluate(asked):
        assert time.monotonic() < end, f"never came true: {expression}"
        page.wait_for_timeout(15)


@contextmanager
def paced(
    patch: pytest.MonkeyPatch, step: float = 0.012, settings: Any = None, keys: Any = None, **rig: Any
) -> Iterator[Served]:
    """A server with a scripted engine whose steps take some time, as with a model."""
    with scripted(ANSWERS, patch, **{"swap": 24, "pool": 240, **rig}) as (llm, _, steps):
        run = steps._run

        def slow(plan: Any) -> Any:
            time.sleep(step)
            return run(plan)

        steps._run = slow
        with served(llm, settings, keys, model="scripted-sea") as running:
            yield running
