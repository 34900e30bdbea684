"""A response as OpenAI has it: a list of items, and the events by which a client may watch them grow."""

from __future__ import annotations

import secrets
import time
from typing import Any

from octavo.server.answers import Answers, Piece
from octavo.server.errors import ApiError
from octavo.server.parsing import Part, Thought, fresh_call
from octavo.server.response_reading import Entries, Reading
from octavo.server.sse import Form, named_event
from octavo.text.tools import CallArguments, CallStart, TextPiece

# What each part is a part of, and how the ids of such items and the events of their growth are called.
_TYPES: dict[type[Part], str] = {
    Thought: "reasoning",
    TextPiece: "message",
    CallStart: "function_call",
    CallArguments: "function_call",
}
_IDS = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
_GROWTH = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
}


def fresh(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


class Item:
    """Owns: an item of the output while it is written: a thought, a message or a function call.

    Promises: what it shows at the end is the join of what it was given.
    """

    def __init__(self, index: int, part: Part) -> None:
        self.index = index
        self.texts: list[str] = []
        self.entries: Entries = []
        self.type = _TYPES[type(part)]
        self.id = fresh(_IDS[self.type])
        self.call_id, self.name = (fresh_call(), part.name) if isinstance(part, CallStart) else ("", "")

    def takes(self, part: Part) -> bool:
        """Whether the part is more of this item."""
        return not isinstance(part, CallStart) and _TYPES[type(part)] == self.type

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        """The one part that a thought's or a message's content has."""
        if self.type == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.entries)}

    def shown(self, status: str) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self.id, "type": self.type, "status": status}
        if self.type == "function_call":
            return {**body, "call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [] if status == "in_progress" else [self.part()]
        if self.type == "reasoning":
            return {**body, "summary": [], "content": content}
        return {**body, "role": "assistant", "content": content}


class ResponseForm(Form):
    """Owns: a response's id and time, its items so far, and the number of the next event.

    Promises: the plain answer is what the last event of a stream shows, since both are made by the same steps; every
    item that an event adds is ended before another is, and all before the last event.
    """

    def __init__(self, model: str, fingerprint: str, echo: dict[str, Any], answers: Answers, reading: Reading) -> None:
        params = answers.generation.requests[0].params
        self._answers = answers
        self._reading = reading
        head = {"id": fresh("resp"), "object": "response", "created_at": int(time.time()), "model": model}
        self._head: dict[str, Any] = {**head, "system_fingerprint": fingerprint}
        self._echo = {**echo, "temperature": params.temperature, "top_p": params.top_p}
        self._ended: list[dict[str, Any]] = []
        self._open: Item | None = None
        self._reason = ""
        self._events = 0

    # ---- Form's ----------------------------------------------------------------------------------------------------

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        self.chunk(pieces[0])
        return self._response(self._status)

    def first(self) -> bytes:
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def chunk(self, piece: Piece) -> bytes:
        out = b"".join([self._told(part, entries) for part, entries in self._reading.read(piece)])
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
            out += self._close(self._status)
        return out

    def last(self) -> bytes:
        return self._event(f"response.{self._status}", response=self._response(self._status))

    def failed(self, error: ApiError) -> bytes:
        """The error in full, then the response as far as it came."""
        told = self._event("error", code=error.code, message=str(error), param=error.param)
        if self._open is not None:
            self._ended.append(self._open.shown("incomplete"))
        known = "rate_limit_exceeded" if error.status == 429 else "server_error"  # the codes that clients know here
        response = {**self._response("failed"), "error": {"code": known, "message": str(error)}}
        return told + self._event("response.failed", response=response)

    # ---- items -----------------------------------------------------------------------------------------------------

    def _told(self, part: Part, entries: Entries) -> bytes:
        """More of the open item, or the beginning of another."""
        out = b""
        if self._open is None or not self._open.takes(part):
            out = self._close("completed") + self._begin(part)
        if isinstance(part, CallStart) or self._open is None:
            return out
        self._open.texts.append(part.text)
        self._open.entries += entries
        more = {"logprobs": entries} if self._open.type == "message" else {}
        return out + self._of_part(f"{_GROWTH[self._open.type]}.delta", delta=part.text, **more)

    def _begin(self, part: Part) -> bytes:
        item = self._open = Item(len(self._ended), part)
        out = self._event("response.output_item.added", output_index=item.index, item=item.shown("in_progress"))
        if item.type != "function_call":
            out += self._of_part("response.content_part.added", part=item.part())
        return out

    def _close(self, status: str) -> bytes:
        item = self._open
        if item is None:
            return b""
        done = f"{_GROWTH[item.type]}.done"
        if item.type == "function_call":
            out = self._of_part(done, name=item.name, arguments=item.text)
        else:
            more = {"logprobs": item.entries} if item.type == "message" else {}
            out = self._of_part(done, text=item.text, **more)
            out += self._of_part("response.content_part.done", part=item.part())
        shown = item.shown(status)
        self._ended.append(shown)
        self._open = None
        return out + self._event("response.output_item.done", output_index=item.index, item=shown)

    def _of_part(self, event: str, /, **fields: Any) -> bytes:
        """An event of the open item, or of its content's one part."""
        item = self._open
        if item is None:
            return b""
        where: dict[str, Any] = {"item_id": item.id, "output_index": item.index}
        if item.type != "function_call":
            where["content_index"] = 0
        return self._event(event, **where, **fields)

    def _event(self, event: str, /, **fields: Any) -> bytes:
        number, self._events = self._events, self._events + 1
        return named_event(event, {"type": event, **fields, "sequence_number": number})

    # ---- the response ----------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        over = status in ("completed", "incomplete")
        return {
            **self._head,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": list(self._ended),
            "usage": self._usage() if over else None,
            **self._echo,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage()
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {
                "cached_tokens": usage.cached,
                "cache_write_tokens": usage.prompt - usage.cached,  # what was computed is in the cache now
            },
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": self._reading.thoughts},
            "total_tokens": usage.prompt + usage.generated,
        }
