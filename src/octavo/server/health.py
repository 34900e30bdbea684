"""/health: whether the engine makes progress."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.server.routing import state_of
from octavo.server.sse import dumps

router = APIRouter()


@router.get("/health", response_model=None)
@router.get("/ping", response_model=None, include_in_schema=False)
async def health(http: Request) -> Response:
    """200 while the engine's thread lives and, if there is work, ends a step at least every ``stall_limit`` seconds.

    A step reads as many prompt tokens as take about 0.2 s, so a long prompt is many steps and trips nothing.
    """
    state = state_of(http)
    service, limit = state.llm.service, state.settings.stall_limit
    stalled = service.stalled()
    body: dict[str, Any] = {"status": "ok", "seconds_without_progress": round(stalled, 3)}
    if (gpu := getattr(getattr(state.llm.parts.engine.executor, "backend", None), "gpu", None)) is not None:
        body["gpu"] = gpu
    if state.llm.parts.config.gemm == "cublas":
        body["gemm"] = "cublas: the same request may get other bytes in another batch"
    if not service.alive:
        body["status"] = "dead" if service.error is None else f"dead: {service.error}"
    elif stalled > limit:
        body["status"] = f"stuck: no step has ended for {stalled:.0f} s, the limit is {limit:g} s"
    elif state.admission.draining:
        body["status"] = "draining"
    return Response(dumps(body), 200 if body["status"] == "ok" else 503, media_type="application/json")
