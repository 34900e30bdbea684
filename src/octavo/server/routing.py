"""What the routes have in common."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from octavo.server.answers import Answers
from octavo.server.generation import ClientLeft, Generation
from octavo.server.sse import EventStream, Form, dumps
from octavo.server.state import State


def state_of(http: Request) -> State:
    state: State = http.app.state.octavo
    return state


def user_of(http: Request) -> str:
    """Whose key it was, if there are keys."""
    return str(http.scope.get("octavo.user", ""))


def fresh_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(16)}"


async def begun(generation: Generation, http: Request, prompts: Sequence[Any], *, add_special: bool) -> None:
    """Start a generation for this connection; its request id is the client's."""
    http.scope["octavo.generation"] = generation
    await generation.start(
        prompts, http.receive, add_special=add_special, request_id=http.scope.get("octavo.request_id", "request")
    )


def json_answer(body: dict[str, Any]) -> Response:
    return Response(dumps(body), media_type="application/json")


async def answered(answers: Answers, form: Form, stream: bool) -> Response:
    """The answer as events, or in one piece."""
    if stream:
        return EventStream(answers, form)
    async with answers.generation:
        try:
            return json_answer(form.whole(await answers.whole()))
        except ClientLeft:
            return left()


def left() -> Response:
    """For a client that is gone; nobody reads it."""
    return Response(status_code=499)
