"""Progress bars: loading, and a batch being answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.core.request import Request
from octavo.engine.stats import Counters

Told = Callable[[str, int, int], None]


def _columns() -> list[Any]:
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    return [
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    ]


@contextmanager
def load_bar(shown: bool) -> Iterator[Told | None]:
    """A bar on stderr that hears (stage, done, of); None when it is not wanted."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(*_columns(), console=Console(stderr=True))
    tasks: dict[str, Any] = {}

    def told(stage: str, done: int, total: int) -> None:
        if not tasks:
            bar.start()
        if stage not in tasks:
            tasks[stage] = bar.add_task(stage, total=total, note="")
        bar.update(tasks[stage], completed=done, total=total)

    try:
        yield told
    finally:
        if tasks:  # a bar that never started would still end with an empty line
            bar.stop()


class Bar:
    """Owns: a bar over the requests of one call.  Promises: costs nothing when it is not shown."""

    def __init__(self, shown: bool, requests: int) -> None:
        self._shown = shown
        self._total = requests
        self._bar: Any = None
        self._last = 0.0

    def __enter__(self) -> Bar:
        if self._shown:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(*_columns(), console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("generating", total=self._total, note="")
        return self

    def update(self, requests: Sequence[Request], counters: Counters) -> None:
        if self._bar is None:
            return
        now = self._bar.get_time()
        done = sum(r.finished for r in requests)
        if now - self._last < 0.1 and done < len(requests):
            return
        self._last = now
        tokens = sum(len(s.tokens) - s.prompt_length for r in requests for s in r.branches)
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = f"{tokens} tokens, {tokens / elapsed:.0f}/s" if elapsed else f"{tokens} tokens"
        self._bar.update(self._task, completed=done, note=rate)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
