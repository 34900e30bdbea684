"""llama.cpp's server, run beside Octavo on the same file and the same loads."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.bench import Ask, Measured


@dataclass(frozen=True)
class Setup:
    """How the server shares its cache: parallel slots, and whether each has a KV cache of its own."""

    slots: int
    split: bool

    def __str__(self) -> str:
        return f"{self.slots} slot{'s' * (self.slots > 1)}, {'a KV cache each' if self.split else 'one KV cache'}"


class Server:
    """Owns: one server process.  Promises: it is gone when the block is left."""

    def __init__(self, binary: Path, model: Path, threads: int, context: int, setup: Setup) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["-t", str(threads), "-tb", str(threads), "-np", str(setup.slots), "-c", str(context)]
        self.command += ["-b", "2048", "-ub", "512", "-fa", "on", "-cb", "--cache-prompt", "--no-ui"]
        self.command += ["-ctk", "f16", "-ctv", "f16", "--no-kv-unified" if setup.split else "--kv-unified"]

    def __enter__(self) -> Server:
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 120
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise SystemExit(f"error: the peer's server ended with {self.process.returncode}: {self.command[0]}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.02)
        self.__exit__()
        raise SystemExit("error: the peer's server was not ready within two minutes")

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def measure(self, load: Sequence[Ask]) -> Measured:
        """Runs a load, all requests at once; a single one is streamed, to see its first token."""
        return self._stream(load[0]) if len(load) == 1 else self._many(load)

    def _stream(self, ask: Ask) -> Measured:
        began = time.perf_counter()
        first, final = None, {}
        for line in self._post(ask, stream=True):
            if line.startswith(b"data: "):
                final = json.loads(line[6:])
                first = first or time.perf_counter() - began
        seconds = time.perf_counter() - began
        return Measured(len(ask.prompt), final["tokens_predicted"], seconds, first)

    def _many(self, load: Sequence[Ask]) -> Measured:
        tokens = [0] * len(load)
        ready = threading.Barrier(len(load) + 1)

        def one(i: int) -> None:
            ready.wait()
            tokens[i] = json.loads(self._post(load[i], stream=False).read())["tokens_predicted"]

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(load))]
        for thread in threads:
            thread.start()
        ready.wait()
        began = time.perf_counter()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - began
        if sum(tokens) != sum(ask.max_tokens for ask in load):
            raise SystemExit(f"error: the peer gave {sum(tokens)} tokens instead of all that were asked for")
        return Measured(sum(len(ask.prompt) for ask in load), sum(tokens), seconds)

    def _post(self, ask: Ask, stream: bool) -> Any:
        body = {"prompt": ask.prompt, "n_predict": ask.max_tokens, "ignore_eos": True, "cache_prompt": True}
        body |= {"temperature": 0, "top_k": 1, "samplers": ["top_k"], "stream": stream}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"error: the peer refused a request: {response.read()[:300]!r}")
        return response


def version(binary: Path) -> str:
    said = subprocess.run([str(binary), "--version"], capture_output=True, text=True, check=False)
    lines = (said.stdout + said.stderr).splitlines()
    return next((line for line in lines if line.startswith("version")), "unknown")
