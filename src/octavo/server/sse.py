"""Server-sent events: an answer's pieces as they come, written without a detour."""

from __future__ import annotations

import asyncio
import json
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.answers import Answers, Piece
from octavo.server.errors import ApiError, as_api_error
from octavo.server.generation import ClientLeft

MARK = "\0"  # stands for a text that is still to come
DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Strict JSON, compact; NaN would be a fault of ours and raises."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """An event for clients that go by the names of events."""
    return b"event: " + name.encode() + b"\n" + event(value)


def around(body: Any) -> tuple[bytes, bytes]:
    """What stands before and after the text of an event, the one text in ``body`` that is MARK."""
    before, after = event(body).split(encode_basestring_ascii(MARK).encode())
    return before, after


def text_event(around: tuple[bytes, bytes], text: str) -> bytes:
    """An event that differs from others of its choice in its text alone: most of them do, so this is quick."""
    return around[0] + encode_basestring_ascii(text).encode() + around[1]


class Form(Protocol):
    """How one route writes an answer: chunks and whole answers differ only in where they are cut."""

    def first(self) -> bytes:
        """What is told before there is any piece, if something is."""
        return b""

    def chunk(self, piece: Piece) -> bytes:
        """An event (or none yet, b"") for one piece."""
        ...

    def last(self) -> bytes:
        """What follows the last piece, up to the stream's end."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """What follows in place of more pieces, up to the stream's end."""
        return event(error.body()) + DONE

    def whole(self, pieces: list[Piece]) -> dict[str, Any]: ...


class EventStream(Response):
    """Owns: a generation from its first piece to its end.

    Promises: one write for all that is new at a time; an error after the beginning is an event of its own, since the
    status is sent; the generation is ended however the connection ends.
    """

    def __init__(self, answers: Answers, form: Form) -> None:
        self.answers = answers
        self.form = form
        self.status_code = 200
        self.background = None
        self.raw_headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.answers.generation:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            # Waking a task walks through all that it awaits, the whole application; a task of its own is a short walk.
            # What middleware had to add is in the head: the pieces go straight to the connection.
            await asyncio.create_task(self._pieces(scope.get("octavo.send", send)))

    async def _pieces(self, send: Send) -> None:
        chunk = self.form.chunk
        begun = self.form.first()
        if begun:
            await send({"type": "http.response.body", "body": begun, "more_body": True})
        try:
            async for pieces in self.answers.pieces():
                data = chunk(pieces[0]) if len(pieces) == 1 else b"".join([chunk(piece) for piece in pieces])
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            data = self.form.last()
        except ClientLeft:
            return
        except Exception as error:
            data = self.form.failed(as_api_error(error))
        await send({"type": "http.response.body", "body": data, "more_body": False})
