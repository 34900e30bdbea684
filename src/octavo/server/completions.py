"""/v1/completions: a text is continued."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.errors import RequestError
from octavo.server import to_request
from octavo.server.answers import Answers, Piece
from octavo.server.generation import Generation
from octavo.server.logprobs import TextLogprobs, TokenNames
from octavo.server.routing import answered, begun, fresh_id, state_of, user_of
from octavo.server.schema import CompletionBody
from octavo.server.sse import DONE, MARK, Form, around, event, text_event

router = APIRouter()


@router.post("/v1/completions", response_model=None)
async def completions(body: CompletionBody, http: Request) -> Response:
    """Continues one prompt or several, given as texts or as token ids."""
    state = state_of(http)
    model = state.check_model(body.model)
    body.report_unknown("/v1/completions")
    asked = to_request.completion(body, state.settings, user_of(http))
    prompts = to_request.prompts(body.prompt, state.settings)
    if asked.seeds and len(asked.seeds) != len(prompts):
        raise RequestError(f"seeds holds {len(asked.seeds)}, for {len(prompts)} prompts", "seeds")
    generation = Generation(state, asked)
    await begun(generation, http, prompts, add_special=body.add_special_tokens is not False)
    answers = Answers(generation, TokenNames(state.llm.tokenizer), TextLogprobs)
    return await answered(answers, TextForm(model, state.fingerprint, answers), asked.stream)


class TextForm(Form):
    """Owns: an answer's id and time.  Promises: chunks and whole answers that differ only in where they are cut."""

    def __init__(self, model: str, fingerprint: str, answers: Answers) -> None:
        self._answers = answers
        self._asked = answers.generation.asked
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._head: dict[str, Any] = {
            "id": fresh_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        choices = [self._choice(piece) for piece in pieces]
        return {**self._head, "choices": choices, "usage": self._answers.usage().body()}

    def chunk(self, piece: Piece) -> bytes:
        if piece.finish_reason is None and piece.logprobs is None and piece.prompt_logprobs is None:
            if not self._asked.token_ids:
                frame = self._frames.get(piece.choice)
                if frame is None:
                    frame = self._frames[piece.choice] = around(self._chunk(Piece(piece.choice, MARK, ())))
                return text_event(frame, piece.text)
        return event(self._chunk(piece))

    def _chunk(self, piece: Piece) -> dict[str, Any]:
        more: dict[str, Any] = {"usage": None} if self._asked.usage else {}
        return {**self._head, "choices": [self._choice(piece)], **more}

    def last(self) -> bytes:
        """The usage, if it was asked for."""
        if not self._asked.usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self._answers.usage().body()}) + DONE

    def _choice(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.choice,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if piece.prompt_logprobs is not None:
            choice["prompt_logprobs"] = piece.prompt_logprobs
        if piece.score is not None:
            choice["score"] = piece.score
        if self._asked.token_ids:
            choice["token_ids"] = list(piece.tokens)
        return choice
