"""One request at a time, its text as it comes: what ``generate`` with one prompt and ``chat`` need."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.events import Delta, Finished
from octavo.core.request import Request
from octavo.engine.llm import LLM, Interrupts
from octavo.engine.outputs import RequestOutput, request_output
from octavo.errors import EngineError


@dataclass(frozen=True)
class Answer:
    """A streamed request's result, how long it took, and whether Ctrl-C cut it off."""

    output: RequestOutput
    seconds: float
    interrupted: bool

    @property
    def tokens(self) -> int:
        return sum(len(o.token_ids) for o in self.output.outputs)

    @property
    def tokens_a_second(self) -> float:
        """Of decoding: from the first token to the last."""
        decoding = self.seconds - (self.output.first_token_seconds or 0.0)
        return (self.tokens - 1) / decoding if self.tokens > 1 and decoding > 0 else 0.0


def stream(llm: LLM, request: Request, write: Callable[[str], None]) -> Answer:
    """Runs one request and hands on its text; Ctrl-C ends it between two steps, with what it has so far.

    Raises EngineError if the engine could not compute it.
    """

    def sink(event: Delta | Finished) -> None:
        if isinstance(event, Delta) and event.text and event.branch == 0:
            write(event.text)

    engine = llm.parts.engine
    request.sink = sink
    began = time.perf_counter()
    stopped = False
    with Interrupts() as interrupted:
        engine.add(request)
        try:
            while not request.finished and not stopped:
                engine.step()
                stopped = interrupted()
        finally:
            engine.abort(request)
    if request.error is not None:
        raise EngineError(f"the engine could not compute the answer: {request.error}")
    return Answer(request_output(request), time.perf_counter() - began, stopped)
