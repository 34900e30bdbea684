"""Sessions for asyncio: the same text in blocks, worked on between the steps of the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.outputs import RequestOutput, request_output
from octavo.engine.session import Call, Score, SessionState, Text, as_texts, scored
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
        return request_output(last)

    async def score(self, texts: Any) -> list[Score]:
        """How likely each text is as what comes next; the session itself stays as it is."""
        call, items = Call(self._state), as_texts(texts)
        try:
            first, queue = await self._start(call.prefill)
            if first is not None:
                await _final(queue)
            asked, queue = await self._start(lambda sink: call.score(items, sink))
            for _ in asked:
                await _final(queue)
        finally:
            self._leave(call)
        return [scored(request, ids) for request, ids in asked]

    async def close(self) -> None:
        """Give back every block."""
        await self._call(self._state.close)

    async def _answer(
        self, params: SamplingParams | None, **given: Any
    ) -> AsyncGenerator[tuple[Request, Delta | Finished], None]:
        call = Call(self._state)
        try:
            request, queue = await self._start(lambda sink: call.answer(params, sink=sink, **given))
            while True:
                event = await queue.get()
                if isinstance(event, Finished) and event.error is not None:
                    raise EngineError(f"request {request.id}: {event.error}")
                if isinstance(event, Finished):  # whoever hears of the end finds the session's tokens
                    with suppress(EngineError):  # closed: there was an end all the same
                        await self._call(call.end)
                yield request, event
                if isinstance(event, Finished):
                    return
        finally:
            self._leave(call)

    def _leave(self, call: Call) -> None:
        """Free the session between two steps; also of what a call that is left now has not even begun."""
        with suppress(EngineError):  # closed: everything has been ended already
            self._service.order(call.leave)

    async def _start(self, begin: Callable[[Any], T]) -> tuple[T, asyncio.Queue[Delta | Finished]]:
        """Have requests added between two steps, their events going to the queue that is returned."""
        queue: asyncio.Queue[Delta | Finished] = asyncio.Queue()
        sink = self._service.mailbox().sink(queue.put_nowait)
        return await self._call(lambda: begin(sink)), queue

    async def _call(self, work: Callable[[], T]) -> T:
        result: T = await asyncio.to_thread(self._service.call, work)
        return result


async def _final(queue: asyncio.Queue[Delta | Finished]) -> None:
    """Wait for the final event of one of the requests whose events go to the queue."""
    while not isinstance(await queue.get(), Finished):
        pass
