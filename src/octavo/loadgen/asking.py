"""One request to the server: its body, and the record of what came back when."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import EngineError
from octavo.loadgen.http import Broken, Client, Reply

STOPPED = "stopped"
LONGEST_EVENT = 16 * 1024 * 1024
CONTENT = ("text", "content", "reasoning_content", "tool_calls")


@dataclass
class Record:
    """What became of a request.  Times are seconds on one clock that never goes back.

    ``gaps``: between one piece of the answer and the next; a piece is a token unless the server joins some.
    ``fingerprint``: what the server says that it computes with (OpenAI's system_fingerprint).
    ``failure``: a short kind to count it by, ``error`` what was said; both None for a whole answer.
    """

    number: int
    planned: float
    sent: float
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str | None = None
    fingerprint: str | None = None
    failure: str | None = None
    error: str | None = None
    retry_after: float | None = None

    @property
    def whole(self) -> bool:
        return self.ended is not None and self.failure is None

    @property
    def to_first(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def per_token(self) -> float | None:
        """Mean seconds from one token to the next."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    @property
    def in_all(self) -> float | None:
        return None if self.ended is None else self.ended - self.sent


class Events:
    """Owns: the bytes of a stream of server-sent events that are not a whole line yet."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that is whole now."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_EVENT:
            raise Broken("not a stream", "the server sends no events but one endless line")
        whole = []
        for line in lines:
            line = line.rstrip(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                whole.append(b"\n".join(self._data))
                self._data.clear()
        return whole


class Listener:
    """Owns: the record of a request while its stream comes in."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False
        self._events = Events()
        self._pieces = 0

    def take(self, piece: bytes) -> None:
        now = time.perf_counter()
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                self.done = True
            else:
                self._message(data, now)

    def _message(self, data: bytes, now: float) -> None:
        try:
            message = json.loads(data)
            if message.get("error"):
                raise Broken("error in the stream", said(data))
            if message.get("usage"):
                self._usage(message["usage"])
                self.record.fingerprint = message.get("system_fingerprint")
            for choice in message.get("choices") or ():
                self._choice(choice, now)
        except (ValueError, AttributeError, TypeError, KeyError):
            raise Broken("not a stream", f"the server sent an event that is not OpenAI's: {data[:80]!r}") from None

    def _choice(self, choice: Mapping[str, Any], now: float) -> None:
        record = self.record
        # A chat begins with a piece that names the role and holds no token.
        piece = choice.get("delta") or choice
        if any(piece.get(name) for name in CONTENT):
            self._pieces += 1
            record.output_tokens = max(record.output_tokens, self._pieces)  # until usage says it better
            if record.last is None:
                record.first = now
            else:
                record.gaps.append(now - record.last)
            record.last = now
        if choice.get("finish_reason"):
            record.finish_reason = choice["finish_reason"]

    def _usage(self, usage: Mapping[str, Any]) -> None:
        self.record.prompt_tokens = usage.get("prompt_tokens") or 0
        self.record.output_tokens = usage.get("completion_tokens") or 0
        self.record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True)
class Asker:
    """Owns: how requests are put to this server.  Promises: each ends with its record filled in, whatever happens."""

    client: Client
    model: str
    chat: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, prompt: str | list[int], output: int) -> bytes:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": output, "temperature": 0.0, "stream": True}
        asked["stream_options"] = {"include_usage": True}
        if self.chat:
            asked["messages"] = [{"role": "user", "content": prompt}]
        else:
            asked["prompt"] = prompt
        return json.dumps(asked | dict(self.extra)).encode()

    async def ask(self, body: bytes, record: Record) -> None:
        """Sends, listens, and writes down; a failure is in the record, only being cancelled is raised."""
        listener = Listener(record)
        record.sent = time.perf_counter()
        try:
            path = "/v1/chat/completions" if self.chat else "/v1/completions"
            reply = await self.client.exchange("POST", path, body, listener.take)
            if reply.status >= 300:
                record.retry_after = _seconds(reply.headers.get("retry-after"))
                raise Broken(f"HTTP {reply.status}", said(reply.body))
            if not listener.done and record.finish_reason is None:
                raise Broken("cut off", f"the stream ended after {record.output_tokens} tokens without its end")
        except Broken as error:
            record.failure, record.error = error.kind, str(error)
        except BaseException:
            record.failure = record.error = STOPPED
            raise
        finally:
            record.ended = time.perf_counter()


async def served_model(client: Client) -> str:
    """The first model that the server lists.  Raises EngineError, with what to do, if it isn't one of OpenAI's kind."""
    reply = await _get(client, "/v1/models")
    try:
        return str(json.loads(reply.body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise EngineError(f"{client.address} lists no models at /v1/models: name one with --model") from None


async def word_ids(client: Client, model: str, words: list[str]) -> list[int]:
    """Token ids of common words, as the server's /tokenize gives them."""
    body = json.dumps({"model": model, "prompt": " " + " ".join(words), "add_special_tokens": False}).encode()
    try:
        reply = await client.exchange("POST", "/tokenize", body)
        ids = [int(i) for i in json.loads(reply.body)["tokens"]]
    except (Broken, ValueError, LookupError, TypeError):
        ids = []
    if not ids:
        raise EngineError(f"{client.address} has no /tokenize to ask for token ids: give --vocab with their number")
    return ids


async def _get(client: Client, path: str) -> Reply:
    try:
        reply = await client.exchange("GET", path)
    except Broken as error:
        raise EngineError(f"nothing answers at {client.address}: {error}") from None
    if reply.status in (401, 403):
        raise EngineError(f"{client.address} wants a key: {said(reply.body)} (give one with --api-key)")
    if reply.status >= 300:
        raise EngineError(f"{client.address}{path} answers with HTTP {reply.status}: is it OpenAI-compatible?")
    return reply


def said(body: bytes) -> str:
    """What an error's body says, in one line."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = error if isinstance(error, str) else error.get("message") or error.get("detail") or error
    except (ValueError, AttributeError):
        text = body.decode("utf-8", "replace")
    return " ".join(str(text).split())[:300]


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None
