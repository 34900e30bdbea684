"""The processes of a tensor-parallel engine besides this one: started, spoken to, watched, ended."""

from __future__ import annotations

import logging
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from octavo.errors import EngineError

log = logging.getLogger("octavo.execute")

LAST_WORDS = 2.0  # seconds to find out why an exchange failed: a process that dies is seen dead a moment later
PATIENCE = 60  # seconds that a worker gets to take a message
TICK = 0.1  # seconds between looks at the time
FAREWELL = 5.0  # seconds that a process gets to end by itself


class Team:
    """Owns: the worker processes, a pipe to each, the folder in which ranks meet.

    Promises: a worker that dies, or tells that it failed, is an EngineError that says which and why, from whatever
    waits for it; none outlives this process, whose end closes the pipes.
    """

    def __init__(self, size: int, module: str, order: Callable[[int, Path], Any]) -> None:
        """``order``: what the worker of a rank is sent first; ``module`` is run with the pipe's descriptor."""
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-ranks-")
        self.folder = Path(self._folder.name)
        self.lost: str | None = None
        self.on_loss: Callable[[], None] = lambda: None
        self._closing = False
        self._until: float | None = None
        self._ear = threading.Lock()
        self._workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        for rank in range(1, size):
            here, there = socket.socketpair()
            # A plan may be larger than what waits unread: who stands still is not waited for here either.
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE, 0))
            command = [sys.executable, "-m", module, str(there.fileno())]
            # In a session of its own, so that a terminal's Ctrl-C is for this process alone.
            process = subprocess.Popen(
                command, pass_fds=[there.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            there.close()
            self._workers.append((process, Connection(here.detach())))
            threading.Thread(target=self._watch, args=(rank, process), name=f"octavo-rank-{rank}", daemon=True).start()
        threading.Thread(target=self._keep_time, name="octavo-ranks", daemon=True).start()
        for rank, (_, pipe) in enumerate(self._workers, 1):
            self._send(pipe, pickle.dumps(order(rank, self.folder)))

    def tell(self, message: Any) -> None:
        """The same to all workers."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for _, pipe in self._workers:
            self._send(pipe, data)

    def hear(self) -> list[Any]:
        """A message from each worker, in the order of ranks."""
        return [self._receive(rank, pipe) for rank, (_, pipe) in enumerate(self._workers, 1)]

    def check(self) -> None:
        """Raises EngineError if a worker is gone."""
        if self.lost is not None:
            raise self._gone()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """What is done in here takes no longer, or else another rank is given up: NCCL would wait for it for ever."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None

    def failure(self, error: BaseException) -> EngineError:
        """Why an exchange with the others failed, as far as can be found out."""
        log.info("an exchange failed: %s: %s", type(error).__name__, error)
        until = time.monotonic() + LAST_WORDS
        while self.lost is None and time.monotonic() < until:
            for rank, (_, pipe) in enumerate(self._workers, 1):
                self._listen(rank, pipe)
            time.sleep(0.01)
        if self.lost is None:
            self.lost = f"rank 0 of {self.size} failed, or another does not answer: {type(error).__name__}: {error}"
        return self._gone()

    def close(self, farewell: float = FAREWELL) -> None:
        """End the workers; by force those that do not end by themselves within so many seconds."""
        self._closing = True
        for _, pipe in self._workers:
            try:
                pipe.send(("close", None))
            except OSError:
                pass
            pipe.close()
        until = time.monotonic() + (farewell if self.lost is None else 0.1)
        for process, _ in self._workers:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._folder.cleanup()

    def _send(self, pipe: Connection, data: bytes) -> None:
        self.check()
        try:
            pipe.send_bytes(data)
        except OSError as error:
            raise self.failure(error) from None

    def _receive(self, rank: int, pipe: Connection) -> Any:
        while self.lost is None:
            try:
                with self._ear:
                    kind, what = pipe.recv() if pipe.poll(0.05) else ("", None)
            except (EOFError, OSError) as error:
                raise self.failure(error) from None
            if kind == "failed":
                self.lost = f"rank {rank} of {self.size} failed: {what}"
            elif kind:
                return what
        raise self._gone()

    def _listen(self, rank: int, pipe: Connection) -> None:
        """Take a worker's last words."""
        with self._ear:
            try:
                while pipe.poll():
                    kind, what = pipe.recv()
                    if kind == "failed":
                        self.lost = f"rank {rank} of {self.size} failed: {what}"
            except (EOFError, OSError):
                pass  # its process tells more

    def _keep_time(self) -> None:
        while not self._closing:
            time.sleep(TICK)
            until = self._until
            if until is not None and time.monotonic() > until and self.lost is None:
                self.lost = f"another rank than 0 of {self.size} does not answer"
                log.error("%s", self.lost)
                self.on_loss()

    def _gone(self) -> EngineError:
        return EngineError(f"{self.lost}; the others end, and the engine has to be started anew")

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._closing:
            return
        time.sleep(0.1)  # what it told before it ended says more than its exit code
        self._listen(rank, self._workers[rank - 1][1])
        if self.lost is None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.lost = f"rank {rank} of {self.size} died ({how})"
        log.error("%s", self.lost)
        self.on_loss()
