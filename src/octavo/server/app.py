"""The application: routes around one engine."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import octavo
from octavo.engine.service import AsyncLLM
from octavo.server import chat, completions, errors, health, kvmap, metrics, models, responses, sessions
from octavo.server.gate import Gate
from octavo.server.receipts import Receipts
from octavo.server.recording import Recording
from octavo.server.security import Guard
from octavo.server.settings import ServerSettings
from octavo.server.state import State

DESCRIPTION = "An OpenAI-compatible server on paged attention."


def create_app(
    llm: AsyncLLM,
    settings: ServerSettings,
    model: str = "model",
    keys: Mapping[str, str] | None = None,
    receipts: Receipts | None = None,
) -> FastAPI:
    """Routes around ``llm``; ``keys`` maps keys to their owners' names.

    ``llm`` and the file of ``receipts``, if there is to be one, stay the caller's to close.
    """
    app = FastAPI(title="Octavo", version=octavo.__version__, description=DESCRIPTION, docs_url=None, redoc_url=None)
    state = app.state.octavo = State(llm, settings, model)
    errors.install(app)
    for routes in (completions, chat, responses, models, sessions, health, metrics):
        app.include_router(routes.router)
    if settings.map != "off":
        state.recorder = kvmap.record(llm)
        mode = settings.map or "text"  # texts are told only to who has a key, or is on this machine
        app.include_router(kvmap.router(llm, state.recorder, mode, model=state.model, keyed=bool(keys)))
    if receipts is not None:
        app.add_middleware(Recording, state=state, receipts=receipts)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(Gate, state=state, guard=Guard(settings, keys or {}))
    return app
