"""Sees each request and its answer go by, and keeps those that are whole."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

import octavo
from octavo.server.generation import Generation
from octavo.server.joining import JOINERS
from octavo.server.receipts import Exchange, Receipts
from octavo.server.state import State

# What a request may leave open; the model's generation config or chance fills it.
_OPEN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class Recording:
    """Owns: nothing of a connection beyond its own.

    Promises: what goes by is not changed and not held up; a receipt is of a whole answer, never of one that was
    refused, failed, timed out or taken back; of the request it has the body and its id, no header and no key.
    """

    def __init__(self, app: ASGIApp, state: State, receipts: Receipts) -> None:
        self.app = app
        self.state = state
        self.receipts = receipts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in JOINERS:
            await self.app(scope, receive, send)
            return
        asked: list[bytes] = []
        told: list[bytes] = []
        status, stream, ended = 0, False, False

        async def received() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                asked.append(message.get("body", b""))
            return message

        def seen(message: Message) -> None:
            nonlocal status, stream, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                stream = dict(message.get("headers", ())).get(b"content-type", b"").startswith(b"text/event-stream")
            else:
                told.append(message.get("body", b""))
                ended = not message.get("more_body", False)

        def seeing(send: Send) -> Send:
            async def sent(message: Message) -> None:
                seen(message)
                await send(message)

            return sent

        if "octavo.send" in scope:  # the way that a stream's pieces take
            scope["octavo.send"] = seeing(scope["octavo.send"])
        await self.app(scope, received, seeing(send))
        generation: Generation | None = scope.get("octavo.generation")
        if status == 200 and ended and generation is not None and generation.whole:
            about = self._about(scope)
            self.receipts.put(Exchange(about, b"".join(asked), filled(generation), b"".join(told), stream))

    def _about(self, scope: Scope) -> dict[str, Any]:
        settings = self.state.settings
        return {
            "octavo": octavo.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": scope["octavo.request_id"],
            "path": scope["path"],
            "model": self.state.root,
            "settings": {"tool_format": settings.tool_format, "reasoning": settings.reasoning},
            "system_fingerprint": self.state.fingerprint,
        }


def filled(generation: Generation) -> dict[str, Any]:
    """What the request left open and its answer depends on, as fields that it could have had itself."""
    asked, requests = generation.asked, generation.requests
    first = requests[0]
    out = {name: getattr(first.params, name) for name in _OPEN if getattr(asked.params, name) is None}
    if asked.params.seed is None and not asked.seeds:
        seeds = [request.params.seed for request in requests]
        out |= {"seed": seeds[0]} if len(seeds) == 1 else {"seeds": seeds}
    cut = any(branch.finish_reason == "length" for request in requests for branch in request.branches)
    if asked.params.max_tokens is None and (cut or first.beams is not None):
        out["max_tokens"] = first.limit - len(first.prompt)  # what fitted here
    return out
