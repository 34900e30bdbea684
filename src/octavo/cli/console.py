"""How the commands talk: the log, tables of two columns, sizes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence


class _Compact(logging.Formatter):
    """``engine: what it decided``; warnings say that they are."""

    def format(self, record: logging.LogRecord) -> str:
        part = record.name.removeprefix("octavo.")
        start = part if record.levelno < logging.WARNING else record.levelname.lower()
        text = f"{start}: {record.getMessage()}"
        # What nobody expected is told whole: a server goes on after it, and its log is all there is.
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def show_log(verbose: bool) -> None:
    """Octavo's log on stderr: warnings always, what the engine decides with ``verbose``."""
    log = logging.getLogger("octavo")
    for old in [h for h in log.handlers if isinstance(h.formatter, _Compact)]:
        log.removeHandler(old)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Compact())
    log.addHandler(handler)
    log.setLevel(logging.INFO if verbose else logging.WARNING)
    log.propagate = False


def rows(pairs: Iterable[tuple[str, object]], indent: str = "") -> None:
    """Prints a table of a name and what belongs to it; a further line of it is set under the first."""
    items = [(name, str(value)) for name, value in pairs]
    width = max(len(name) for name, _ in items)
    for name, value in items:
        first, *more = value.splitlines() or [""]
        print(f"{indent}{name:<{width}}  {first}".rstrip())
        for line in more:
            print(f"{indent}{'':<{width}}  {line}")


def columns(lines: Iterable[Sequence[str]]) -> None:
    """Prints a table: the first column to the left, the others to the right."""
    table = list(lines)
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for line in table:
        cells = [c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())


def counted(number: int, thing: str) -> str:
    """``1 request``, ``2,048 requests``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")
