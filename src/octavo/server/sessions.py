"""/v1/sessions: texts that stay in blocks, to be continued, forked, rewound and scored over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.engine.async_session import AsyncSession
from octavo.errors import RequestError
from octavo.server import to_request
from octavo.server.answers import Usage
from octavo.server.errors import ApiError
from octavo.server.generation import ClientLeft
from octavo.server.routing import json_answer, left, state_of, user_of
from octavo.server.schema import AppendBody, ContinueBody, ForkBody, RewindBody, ScoreBody, SessionBody

router = APIRouter(prefix="/v1/sessions")


def _shown(id: str, session: AsyncSession) -> dict[str, Any]:
    return {"id": id, "object": "session", "length": len(session)}


@router.post("", response_model=None)
async def create(body: SessionBody, http: Request) -> dict[str, Any]:
    """A session with a prompt, text or token ids, or an empty one."""
    state, user = state_of(http), user_of(http)
    body.report_unknown("/v1/sessions")
    state.admission.check()
    state.sessions.room()
    session = await state.llm.session(body.prompt, cache_salt=body.cache_salt, user=user)
    return _shown(state.sessions.add(session, user), session)


@router.get("/{id}", response_model=None)
async def show(id: str, http: Request) -> dict[str, Any]:
    """A session's length, text and tokens."""
    session = state_of(http).sessions.find(id, user_of(http)).session
    return {**_shown(id, session), "text": session.text, "token_ids": session.token_ids}


@router.post("/{id}/append", response_model=None)
async def append(id: str, body: AppendBody, http: Request) -> dict[str, Any]:
    """More text, or token ids."""
    with state_of(http).sessions.use(id, user_of(http)) as session:
        added = await session.append(body.text)
        return {**_shown(id, session), "added": added}


@router.post("/{id}/rewind", response_model=None)
async def rewind(id: str, body: RewindBody, http: Request) -> dict[str, Any]:
    """Back to the first ``to`` tokens."""
    with state_of(http).sessions.use(id, user_of(http)) as session:
        await session.rewind(body.to)
        return _shown(id, session)


@router.post("/{id}/fork", response_model=None)
async def fork(id: str, body: ForkBody, http: Request) -> dict[str, Any]:
    """``n`` sessions with the same text, on the same blocks."""
    state, user = state_of(http), user_of(http)
    count = 1 if body.n is None else body.n
    with state.sessions.use(id, user) as session:
        state.sessions.room(max(1, count))
        twins = await session.fork(count)
        return {"object": "list", "data": [_shown(state.sessions.add(twin, user), twin) for twin in twins]}


@router.post("/{id}/score", response_model=None)
async def score(id: str, body: ScoreBody, http: Request) -> Response:
    """How likely each of ``texts`` is as what comes next."""
    state = state_of(http)
    with state.sessions.use(id, user_of(http)) as session:
        if isinstance(body.texts, list) and len(body.texts) > state.settings.max_prompts:
            raise RequestError(f"texts holds more than {state.settings.max_prompts}", "texts")
        places = state.admission.enter([(1, len(session))])
        try:
            found = await session.score(body.texts)
        finally:
            places[0].leave()
    scores = [{"token_ids": s.token_ids, "logprobs": s.logprobs, "total": s.total} for s in found]
    return json_answer({"object": "list", "data": scores})


@router.post("/{id}/generate", response_model=None)
async def generate(id: str, body: ContinueBody, http: Request) -> Response:
    """Continue the session; the answer becomes part of it.  Fields as of /v1/completions, without the prompt's."""
    state = state_of(http)
    asked = to_request.completion(body, state.settings, user_of(http))
    for field, wrong in (
        ("stream", asked.stream),
        ("echo", asked.echo),
        ("n", asked.n > 1),
        ("seeds", bool(asked.seeds)),
        ("best_of", asked.params.branches > 1),
        ("use_beam_search", asked.beam is not None),
    ):
        if wrong:
            raise RequestError(f"{field}: a session's answer is one text, told at its end", field)
    with state.sessions.use(id, user_of(http)) as session:
        places = state.admission.enter([(1, len(session))])
        working = asyncio.ensure_future(session.generate(asked.params))
        try:
            await _unless_left(working, http, asked.timeout or state.settings.request_timeout)
        except ClientLeft:
            return left()
        finally:
            places[0].leave()
        output = working.result()
        answer = output.outputs[0]
        usage = Usage(len(output.prompt_token_ids), output.num_cached_tokens, len(answer.token_ids)).body()
        choice = {"index": 0, "text": answer.text, "token_ids": answer.token_ids, "stop_reason": answer.stop_reason}
        choice["finish_reason"] = answer.finish_reason
        return json_answer({**_shown(id, session), "choices": [choice], "usage": usage})


@router.delete("/{id}", response_model=None)
async def delete(id: str, http: Request) -> dict[str, Any]:
    """Gives back every block."""
    state = state_of(http)
    kept = state.sessions.find(id, user_of(http))
    if kept.timer is not None:
        kept.timer.cancel()
    del state.sessions.kept[id]
    await kept.session.close()
    return {"id": id, "object": "session", "deleted": True}


async def _unless_left(working: asyncio.Future[Any], http: Request, seconds: float | None) -> None:
    """Wait for the answer; a client that leaves, or a limit of time, takes it back."""

    async def gone() -> None:
        while (await http.receive()).get("type") != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, watch}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        late, watching = not working.done(), not watch.done()
        watch.cancel()
        if late:
            working.cancel()
    if late and watching:
        headers = {"x-should-retry": "false"}
        raise ApiError(504, f"it took longer than its limit of {seconds:g} s", code="request_timeout", headers=headers)
    if late:
        raise ClientLeft
