"""HTTP/1.1 as a load generator needs it: a thousand streams on one core, each piece of an answer with its time.

A protocol on the event loop's own callbacks instead of a general client: what a client spends on a token would be
measured as the server's.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from octavo.errors import ConfigError

HEAD_LIMIT = 64 * 1024
PLAIN_LIMIT = 4 * 1024 * 1024
READ = 16 * 1024

Take = Callable[[bytes], None]


class Broken(Exception):
    """The exchange failed below HTTP or against its rules; ``kind`` is a short name to count it by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """Where a server is: ``path`` is what comes before ``/v1``."""

    host: str
    port: int
    secure: bool = False
    path: str = ""

    @classmethod
    def of(cls, url: str) -> Address:
        """From ``http://host:port``, with or without ``/v1`` behind it; ``host:port`` alone is http."""
        whole = url if "://" in url else f"http://{url}"
        try:
            parts = urlsplit(whole)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL: {error}", "url") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url!r} is no URL of a server: give one such as http://127.0.0.1:8000", "url")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if secure else 80), secure, path)

    @property
    def named(self) -> str:
        """The Host header: the port only where it isn't the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.secure else 80) else f"{host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.named}{self.path}"


@dataclass
class Reply:
    """``body``: the whole body of an answer that nobody took piece by piece."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Client:
    """Owns: connections to one server, those in use and those at rest.

    Promises: a connection carries one exchange at a time; one that failed or was left midway is closed, never reused.
    """

    def __init__(self, address: Address, headers: Mapping[str, str] | None = None) -> None:
        self.address = address
        self._headers = {"Host": address.named, "User-Agent": "octavo-bench", **(headers or {})}
        self._resting: list[Connection] = []
        self._tls = ssl.create_default_context() if address.secure else None

    async def exchange(self, method: str, path: str, body: bytes = b"", take: Take | None = None) -> Reply:
        """One request and its whole answer.  ``take`` gets the pieces of a 2xx body as they come.

        Raises Broken: kind "connect" if nothing was reached, "cut off" if the answer isn't whole.
        """
        lines = [f"{method} {self.address.path}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in self._headers.items()]
        if body:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        while True:
            connection, rested = await self._connection()
            try:
                reply = await connection.exchange(head + body, take)
            except Broken:
                if rested and connection.silent:
                    continue  # the server had closed it while it rested; nothing of the request was answered
                raise
            finally:
                if connection.reusable:
                    self._resting.append(connection)
                else:
                    connection.close()
            return reply

    async def _connection(self) -> tuple[Connection, bool]:
        while self._resting:
            connection = self._resting.pop()
            if connection.reusable:
                return connection, True
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(
                Connection, self.address.host, self.address.port, ssl=self._tls, happy_eyeballs_delay=0.25
            )
        except OSError as error:
            raise Broken("connect", _reason(error)) from None
        return made, False

    def close(self) -> None:
        for connection in self._resting:
            connection.close()
        self._resting.clear()


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "the host's name is not known"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}"
    return error.strerror or str(error)


class Connection(asyncio.BufferedProtocol):
    """Owns: one socket and what came from it but is not yet understood.

    Promises: ``exchange`` ends exactly once: with the whole answer, with Broken, or cancelled.
    """

    def __init__(self) -> None:
        self._room = memoryview(bytearray(READ))  # to read into: fresh memory for each read costs more than the read
        self._buffer = bytearray()
        self._waiter: asyncio.Future[Reply] | None = None
        self._lost = False
        self.silent = True
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def exchange(self, data: bytes, take: Take | None) -> Reply:
        self.reusable, self.silent = False, True
        self._waiter = asyncio.get_running_loop().create_future()
        self._take = take
        self._reply: Reply | None = None
        self._left: int | None = None  # bytes to come of a body whose length is known
        self._chunked = False
        if self._lost:
            raise Broken("cut off", "the server closed the connection")
        self.transport.write(data)
        return await self._waiter

    def close(self) -> None:
        self.transport.abort()

    # ---- what comes from the socket --------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        if self._waiter is None or self._waiter.done():
            self.reusable = False  # bytes that nobody asked for
            return
        self.silent = False
        self._buffer += self._room[:nbytes]
        try:
            if self._reply is None and not self._head():
                return
            self._body()
        except Broken as error:  # from who takes the pieces
            self._fail(error.kind, str(error))
        except (ValueError, IndexError):
            self._fail("not HTTP", "the answer is not HTTP/1.1")

    def connection_lost(self, error: Exception | None) -> None:
        self._lost, self.reusable = True, False
        until_close = self._waiter is not None and getattr(self, "_reply", None) is not None
        if until_close and self._left is None and not self._chunked and error is None:
            self._end()
        else:
            self._fail("cut off", "the server closed the connection")

    def _fail(self, kind: str, message: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Broken(kind, message))

    def _end(self) -> None:
        if self._waiter is not None and not self._waiter.done() and self._reply is not None:
            keeps = self._left is not None or self._chunked
            self.reusable = keeps and not self._buffer and self._reply.headers.get("connection", "").lower() != "close"
            self._waiter.set_result(self._reply)

    def _head(self) -> bool:
        """Whether the head is whole; interim answers (1xx) are passed over."""
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > HEAD_LIMIT:
                    raise ValueError("head too long")
                return False
            first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
            del self._buffer[: end + 4]
            if not first.startswith("HTTP/1."):
                raise ValueError(first)
            status = int(first.split(" ", 2)[1])
            if status >= 200:
                break
        pairs = (line.partition(":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        self._reply = Reply(status, headers)
        self._chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        if status in (204, 304):
            self._left = 0
        elif not self._chunked and "content-length" in headers:
            self._left = int(headers["content-length"])
        return True

    def _body(self) -> None:
        if self._chunked:
            self._chunks()
            return
        piece = bytes(self._buffer) if self._left is None else bytes(self._buffer[: self._left])
        del self._buffer[: len(piece)]
        self._give(piece)
        if self._left is not None:
            self._left -= len(piece)
            if self._left == 0:
                self._end()

    def _chunks(self) -> None:
        """Whole chunks only: a server writes an event as one."""
        at = 0
        while True:
            end = self._buffer.find(b"\r\n", at)
            if end < 0:
                break
            size = int(self._buffer[at:end].split(b";")[0], 16)
            if size == 0:
                trailer = self._buffer.find(b"\r\n", end + 2)
                if trailer != end + 2 and self._buffer.find(b"\r\n\r\n", end) < 0:
                    break
                self._buffer.clear()
                self._end()
                return
            if len(self._buffer) < end + 2 + size + 2:
                break
            self._give(bytes(self._buffer[end + 2 : end + 2 + size]))
            at = end + 2 + size + 2
        del self._buffer[:at]

    def _give(self, piece: bytes) -> None:
        assert self._reply is not None
        if not piece:
            return
        if self._take is not None and self._reply.status < 300:
            self._take(piece)
        elif len(self._reply.body) < PLAIN_LIMIT:
            self._reply.body += piece
