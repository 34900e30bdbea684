"""The live map of the block pool: the page at ``/`` and what it reads under ``/v1/kv``.

- ``/v1/kv``: the pool now, as JSON
- ``/v1/kv/history``: the frames of the last minutes; ``/v1/kv/stream``: those to come, see ``watch/snapshot.py``
- ``/v1/kv/blocks/ID``: who holds a block, and its text; ``/v1/kv/sequences/NUMBER``: a sequence's text, block by block
"""

from __future__ import annotations

import asyncio
import codecs
import ipaddress
import time
from array import array
from collections.abc import AsyncIterator, Callable
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from octavo.core.sequence import Sequence
from octavo.engine.service import AsyncLLM
from octavo.server.errors import ApiError
from octavo.watch.recorder import Recorder
from octavo.watch.snapshot import FIGURES, LENGTH, SLOTS, STATES, SWAPPED, Held, Snapshot, snapshot

T = TypeVar("T")

BEAT = 5.0  # seconds after which a stream without frames says that it is there
MOST_WATCHERS = 32
TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
PAGE_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def record(llm: AsyncLLM, **settings: Any) -> Recorder:
    """A recorder of this engine's pool; to be closed before the engine is."""
    engine = llm.parts.engine

    def take() -> Snapshot:
        counters, scheduler = vars(engine.counters), engine.scheduler
        figures = {name: counters[name] for name in FIGURES if name in counters}
        figures.update(running=len(scheduler.running), waiting=len(scheduler.waiting))
        requests = {number: request.id for number, request in engine.requests.items()}
        return snapshot(engine.kv, scheduler.running, scheduler.waiting, requests, figures, time.time())

    # Requests come and go between steps too, when they are aborted before they ran.
    return Recorder(take, llm.service.call, lambda: engine.counters.steps + len(engine.requests), **settings)


def router(llm: AsyncLLM, recorder: Recorder, mode: str, *, model: str, keyed: bool = False) -> APIRouter:
    """The map's routes; none with mode "off".

    ``keyed``: whether only requests with a key get to the routes under ``/v1``.  The page itself needs none, it holds
    nothing.  Texts are told in mode "text" only, and then to those with a key or on this very machine.
    """
    routes = APIRouter()
    if mode == "off":
        return routes

    def tells(request: Request) -> bool:
        return mode == "text" and (keyed or local(request))

    _add_page(routes)
    _add_frames(routes, llm, recorder, tells, model)
    _add_texts(routes, llm, tells)
    return routes


def local(request: Request) -> bool:
    """Whether a request comes from this machine itself, and not through a proxy that runs on it."""
    if "forwarded" in request.headers or "x-forwarded-for" in request.headers or request.client is None:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False


# ---- the page ------------------------------------------------------------------------------------------------------


def _add_page(routes: APIRouter) -> None:
    folder = files("octavo.server") / "static"
    pages = {f.name: f.read_bytes() for f in folder.iterdir() if f.name.rpartition(".")[2] in TYPES}

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return _file("index.html", pages["index.html"])

    @routes.get("/map/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in pages:
            raise ApiError(404, f"there is no {name} here", param="name")
        return _file(name, pages[name])


def _file(name: str, content: bytes) -> Response:
    return Response(content, media_type=TYPES[name.rpartition(".")[2]] + "; charset=utf-8", headers=PAGE_HEADERS)


# ---- frames --------------------------------------------------------------------------------------------------------


def _add_frames(
    routes: APIRouter, llm: AsyncLLM, recorder: Recorder, tells: Callable[[Request], bool], model: str
) -> None:
    kv, block_bytes = llm.parts.engine.kv, llm.parts.engine.block_bytes
    about = {
        "object": "kv",
        "model": model,
        "chat": llm.parts.template.source is not None,
        "block_size": kv.block_size,
        "block_bytes": block_bytes,
        "groups": [{"window": window} for window in kv.windows],
    }

    @routes.get("/v1/kv")
    async def now(request: Request) -> Response:
        """The block pool at this moment: counts and contents of all blocks, and each sequence's block tables."""
        serial, shot = await asyncio.to_thread(recorder.fresh)
        return JSONResponse({**about, "texts": tells(request), "serial": serial, **described(shot)})

    @routes.get("/v1/kv/history", response_class=Response)
    async def history() -> Response:
        """The frames of the last minutes, one after the other."""
        data = await asyncio.to_thread(lambda: b"".join(frame.data for frame in recorder.history()))
        return Response(data, media_type="application/octet-stream", headers={"Cache-Control": "no-store"})

    @routes.get("/v1/kv/stream", response_class=StreamingResponse)
    async def stream(after: int = 0) -> Response:
        """The frames after the one with this serial number as they come; a length of 0 says that all is well."""
        if recorder.watched >= MOST_WATCHERS:
            raise ApiError(429, f"{MOST_WATCHERS} watch already", headers={"Retry-After": "5"})
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(coming(recorder, after), media_type="application/octet-stream", headers=headers)


async def coming(recorder: Recorder, after: int) -> AsyncIterator[bytes]:
    """Frames as they come; one who reads too slowly misses some, and goes on from a key."""
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def told() -> None:
        try:
            loop.call_soon_threadsafe(news.set)
        except RuntimeError:  # the loop is closed: nobody reads any more
            pass

    leave = recorder.listen(told)
    try:
        while not recorder.closed:
            news.clear()
            frames = recorder.since(after)
            if frames:
                after = frames[-1].serial
                yield b"".join(frame.data for frame in frames)
                continue
            try:
                await asyncio.wait_for(news.wait(), BEAT)
            except TimeoutError:
                yield LENGTH.pack(0)
    finally:
        leave()


def described(shot: Snapshot) -> dict[str, Any]:
    """A snapshot as JSON."""
    device, host = shot.device(), shot.host()
    counts = memoryview(shot.counts).cast("i").tolist()
    return {
        "time": shot.time,
        "blocks": {
            "total": len(device),
            "live": int((device & 127 > 0).sum()),
            "shared": int((device & 127 > 1).sum()),
            "cached": int((device == 128).sum()),
            "free": int((device == 0).sum()),
        },
        "device": {"counts": counts, "content": list(shot.named)},
        "host": [SLOTS[state] for state in host.tolist()],
        "sequences": [_described(held, shot.requests.get(held.request)) for held in shot.sequences],
        "figures": {name: shot.figures.get(name, 0) for name in FIGURES},
    }


def _described(held: Held, id: str | None) -> dict[str, Any]:
    tables = [memoryview(table).cast("i").tolist() for table in held.tables]
    return {
        "number": held.number,
        "request": held.request,
        "id": id,
        "branch": held.branch,
        "state": STATES[held.state],
        "tokens": held.tokens,
        "computed": held.computed,
        "prompt_tokens": held.prompt,
        "tier": "host" if held.state == SWAPPED else "device",
        "tables": tables,
    }


# ---- texts ---------------------------------------------------------------------------------------------------------


def _add_texts(routes: APIRouter, llm: AsyncLLM, tells: Callable[[Request], bool]) -> None:
    kv = llm.parts.engine.kv

    async def asked(work: Callable[[], T]) -> T:
        result: T = await asyncio.to_thread(llm.service.call, work)
        return result

    @routes.get("/v1/kv/blocks/{block}")
    async def block_text(request: Request, block: int) -> Response:
        """Who holds a block, at which place in their tables, and its text."""
        if not 0 <= block < kv.pool.size:
            raise ApiError(404, f"the pool has blocks 0 to {kv.pool.size - 1}, not {block}", param="block")
        holders, tokens = await asked(lambda: holders_of(llm, block))
        text = llm.tokenizer.decode(tokens, skip_special=False) if tells(request) and tokens is not None else None
        return JSONResponse({"block": block, "holders": holders, "text": text})

    @routes.get("/v1/kv/sequences/{number}")
    async def sequence_text(request: Request, number: int) -> Response:
        """A sequence's text, cut where its blocks end; no tokens if it has ended."""
        tokens = await asked(lambda: tokens_of(llm, number))
        if tokens is None:
            raise ApiError(404, f"there was no sequence {number} so far", param="number")
        texts = cut(tokens, kv.block_size, llm.tokenizer.token_bytes) if tells(request) and tokens else None
        return JSONResponse({"number": number, "tokens": len(tokens), "blocks": texts})


def holders_of(llm: AsyncLLM, block: int) -> tuple[list[dict[str, int]], list[int] | None]:
    """Who names a block, and the tokens in it: what a holder has computed so far, or what a prompt can hit."""
    engine = llm.parts.engine
    kv, size = engine.kv, engine.kv.block_size
    holders: list[dict[str, int]] = []
    tokens: list[int] | None = None
    for sequence in engine.scheduler.running:
        holding = kv.holdings.get(sequence.number)
        for group, table in enumerate(holding.tables if holding is not None else ()):
            if block in table.ids:
                at = table.ids.index(block)
                own = list(sequence.tokens[at * size : min((at + 1) * size, sequence.computed)])
                tokens = own if tokens is None or len(own) > len(tokens) else tokens
                place = {"sequence": sequence.number, "request": sequence.request, "branch": sequence.branch}
                holders.append({**place, "group": group, "place": at, "first_token": at * size})
    content = kv.pool.content[block]
    if content is not None:
        tokens = list(array("i", content[0].tokens))
    return holders, tokens


def tokens_of(llm: AsyncLLM, number: int) -> list[int] | None:
    """A sequence's tokens, none if it has ended; None if there was no such sequence."""
    engine = llm.parts.engine
    found: list[Sequence] = [s for s in (*engine.scheduler.running, *engine.scheduler.waiting) if s.number == number]
    if not found:
        return [] if 1 <= number <= engine.sequences else None
    return list(found[0].tokens)


def cut(tokens: list[int], size: int, raw: Callable[[int], bytes]) -> list[str]:
    """The text of each block; a character whose bytes lie in two blocks belongs to the second."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts = range(0, len(tokens), size)
    return [decoder.decode(b"".join(map(raw, tokens[a : a + size])), final=a + size >= len(tokens)) for a in starts]
