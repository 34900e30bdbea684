"""``octavo bench serve``: a load on a server that speaks OpenAI's API, and what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octavo.cli.console import columns, rows
from octavo.errors import ConfigError, EngineError
from octavo.loadgen.asking import Asker, served_model, word_ids
from octavo.loadgen.config import LoadConfig
from octavo.loadgen.drive import Drive, Limits, warm
from octavo.loadgen.figures import Figures, Goals, draw
from octavo.loadgen.http import Address, Client
from octavo.loadgen.prompts import WORDS, Writer
from octavo.loadgen.traffic import Lengths, Planned, Prefixes, drawn, limited, traced
from octavo.server.fingerprint import Fingerprint

SPARE_FILES = 64
INTERRUPTED = 130


def run(url: str, load: dict[str, Any]) -> int:
    """Returns the exit code: 0, 1 if the server failed a request, 130 after Ctrl-C."""
    config = LoadConfig(**load)
    goals = None if config.goodput is None else Goals.of(config.goodput)
    _raise_file_limit((config.places or 1024) + SPARE_FILES)
    key = config.api_key or os.environ.get("OCTAVO_API_KEY", "").split(",")[0].strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    client = Client(Address.of(url), headers)
    drive, model = asyncio.run(_measure(config, client))
    figures = Figures.of(drive, goals)
    _print(figures, _fingerprint(drive))
    _keep(config, url, model, figures, drive)
    if drive.gone is not None:
        raise EngineError(f"{client.address} has gone: {drive.gone}; the figures are of what was measured until then")
    if drive.stopped:
        print("stopped: the figures are of what was measured until then", file=sys.stderr)
        return INTERRUPTED
    return 1 if figures.faults or not figures.done else 0


async def _measure(config: LoadConfig, client: Client) -> tuple[Drive, str]:
    model = config.model or await served_model(client)
    asker = Asker(client, model, config.chat, config.body())
    vocabulary: Any = WORDS
    if config.token_ids:
        vocabulary = range(config.vocab) if config.vocab else await word_ids(client, model, WORDS)
    writer = Writer(vocabulary, config.seed, config.prefix_tokens, config.scale)
    shape = Planned(0, None, min(config.prompt, 128), config.output)
    for record in await warm(asker, writer, config.warmup, shape, config.time_limit):
        if not record.whole:
            raise EngineError(f"{client.address} failed a first request: {record.failure}: {record.error}")
    drive = Drive(asker, writer, _requests(config), Limits(config.places, config.duration, config.time_limit))
    with _interruptible(drive), _Progress(drive, config.count):
        await drive.run()
    client.close()
    return drive, model


def _requests(config: LoadConfig) -> Iterator[Planned]:
    if config.trace is not None:
        source = traced(Path(config.trace), config.speed, config.scale)
    else:
        lengths = Lengths(config.prompt, config.output, config.spread)
        source = drawn(config.seed, lengths, Prefixes(config.prefixes, config.prefix_share), config.rate)
    return limited(source, config.count, config.context)


def _raise_file_limit(wanted: int) -> None:
    """As many open files as there will be connections, if the system lets us."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@contextlib.contextmanager
def _interruptible(drive: Drive) -> Iterator[None]:
    """Ctrl-C ends the run with what was measured; a second one ends the program."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        drive.stop()

    try:
        loop.add_signal_handler(signal.SIGINT, stop)
    except (NotImplementedError, RuntimeError, ValueError):  # no such handlers here, or not the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Progress:
    """Owns: a bar on stderr, if that is a terminal, drawn from the drive a few times a second."""

    def __init__(self, drive: Drive, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        columns = [TextColumn("requests"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[note]}")]
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal, auto_refresh=False
        )
        self._drive = drive
        self._task = self._bar.add_task("requests", total=total, note="")

    def __enter__(self) -> None:
        self._drawing: asyncio.Task[None] | None = None
        if not self._bar.disable:  # a bar that is off would still end with an empty line
            self._bar.start()
            self._drawing = asyncio.ensure_future(self._draw())

    def __exit__(self, *_: object) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            self._show()
            self._bar.stop()

    async def _draw(self) -> None:
        while True:
            self._show()
            await asyncio.sleep(0.25)

    def _show(self) -> None:
        drive = self._drive
        tokens = sum(r.output_tokens for r in drive.records)
        failed = sum(r.failure is not None for r in drive.records)
        note = f"{len(drive.running):,} running, {tokens / max(drive.seconds, 0.001):,.0f} tokens/s"
        self._bar.update(self._task, completed=drive.done, note=note + (f", {failed:,} failed" if failed else ""))
        self._bar.refresh()


def _fingerprint(drive: Drive) -> str | None:
    """What the server computes with, if it says."""
    return next((r.fingerprint for r in drive.records if r.fingerprint), None)


def _print(figures: Figures, fingerprint: str | None) -> None:
    told = Fingerprint.parse(fingerprint or "")
    given_up = told is not None and told.compute == "cublas"
    rows([*figures.rows(), *([("gemm", "cublas: bytes depend on the batch")] if given_up else [])])
    print()
    columns(figures.table())
    if figures.lag is not None and figures.lag.p99 > 50:
        print("\nThis machine sent requests late: the load was less even than it was meant to be.", file=sys.stderr)


def _keep(config: LoadConfig, url: str, model: str, figures: Figures, drive: Drive) -> None:
    if config.json is not None:
        asked = {**asdict(config), "url": url, "model": model}
        del asked["api_key"]
        report = {
            "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "asked": asked,
            "system_fingerprint": _fingerprint(drive),
            **figures.report(drive.records, drive.began),
        }
        try:
            Path(config.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the figures can't be written to {config.json}: {error.strerror}", "json") from None
        print(f"\nall figures: {config.json}")
    if config.plots is not None:
        draw(Path(config.plots), figures, drive.records, drive.began)
