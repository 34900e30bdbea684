"""``octavo chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from typing import Any

from octavo.cli.streaming import Answer, stream
from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM
from octavo.errors import OctavoError, RequestError

HELP = """\
/help   this text
/reset  forget the conversation
/stats  tokens, speed and cache hits of the last answer, and the engine's blocks
/quit   leave (Ctrl-D too)
Ctrl-C stops an answer and keeps what it has so far."""


class Chat:
    """Owns: the messages so far.

    Promises: each turn sends the whole conversation; what earlier turns computed comes from the prefix cache.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.first = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self.first)
        self.last: Answer | None = None

    def check(self) -> None:
        """Raises RequestError if the model has no chat template, before anybody has typed."""
        self.llm.parts.template.render([*self.messages, {"role": "user", "content": "hello"}])

    def say(self, text: str) -> None:
        """One turn.  A refused turn leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        parts = self.llm.parts
        prompt = parts.template.render(asked)
        request = parts.intake.request(prompt, self.params, add_special=False)
        self.last = stream(self.llm, request, _write)
        _write("\n")
        if self.last.interrupted:
            print("[stopped]", file=sys.stderr)
        self.messages = [*asked, {"role": "assistant", "content": self.last.output.outputs[0].text}]

    def reset(self) -> None:
        self.messages = list(self.first)

    def stats(self) -> str:
        lines = []
        if self.last is not None:
            output = self.last.output
            lines.append(
                f"last answer: {len(output.prompt_token_ids)} prompt tokens, {output.num_cached_tokens} of them from "
                f"the prefix cache; first token after {output.first_token_seconds or 0:.2f} s; "
                f"{self.last.tokens} tokens, {self.last.tokens_a_second:.0f} a second"
            )
        return "\n".join([*lines, f"engine: {self.llm.stats()}"])


def run(model: str, system: str | None, engine: dict[str, Any], sampling: dict[str, Any]) -> int:
    params = SamplingParams(**sampling)
    if params.n != 1:
        raise RequestError("n: a chat has one answer a turn", "n")
    terminal = sys.stdin.isatty()
    with LLM(model, progress=terminal, **engine) as llm:
        chat = Chat(llm, params, system)
        chat.check()
        if terminal:
            import readline  # noqa: F401 - arrow keys and a history for input()

            print(f"{model}; /help for commands")
        while (line := _line("> " if terminal else "")) is not None:
            if not _turn(chat, line.strip()):
                break
    return 0


def _turn(chat: Chat, line: str) -> bool:
    """Does what a line says; False to leave."""
    if line in ("/quit", "/exit", "/bye"):
        return False
    if line == "/reset":
        chat.reset()
        print("(a new conversation)")
    elif line == "/stats":
        print(chat.stats())
    elif line == "/help":
        print(HELP)
    elif line.startswith("/"):
        print(f"there is no command {line.split()[0]}; /help lists them")
    elif line:
        try:
            chat.say(line)
        except OctavoError as error:
            more = "; /reset starts a new conversation" if getattr(error, "code", None) else ""
            print(f"error: {error}{more}", file=sys.stderr)
    return True


def _line(prompt: str) -> str | None:
    """The next line; None at the end of the input.  Ctrl-C throws the line away."""
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                print()
            return None
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D to leave)")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
