"""A server's life: from the model to the last answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from octavo.engine.service import AsyncLLM
from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.receipts import Receipts
from octavo.server.settings import KEY_VARIABLE, ServerSettings
from octavo.server.state import State

log = logging.getLogger("octavo.server")

BACKLOG = 2048


def serve(model: str, settings: ServerSettings, engine: dict[str, Any]) -> int:
    """Load ``model`` and answer until a signal comes: SIGTERM or Ctrl-C lets what runs end, a second one does not."""
    keys = settings.keys()
    check_exposure(settings, bool(keys))
    raise_file_limit()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(bound(settings))
        receipts = stack.enter_context(Receipts(settings.record)) if settings.record is not None else None
        llm = stack.enter_context(AsyncLLM(model, progress=True, **engine))
        app = create_app(llm, settings, model, keys, receipts)
        state: State = app.state.octavo
        url = url_of(settings.host, listener.getsockname()[1])
        print(welcome(url, state, bool(keys)), file=sys.stderr, flush=True)
        server = Server(app, settings)
        server.run(sockets=[listener])
        return 0 if llm.service.error is None else 1


class Server(uvicorn.Server):
    """Owns: the listener and its connections, from start to the last answer.

    Promises: the first signal closes the listener, refuses new requests on old connections and lets running ones end
    within ``drain_timeout``; then, or at the second signal, they end with an error.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self.state: State = app.state.octavo
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(settings.drain_timeout) + 5),
            )
        )
        self._drain_timeout = settings.drain_timeout

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Our handlers while the server runs; the old ones after it, for whom the signals are not repeated."""
        if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
            yield
            return
        old = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
            self.state.stop()
            return
        self.should_exit = True
        self.state.drain()
        running = len(self.state.generations)
        if running:
            print(f"stopping when {running} running requests are done; a second signal stops at once", file=sys.stderr)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().call_later(self._drain_timeout, self.state.stop)
        if self.state.recorder is not None:
            self.state.recorder.close()  # the map's streams have no end of their own
        await super().shutdown(sockets)


def check_exposure(settings: ServerSettings, keyed: bool) -> None:
    """Raises ConfigError for a server that anybody could use without being asked."""
    if not settings.local and not keyed and not settings.allow_anyone:
        raise ConfigError(
            f"on {settings.host} others can connect: set keys (--api-key-file, or {KEY_VARIABLE} in the environment), "
            "or say --allow-anyone",
            "host",
        )


def bound(settings: ServerSettings) -> socket.socket:
    """A listening socket; before the model is loaded, so that a taken port is known at once.  Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.host} port {settings.port}: {error}", "port") from None
    return listener


def raise_file_limit() -> None:
    """A connection is an open file; the usual limit of 1,024 is soon reached."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            log.warning("the limit of %d open files could not be raised", soft)


def url_of(host: str, port: int) -> str:
    shown = "127.0.0.1" if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def welcome(url: str, state: State, keyed: bool) -> str:
    """Where it listens and how to call it."""
    key = " -H 'Authorization: Bearer KEY'" if keyed else ""
    chat = state.llm.parts.template.source is not None
    path = "chat/completions" if chat else "completions"
    asked = '"messages": [{"role": "user", "content": "Name five fruits."}]' if chat else '"prompt": "The sea is"'
    return (
        f"serving {state.model} at {url}\n"
        f"  try   curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d '{{{asked}}}'\n"
        f'  from Python   OpenAI(base_url="{url}/v1", api_key={"KEY" if keyed else chr(34) + "none" + chr(34)})'
    )
