"""/v1/models, /version, and a model's tokens: /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from fastapi import APIRouter, Request

import octavo
from octavo.errors import RequestError
from octavo.server.errors import ApiError
from octavo.server.messages import checked_tools, rendered
from octavo.server.routing import state_of
from octavo.server.schema import DetokenizeBody, ModelCard, ModelList, TokenizeBody
from octavo.server.state import State

router = APIRouter()


def card(state: State) -> ModelCard:
    intake = state.llm.parts.intake
    longest = min(intake.context, intake.longest)
    return ModelCard(id=state.model, created=state.created, root=state.root, max_model_len=longest)


@router.get("/v1/models")
async def models(http: Request) -> ModelList:
    """The model that is served."""
    return ModelList(data=[card(state_of(http))])


@router.get("/v1/models/{name:path}")
async def model(name: str, http: Request) -> ModelCard:
    state = state_of(http)
    if name not in (state.model, state.root):
        raise ApiError(404, f"there is no model {name!r} here", param="model", code="model_not_found")
    return card(state)


@router.get("/version")
async def version(http: Request) -> dict[str, str]:
    """Octavo's version, and what else decides an answer's bytes."""
    return {"version": octavo.__version__, "system_fingerprint": state_of(http).fingerprint}


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, http: Request) -> dict[str, Any]:
    """Token ids of a ``prompt``, or of ``messages`` through the chat template."""
    state = state_of(http)
    state.check_model(body.model)
    body.report_unknown("/tokenize")
    tokenizer = state.llm.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give a prompt or messages, one of them", "prompt")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        special = bool(body.add_special_tokens)
        text = await asyncio.to_thread(
            rendered,
            state.llm.parts.template,
            body.messages,
            tools=checked_tools(body.tools),
            options=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt is not False,
        )
    ids = await asyncio.to_thread(tokenizer.encode, text, special)
    longest = card(state).max_model_len
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": longest, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]
    return answer


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, http: Request) -> dict[str, str]:
    """The text of token ids, special ones included unless they are to be skipped."""
    state = state_of(http)
    state.check_model(body.model)
    body.report_unknown("/detokenize")
    if body.tokens == []:
        return {"prompt": ""}
    if not isinstance(body.tokens, list):
        raise RequestError("tokens must be a list of token ids", "tokens")
    try:
        ids: array[int] = state.llm.parts.intake.tokens(body.tokens)
    except RequestError as error:
        raise RequestError(str(error).replace("prompt", "tokens", 1), "tokens") from None
    return {"prompt": state.llm.tokenizer.decode(ids, bool(body.skip_special_tokens))}
