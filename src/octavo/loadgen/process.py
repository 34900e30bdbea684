"""A server in a process of its own, on a port of its own, as users start it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from octavo.errors import EngineError

READY = re.compile(r"^serving (\S+) at (http://\S+)$", re.MULTILINE)


class ServerProcess:
    """Owns: one server process.

    Promises: it is up when the block is entered and gone when it is left; EngineError, with its log, if
    it does not start.
    """

    def __init__(self, model: str | Path, *options: str, env: dict[str, str] | None = None) -> None:
        self.command = [sys.executable, "-m", "octavo", "serve", str(model), "--port", "0", *options]
        self._env = {**os.environ, **(env or {})}

    def __enter__(self) -> ServerProcess:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=self._env
        )
        end = time.monotonic() + 120
        while time.monotonic() < end:
            ready = READY.search(self.log())
            if ready:
                self.model, self.url = ready[1], ready[2]
                if self._answers():
                    return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.kill()
        raise EngineError(f"the server did not start: {self.log()}")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        self._log.close()

    def kill(self) -> None:
        """Without a chance to put anything in order."""
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        """All that it has said so far."""
        self._log.seek(0)
        return self._log.read()

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def metrics(self) -> dict[str, float]:
        """Every sample by its name, labels included."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}

    def resident(self) -> int:
        """Bytes of memory that the process holds."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _answers(self) -> bool:
        try:
            self.get("/health")
        except OSError:
            return False
        return True
