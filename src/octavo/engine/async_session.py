"""Sessions for asyncio: the same text in blocks, worked on between the steps of the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.outputs import RequestOutput, request_output
from octavo.engine.session import Score, SessionState, Text, as_texts, scores
from octavo.errors import EngineError, RequestError

if TYPE_CHECKING:
    from octavo.engine.service import Service

T = TypeVar("T")


class AsyncSession:
    """Like :class:`octavo.Session`; see :meth:`octavo.AsyncLLM.session`.  Cancelling a call takes it back."""

    def __init__(self, state: SessionState, service: Service) -> None:
        self._state = state
        self._service = service

    @property
    def token_ids(self) -> list[int]:
        return list(self._state.tokens)

    @property
    def text(self) -> str:
        tokenizer = self._state.intake.tokenizer
        return "" if tokenizer is None else tokenizer.decode(self.token_ids)

    def __len__(self) -> int:
        return len(self._state.tokens)

    async def append(self, text: Text) -> int:
        """More text (tokenised on its own, without BOS) or token ids; returns how many tokens."""
        return await self._call(lambda: self._state.append(text))

    async def rewind(self, to: int) -> None:
        """Back to the first ``to`` tokens."""
        await self._call(lambda: self._state.rewind(to))

    async def fork(self, n: int = 1) -> list[AsyncSession]:
        """``n`` sessions with the same text, on the same blocks."""
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 10_000:
            raise RequestError(f"n must be an integer in [1, 10000], not {n!r}", "n")
        states = await self._call(lambda: [self._state.fork() for _ in range(n)])
        return [AsyncSession(state, self._service) for state in states]

    async def stream(self, params: SamplingParams | None = None, **given: Any) -> AsyncGenerator[Delta, None]:
        """Continue the session, telling new tokens and text as they come."""
        async with aclosing(self._answer(params, **given)) as events:
            async for _, event in events:
                if isinstance(event, Delta):
                    yield event

    async def generate(self, params: SamplingParams | None = None, **given: Any) -> RequestOutput:
        """Continue the session; the answer becomes part of it."""
        last: Request | None = None
        async with aclosing(self._answer(params, **given)) as events:
            async for request, _ in events:
                last = request
        assert last is not None
        await self._call(lambda: None)  # the session has the answer's tokens once earlier orders are carried out
        return request_output(last)

    async def score(self, texts: Any) -> list[Score]:
        """How likely each text is as what comes next; the session itself stays as it is."""
        state, items = self._state, as_texts(texts)
        first, waited = await self._start(self._begin_score)
        try:
            if first is not None:
                await waited.get()
            asked, waited = await self._start(lambda sink: [state.score(text, sink=sink) for text in items])
            for _ in asked:
                event = await waited.get()
                while not isinstance(event, Finished):
                    event = await waited.get()
                if event.error is not None:
                    raise EngineError(event.error)
        finally:
            state.busy = False
        return [scores(request, ids) for request, ids in asked]

    async def close(self) -> None:
        """Give back every block."""
        await self._call(self._state.close)

    def _begin_score(self, sink: Any) -> Request | None:
        self._state.check()
        self._state.busy = True
        return self._state.prefill(sink=sink)

    async def _answer(
        self, params: SamplingParams | None, **given: Any
    ) -> AsyncGenerator[tuple[Request, Delta | Finished], None]:
        state = self._state
        request, queue = await self._start(lambda sink: state.begin(params, sink=sink, **given))
        try:
            while True:
                event = await queue.get()
                if isinstance(event, Finished) and event.error is not None:
                    raise EngineError(f"request {request.id}: {event.error}")
                yield request, event
                if isinstance(event, Finished):
                    return
        finally:
            self._service.order(partial(state.take_back, request))

    async def _start(self, begin: Callable[[Any], T]) -> tuple[T, asyncio.Queue[Delta | Finished]]:
        """Have requests added between two steps, their events going to the queue that is returned."""
        queue: asyncio.Queue[Delta | Finished] = asyncio.Queue()
        sink = self._service.mailbox().sink(queue.put_nowait)
        return await self._call(lambda: begin(sink)), queue

    async def _call(self, work: Callable[[], T]) -> T:
        result: T = await asyncio.to_thread(self._service.call, work)
        return result
