"""The file of receipts: requests with their answers, for ``octavo replay`` to run again and compare.

A line is a JSON object:

- ``octavo``: the version; ``time``, ``request_id``, ``path``
- ``model``: as the server was told it; ``settings``: the server's, where they decide how an answer is told
- ``system_fingerprint``
- ``request``: the body as it came; ``filled``: what it left open and its answer depends on, a drawn seed for one
- ``response``: the answer; a stream's is joined
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import queue
import stat
import threading
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError
from octavo.server.joining import JOINERS

log = logging.getLogger("octavo.server")

MOST_WAITING = 1024  # receipts that the disk may be behind by


@dataclass(frozen=True)
class Exchange:
    """One whole answer as it went over the wire; ``about`` is what a receipt's line begins with."""

    about: dict[str, Any]
    request: bytes
    filled: dict[str, Any]
    answer: bytes
    stream: bool

    def line(self) -> bytes:
        """The receipt.  A line that is cut off is no JSON, so that it can be told."""
        if self.stream:
            response = JOINERS[self.about["path"]](events(self.answer))
        else:
            response = json.loads(self.answer)
        receipt = {**self.about, "request": json.loads(self.request), "filled": self.filled, "response": response}
        return json.dumps(receipt, separators=(",", ":")).encode() + b"\n"


def events(data: bytes) -> list[dict[str, Any]]:
    """The data of server-sent events, without the closing [DONE]."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


class Receipts:
    """Owns: the file, and the thread that writes it.

    Promises: ``put`` never waits; a line is written whole, or taken back, or can be told to be cut off; a full disk is
    logged once and costs receipts, never an answer; the file is only ever appended to, by one server at a time, and
    nobody but its owner may read a new one.
    """

    def __init__(self, path: str) -> None:
        """Raises ConfigError if the file can't be written."""
        self.path = path
        self.written = self.lost = 0
        self._failing = False
        self._file, self._size = _opened(path)
        self._queue: queue.Queue[Exchange | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write_all, name="octavo-receipts", daemon=True)
        self._thread.start()
        log.warning("recording: prompts and answers are written to %s%s", path, _readers(self._file))

    def put(self, exchange: Exchange) -> None:
        try:
            self._queue.put_nowait(exchange)
        except queue.Full:
            self._failed("the disk is too slow")

    def close(self) -> None:
        """Write what waits."""
        self._queue.put(None)
        self._thread.join()
        os.close(self._file)

    def __enter__(self) -> Receipts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (exchange := self._queue.get()) is not None:
            try:
                self._write(exchange.line())
            except OSError as error:
                self._failed(error.strerror or str(error))
            except Exception:  # a fault of ours must not end the thread
                log.exception("a receipt could not be made")
                self.lost += 1

    def _write(self, line: bytes) -> None:
        try:
            done = os.write(self._file, line)
            while done < len(line):
                done += os.write(self._file, line[done:])
        except OSError:
            os.ftruncate(self._file, self._size)  # the part that did fit: the next line begins where this one did
            raise
        self._size += len(line)
        self.written += 1
        if self._failing:
            self._failing = False
            log.warning("receipts are written again; %d were lost", self.lost)

    def _failed(self, why: str) -> None:
        self.lost += 1
        if not self._failing:
            self._failing = True
            log.error("receipts are lost, %s cannot be written: %s; the service goes on", self.path, why)


def _opened(path: str) -> tuple[int, int]:
    """A descriptor that appends, and the file's size; a line that an earlier server left cut off is closed."""
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"receipts cannot be written to {path}: {error.strerror}", "record") from None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ConfigError(f"receipts cannot be written to {path}: it is no regular file", "record")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            size += os.write(file, b"\n")
        return file, size
    except BlockingIOError:
        os.close(file)
        raise ConfigError(f"receipts cannot be written to {path}: another server records there", "record") from None
    except OSError as error:
        os.close(file)
        raise ConfigError(f"receipts cannot be written to {path}: {error.strerror}", "record") from None
    except ConfigError:
        os.close(file)
        raise


def _readers(file: int) -> str:
    mode = stat.S_IMODE(os.fstat(file).st_mode)
    return f", which others may read (mode {mode:o})" if mode & 0o044 else ""
