"""Where requests are replayed: in this process, or on a server that runs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple, Protocol

from starlette.types import ASGIApp, Message, Scope

from octavo.errors import EngineError
from octavo.loadgen.asking import served_model
from octavo.loadgen.http import Broken, Client


class Answer(NamedTuple):
    """``body`` is what came, whole."""

    status: int
    body: bytes
    stream: bool


class Target(Protocol):
    """Something that answers as the server does."""

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Raises EngineError if there is no answer."""


class InProcess:
    """The server's application, called as a web server would call it: every route, check and guide, but no socket."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """The client stays until its answer is whole."""
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        over = asyncio.Event()
        status, stream = 500, False
        pieces: list[bytes] = []

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, stream
            if message["type"] == "http.response.start":
                status = message["status"]
                stream = _streams(dict(message["headers"]).get(b"content-type", b"").decode())
            else:
                pieces.append(message.get("body", b""))

        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": None,
            "server": None,
        }
        try:
            await self.app(scope, receive, send)
        finally:
            over.set()
        return Answer(status, b"".join(pieces), stream)


class Remote:
    """A server behind a URL."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        pieces: list[bytes] = []
        try:
            reply = await self.client.exchange(method, path, body, pieces.append)
        except Broken as error:
            raise EngineError(f"{self.client.address}: {error}") from None
        return Answer(reply.status, b"".join(pieces) or reply.body, _streams(reply.headers.get("content-type", "")))

    async def model(self) -> str:
        """What the server calls its model."""
        return await served_model(self.client)


def _streams(content_type: str) -> bool:
    return content_type.startswith("text/event-stream")


async def fingerprint_of(target: Target) -> str:
    """Raises EngineError if it doesn't tell."""
    answer = await target.ask("GET", "/version")
    try:
        return str(json.loads(answer.body)["system_fingerprint"])
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"/version tells no system_fingerprint (status {answer.status}): is it Octavo?") from None


def told(answer: Answer) -> Any:
    """The error's message of an answer that is none."""
    try:
        return json.loads(answer.body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        return answer.body[:200].decode("utf-8", "replace")
