"""A server of OpenAI's shape that answers from a script, with the delays that a test asks for."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Script:
    """How one request is answered: a status other than 200 with ``error``, or tokens with the delay before each.

    ``cut``: the connection is closed after so many tokens.  ``split``: bytes are sent so many at a time.
    """

    tokens: int = 4
    first: float = 0.0
    gap: float = 0.0
    status: int = 200
    error: str = ""
    headers: str = ""
    cut: int | None = None
    split: int | None = None
    close: bool = False
    cached: int = 0
    fingerprint: str | None = None


Answer = Callable[[int, dict[str, Any]], Script]


@dataclass
class FakeServer:
    """Owns: a listening socket, on an event loop of its own thread; remembers what it was asked."""

    answer: Answer = lambda number, body: Script(tokens=body["max_tokens"])
    seen: list[tuple[float, str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    most_open: int = 0

    def __enter__(self) -> FakeServer:
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.die()

    def die(self) -> None:
        """At once, and every connection with it."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
            self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, path, _, body in self.seen if path.endswith("completions")]

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._run(ready))
        self._loop.close()

    async def _run(self, ready: threading.Event) -> None:
        self._stopped = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stopped.wait()
        server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self._writers.add(writer)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        path = first.split()[1]
        body = json.loads(await reader.readexactly(int(headers.get("content-length", 0))) or b"{}")
        self.seen.append((time.perf_counter(), path, headers, body))
        if path == "/v1/models":
            return _plain(writer, 200, {"data": [{"id": "fake"}]})
        if path == "/tokenize":
            return _plain(writer, 200, {"tokens": [len(word) for word in body["prompt"].split()]})
        if not path.endswith("completions"):
            return _plain(writer, 404, {"detail": "Not Found"})
        script = self.answer(len(self.bodies) - 1, body)
        if script.status != 200:
            return _plain(writer, script.status, {"error": {"message": script.error}}, script.headers)
        return await _stream(writer, script, "chat" in path, body)


def _plain(writer: asyncio.StreamWriter, status: int, body: dict[str, Any], headers: str = "") -> bool:
    data = json.dumps(body).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n{headers}\r\n".encode() + data)
    return True


async def _stream(writer: asyncio.StreamWriter, script: Script, chat: bool, body: dict[str, Any]) -> bool:
    ending = "Connection: close\r\n" if script.close else "Transfer-Encoding: chunked\r\n"
    writer.write(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{ending}\r\n".encode())

    async def send(event: str) -> None:
        data = f"data: {event}\n\n".encode()
        whole = data if script.close else b"%x\r\n%b\r\n" % (len(data), data)
        step = script.split or len(whole)
        for at in range(0, len(whole), step):
            writer.write(whole[at : at + step])
            if script.split:
                await writer.drain()
                await asyncio.sleep(0)

    if chat:
        await send(json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
    for i in range(script.tokens):
        if script.cut == i:
            return False
        await asyncio.sleep(script.gap if i else script.first)
        choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
        end = "length" if i == script.tokens - 1 else None
        await send(json.dumps({"choices": [{"index": 0, "finish_reason": end, **choice}]}))
    prompt = body.get("prompt") or body["messages"][0]["content"]
    usage = {
        "prompt_tokens": len(prompt.split() if isinstance(prompt, str) else prompt),
        "completion_tokens": script.tokens,
        "prompt_tokens_details": {"cached_tokens": script.cached},
    }
    await send(json.dumps({"choices": [], "usage": usage, "system_fingerprint": script.fingerprint}))
    await send("[DONE]")
    if not script.close:
        writer.write(b"0\r\n\r\n")
    return not script.close
