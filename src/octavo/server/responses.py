"""/v1/responses: a conversation is continued, in OpenAI's newer form, and nothing is kept of it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.server.answers import Answers
from octavo.server.chat import conversing
from octavo.server.errors import ApiError
from octavo.server.logprobs import ChatLogprobs, TokenNames
from octavo.server.response_body import ResponseBody, conversation, echo, named_as_sent
from octavo.server.response_form import ResponseForm
from octavo.server.response_reading import Reading
from octavo.server.routing import answered, state_of
from octavo.text.detokenize import Detokenizer

router = APIRouter(prefix="/v1/responses")


@router.post("", response_model=None)
async def responses(body: ResponseBody, http: Request) -> Response:
    """Answers a conversation with items: thoughts, messages and function calls."""
    state = state_of(http)
    model = state.check_model(body.model)
    body.report_unknown("/v1/responses")
    talk = conversation(body)
    with named_as_sent():
        generation, parser = await conversing(state, talk, http)
    answers = Answers(generation, TokenNames(state.llm.tokenizer), ChatLogprobs)
    text = Detokenizer(state.llm.tokenizer, generation.asked.params.skip_special_tokens)
    form = ResponseForm(model, state.fingerprint, echo(body), answers, Reading(parser(), text))
    return await answered(answers, form, generation.asked.stream)


@router.get("/{id}", response_model=None)
@router.delete("/{id}", response_model=None)
async def kept(id: str) -> Response:
    """There is none: responses are not stored."""
    raise ApiError(404, f"there is no response {id!r}: nothing is stored here", param="response_id", code="not_found")
