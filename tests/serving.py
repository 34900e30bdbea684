"""Servers for tests: a real uvicorn on a free port, around a scripted engine or a tiny model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from engines import Pieces, Rig
from octavo import AsyncLLM
from octavo.config import EngineConfig
from octavo.core.plan import Draw, Plan, StepResult
from octavo.engine import service
from octavo.engine.build import Parts
from octavo.server.app import create_app
from octavo.server.receipts import Receipts
from octavo.server.run import Server, bound
from octavo.server.settings import ServerSettings
from octavo.server.state import State
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import _checked

EOS = 256
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}tool:{{ m.content }}\n{% else %}{{ m.role }}:{{ m.content }}\n"
    "{% endif %}{% endfor %}{% if tools %}tools:{{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


AROUND = ((":", "\nassistant:"), (":", "\ntools:1\nassistant:"), ("<", ">"))  # a question, in a chat and in a prompt


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = {
    "fruit": "Apples, pears and plums.",
    "emoji": "Sch\u00f6n \U0001f642 \u4f60\u597d!",
    "one": CALL,
    "two": "Let me see.\n" + CALL + "\n" + CALL.replace("Paris", "Rome"),
    "broken": '<tool_call>\n{"name": "weather", "arguments": {"city": Par',
    "thinking": "<think>\nFirst this.\n</think>\n\nThen that.",
}  # questions and answers, some with calls and thoughts
HERMES = "{# <tool_call> #}{# <think> #}"  # a template's sign that its model writes so


class Bytes(Pieces):
    """A tokenizer whose tokens are single bytes, and an end."""

    def __init__(self) -> None:
        super().__init__([*(bytes([b]) for b in range(256)), b"<eos>"], frozenset([EOS]))
        self.eos_ids = (EOS,)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token] if token < len(self.pieces) else b""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        return list(_checked(text).encode())

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join(self.pieces[i] for i in ids if i not in skipped).decode("utf-8", "replace")


def answering(answers: Mapping[str, str]) -> Callable[[Sequence[int], Draw], int]:
    """Says, byte by byte, the answer to the question that stands last in a conversation, or that a prompt is."""

    def choose(prefix: Sequence[int], draw: Draw) -> int:
        text = b"".join(bytes([t]) for t in prefix if t < 256)
        banned = {t for t, b in draw.bias if b == float("-inf")}
        ends = [
            (text.rfind(start) + len(start), answer)
            for question, answer in answers.items()
            for start in (f"{before}{question}{after}".encode() for before, after in AROUND)
            if start in text
        ]
        end, answer = max(ends, default=(len(text), ""))
        rest = answer.encode()[len(text) - end :]
        token = rest[0] if rest else EOS
        return token if token not in banned else ord("!")

    return choose


class Steps:
    """Owns the engine's pace: it runs freely, or as many steps as it is told to."""

    def __init__(self, rig: Rig) -> None:
        self.free = threading.Event()
        self.free.set()
        self.allowed = threading.Semaphore(0)
        self.done = 0
        self.delay = 0.0  # seconds that a step takes
        self._run = rig.executor.run
        rig.executor.run = self.run

    def run(self, plan: Plan) -> StepResult:
        while not self.free.is_set():
            if self.allowed.acquire(timeout=0.02):
                break
        time.sleep(self.delay)
        result: StepResult = self._run(plan)
        self.done += 1
        return result

    def hold(self) -> None:
        self.free.clear()

    def allow(self, count: int = 1) -> None:
        for _ in range(count):
            self.allowed.release()


class Served:
    """A running server and a client for it."""

    def __init__(self, url: str, llm: AsyncLLM, state: State) -> None:
        self.url, self.llm, self.state = url, llm, state
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: Any, **given: Any) -> httpx.Response:
        return self.http.post(path, json=body, **given)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = json.loads(answer.text, parse_constant=_refuse)
        return found

    def chunks(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """A stream's events, without the last, which is [DONE]."""
        answer = self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        return [json.loads(event, parse_constant=_refuse) for event in events[:-1]]

    def error(self, path: str, body: Any, status: int = 400, **given: Any) -> dict[str, Any]:
        answer = self.post(path, body, **given)
        assert answer.status_code == status, (answer.status_code, answer.text)
        error: dict[str, Any] = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
        return error

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        values = [float(line.split()[-1]) for line in self.http.get("/metrics").text.splitlines()
                  if line.startswith((name + "{", name + " "))]  # fmt: skip
        assert values, name
        return sum(values)

    def settled(self) -> None:
        """Wait until nothing runs."""
        until(lambda: not self.llm.parts.engine.busy and not self.state.admission.sequences)


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.002)


@contextmanager
def served(
    llm: AsyncLLM,
    settings: ServerSettings | None = None,
    keys: Mapping[str, str] | None = None,
    model: str = "tiny",
    receipts: Receipts | None = None,
) -> Iterator[Served]:
    settings = settings or ServerSettings(port=0, access_log="off")
    app = create_app(llm, settings, model, keys, receipts)
    listener = bound(settings)
    server = Server(app, settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    thread.start()
    until(lambda: server.started or not thread.is_alive())
    found = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", llm, app.state.octavo)
    try:
        yield found
    finally:
        found.http.close()
        server.handle_exit(15, None)
        app.state.octavo.stop()
        thread.join(20)
        listener.close()
        assert not thread.is_alive(), "the server does not end"


@contextmanager
def scripted(
    answers: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, template: str | None = TEMPLATE, **given: Any
) -> Iterator[tuple[AsyncLLM, Rig, Steps]]:
    """An AsyncLLM whose answers are scripted; ``given`` goes to the rig."""
    rig = Rig(
        **{
            "pool": 400,
            "block_size": 16,
            "budget": 256,
            "tokenizer": Bytes(),
            "vocab": 257,
            "choose": answering(answers),
            "eos_ids": (EOS,),
            "context": 4096,
            **given,
        }
    )
    config = EngineConfig(max_running=given.get("max_running", 64))
    parts = Parts(rig.engine, rig.intake, rig.engine.tokenizer, ChatTemplate(template), None, None, config)  # type: ignore[arg-type]
    steps = Steps(rig)
    monkeypatch.setattr(service, "build", lambda model, config, progress: parts)
    with AsyncLLM("scripted") as llm:
        yield llm, rig, steps
        steps.free.set()


def tiny_llm(folder: Any, **settings: Any) -> AsyncLLM:
    """A tiny model from a folder, exact, one thread."""
    return AsyncLLM(str(folder), threads=1, kv_blocks=256, kv_dtype="float32", compute="exact", audit=True, **settings)


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]
