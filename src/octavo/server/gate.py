"""What every connection passes: who calls, how much it sends, its id, one line in the log."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.errors import ApiError, as_api_error
from octavo.server.security import Guard
from octavo.server.state import State

access = logging.getLogger("octavo.access")

QUIET = ("/health", "/ping", "/metrics", "/v1/kv")  # asked for all the time, and logged only when they fail
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Gate:
    """Owns: nothing of a connection beyond its own.

    Promises: what is refused here costs no more than its headers; every answer has an ``X-Request-Id``, the client's
    if it sent a good one; the log tells no key and no prompt unless it was asked to.
    """

    def __init__(self, app: ASGIApp, state: State, guard: Guard) -> None:
        self.app = app
        self.state = state
        self.guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        id = given if _ID.fullmatch(given) else b"req-" + secrets.token_hex(12).encode()
        scope["octavo.request_id"] = id.decode()
        scope["octavo.send"] = send  # for an answer that has begun, a piece at a time
        status = 0

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id)]
            await send(message)

        try:
            try:
                scope["octavo.user"] = self.guard.check(scope["method"], scope["path"], headers)
                limited = self._limited(headers, receive)
            except ApiError as error:
                await error.response()(scope, receive, sent)
                return
            try:
                await self.app(scope, limited, sent)
            except Exception as error:
                if status:  # the answer has begun: the connection is all that can still be ended
                    raise
                await as_api_error(error).response()(scope, receive, sent)
        finally:
            self._log(scope, status, time.perf_counter() - began)

    def _limited(self, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        """The same body, up to the limit; raises ApiError."""
        most = self.state.settings.max_body
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > most:
            raise _too_large(most)
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            if message["type"] == "http.request":
                read += len(message.get("body", b""))
                if read > most:
                    # The framework takes other exceptions here for a body that cannot be read.
                    raise HTTPException(413, str(_too_large(most)))
            return message

        return limited

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", None) or "other"
        self.state.metrics.http[path, status] += 1
        if self.state.settings.access_log == "off" or (status == 200 and scope["path"].startswith(QUIET)):
            return
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            "request_id": scope["octavo.request_id"],
        }
        if scope.get("octavo.user"):
            line["user"] = scope["octavo.user"]
        generation = scope.get("octavo.generation")
        if generation is not None:
            line["prompt_tokens"] = sum(len(r.prompt) for r in generation.requests)
            line["cached_tokens"] = sum(r.cached for r in generation.requests)
            line["completion_tokens"] = generation.generated
            if self.state.settings.log_prompts:
                line["prompts"] = [r.prompt_text or list(r.prompt) for r in generation.requests]
        access.info(json.dumps(line))


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {most} bytes", code="body_too_large")
