"""/v1/chat/completions: a conversation is continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.server import to_request
from octavo.server.answers import Answers, Piece
from octavo.server.generation import LONG_TEXT, Generation
from octavo.server.logprobs import ChatLogprobs, TokenNames
from octavo.server.messages import checked_choice, checked_tools, rendered
from octavo.server.parsing import OutputParser
from octavo.server.routing import answered, begun, fresh_id, state_of, user_of
from octavo.server.schema import ChatBody
from octavo.server.sse import DONE, MARK, Form, around, event, text_event
from octavo.server.state import State

router = APIRouter()


@router.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, http: Request) -> Response:
    """Answers a conversation."""
    state = state_of(http)
    model = state.check_model(body.model)
    body.report_unknown("/v1/chat/completions")
    generation, parser = await conversing(state, body, http)
    answers = Answers(generation, TokenNames(state.llm.tokenizer), ChatLogprobs, parser)
    return await answered(answers, ChatForm(model, state.fingerprint, answers), generation.asked.stream)


async def conversing(
    state: State, body: ChatBody, http: Request
) -> tuple[Generation, Callable[[], OutputParser | None]]:
    """A generation that answers a conversation, begun, and what makes parsers of its outputs."""
    tools = checked_tools(body.tools)
    choice = checked_choice(body.tool_choice, tools)
    tooling = state.tooling
    calls = None
    if tools and choice not in ("none", "auto"):
        calls = tooling.format.grammar(tools, choice[1:] if choice.startswith("=") else None)
    marks = bool(tools) and choice != "none" and tooling.format.special
    asked = to_request.chat(body, state.settings, user_of(http), calls, marks)
    state.admission.check()
    prompt = await prompt_of(state, body, None if choice == "none" else tools)
    generation = Generation(state, asked)
    await begun(generation, http, [prompt], add_special=False)
    return generation, partial(tooling.parser, prompt, tools, choice, body.parallel_tool_calls is not False)


async def prompt_of(state: State, body: ChatBody, tools: list[dict[str, Any]] | None) -> str:
    """The conversation through the model's template; a long one beside the event loop."""
    options = dict(body.chat_template_kwargs) if isinstance(body.chat_template_kwargs, dict) else None
    if body.chat_template_kwargs is not None and options is None:
        options = body.chat_template_kwargs  # refused further in, by name
    if body.reasoning_effort is not None and options is None:
        options = {"reasoning_effort": body.reasoning_effort}
    messages, tools = state.tooling.described(body.messages, tools)
    render = partial(
        rendered,
        state.llm.parts.template,
        messages,
        tools=tools,
        options=options,
        add_generation_prompt=body.add_generation_prompt is not False,
    )
    if len(str(body.messages)) > LONG_TEXT:
        return await asyncio.to_thread(render)
    return render()


class ChatForm(Form):
    """Owns: an answer's id and time, and which choices have begun.

    Promises: chunks and whole answers that differ only in where they are cut; a choice's first chunk names the role.
    """

    def __init__(self, model: str, fingerprint: str, answers: Answers) -> None:
        self._answers = answers
        self._asked = answers.generation.asked
        head = {"id": fresh_id("chatcmpl"), "created": int(time.time()), "model": model}
        self._head: dict[str, Any] = {**head, "system_fingerprint": fingerprint}
        self._begun: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        body: dict[str, Any] = {"object": "chat.completion", **self._head}
        body["choices"] = [self._choice(piece, {"message": _message(piece)}) for piece in pieces]
        body["usage"] = self._answers.usage().body()
        if pieces[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = pieces[0].prompt_logprobs
        return body

    # ---- chunks ----------------------------------------------------------------------------------------------------

    def chunk(self, piece: Piece) -> bytes:
        frame = self._begun.get(piece.choice)
        if frame is None:
            return self._first(piece) + self.chunk(piece._replace(prompt_logprobs=None))
        if piece.finish_reason is None and piece.logprobs is None and not piece.reasoning and not piece.calls:
            if not self._asked.token_ids:
                if not piece.text:  # a token whose character is not whole yet, or that is held back
                    return b""
                return text_event(frame, piece.text)
        delta: dict[str, Any] = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        if piece.text or not (piece.reasoning or piece.calls or piece.finish_reason):
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = list(piece.calls)
        return event(self._chunk([self._choice(piece, {"delta": delta})]))

    def last(self) -> bytes:
        """The usage, if it was asked for."""
        if not self._asked.usage:
            return DONE
        return event({**self._chunk([]), "usage": self._answers.usage().body()}) + DONE

    def _first(self, piece: Piece) -> bytes:
        """The role; and, for the chunks that follow, what stands before and after their text."""
        index = piece.choice
        self._begun[index] = around(self._chunk([self._plain(index, {"content": MARK})]))
        chunk = self._chunk([self._plain(index, {"role": "assistant", "content": ""})])
        if piece.prompt_logprobs is not None:
            chunk["prompt_logprobs"] = piece.prompt_logprobs
        return event(chunk)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more: dict[str, Any] = {"usage": None} if self._asked.usage else {}
        return {"object": "chat.completion.chunk", **self._head, "choices": choices, **more}

    @staticmethod
    def _plain(index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": piece.choice,
            **said,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if piece.score is not None:
            choice["score"] = piece.score
        if self._asked.token_ids:
            choice["token_ids"] = list(piece.tokens)
        return choice


def _message(piece: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": piece.text if piece.text or not piece.calls else None,
        "refusal": None,
    }
    if piece.reasoning:
        message["reasoning_content"] = piece.reasoning
    if piece.calls:
        message["tool_calls"] = list(piece.calls)
    return message
