"""The engine in a thread of its own, and the bridge to asyncio."""

from __future__ import annotations

import asyncio
import logging
import threading
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from octavo.clock import RealClock
from octavo.config import EngineConfig
from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.async_session import AsyncSession
from octavo.engine.build import Parts, build
from octavo.engine.engine import Engine
from octavo.engine.intake import Prompt, checked_options, salted
from octavo.engine.mailbox import Event, Mailbox
from octavo.engine.outputs import Growing, RequestOutput, request_output
from octavo.engine.progress import load_bar
from octavo.engine.session import SessionState
from octavo.engine.stats import Stats
from octavo.errors import EngineError

log = logging.getLogger("octavo.engine")


class Service:
    """Owns: the thread that steps the engine, the orders that other threads have for it, and the mailboxes of those who
    listen.

    Promises: orders are carried out between steps, in the order in which they came; mailboxes are flushed after every
    step and order; if the step loop itself fails, every request in flight ends with an error and later ones are
    refused.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._orders: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._clock = RealClock()
        self._moved: float | None = None  # when the last step or order ended; None while there is nothing to do
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._dirty: list[Mailbox] = []  # of the engine's thread
        engine.orphaned = self._nudge
        self._thread = threading.Thread(target=self._loop, name="octavo-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        self.order(lambda: self.engine.add(request))

    def abort(self, request: Request) -> None:
        self.order(lambda: self.engine.abort(request))

    def call(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` between two steps and wait for its result."""
        done = threading.Event()
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(work())
            except BaseException as error:  # handed to the caller
                result.extend((None, error))
            done.set()

        self.order(run)
        done.wait()
        if len(result) > 1:
            raise result[1]
        return result[0]

    def mailbox(self) -> Mailbox:
        """The mailbox of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._mailboxes.get(loop)
        if found is None:
            for other in [known for known in self._mailboxes if known.is_closed()]:
                del self._mailboxes[other]
            found = self._mailboxes[loop] = Mailbox(loop, self._dirty)
        return found

    def stalled(self) -> float:
        """For how many seconds there has been work without any step or order coming to its end."""
        moved = self._moved
        return 0.0 if moved is None else max(0.0, self._clock.now() - moved)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs and takes orders."""
        return self._thread.is_alive() and self.error is None and not self._closing

    def close(self) -> None:
        """Abort what runs, end the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _nudge(self) -> None:
        """Wake the thread; from a finalizer that may run in any thread, this one included, at any time."""
        if self._wake.acquire(blocking=False):
            self._wake.notify()
            self._wake.release()

    def order(self, work: Callable[[], None]) -> None:
        with self._wake:
            if self._closing or self.error is not None:
                raise EngineError("the engine is closed" if self.error is None else f"the engine failed: {self.error}")
            self._orders.append(work)
            self._wake.notify()

    def _loop(self) -> None:
        try:
            while self._take_orders():
                self.engine.step()
                self._told()
        except BaseException as error:
            log.exception("the step loop failed")
            with self._wake:
                self.error = error
        finally:
            self._end_all()
            self._told()

    def _told(self) -> None:
        """A step or an order has ended: tell those who listen."""
        self._moved = self._clock.now()
        while self._dirty:
            self._dirty.pop().flush()

    def _take_orders(self) -> bool:
        """Carry out what was ordered; wait while there is nothing to do.  False when closing."""
        while True:
            with self._wake:
                while not (self._orders or self._closing or self.engine.busy or self.engine.orphans):
                    self._moved = None
                    self._wake.wait()
                if self._moved is None:
                    self._moved = self._clock.now()
                if self._closing:
                    return False
                work = self._orders.popleft() if self._orders else None
            if work is None:
                return True
            work()
            self._told()

    def _end_all(self) -> None:
        with self._wake:
            self._closing = True
            orders, self._orders = self._orders, deque()
        for work in orders:  # a submit still gets its final event
            try:
                work()
            except Exception:
                log.exception("an order failed while the engine ends")
        for request in list(self.engine.requests.values()):
            if self.error is not None:
                request.error = f"the engine failed: {self.error}"
            try:
                self.engine.abort(request)
            except Exception:  # the engine's own state may be what failed; the client must hear all the same
                if request.sink is not None and not request.finished:
                    request.finished = True
                    request.sink(Finished(request.id, request.error or "the engine failed"))


class AsyncLLM:
    """The engine for asyncio: requests from any task join the running batch at once.

    Same arguments as :class:`octavo.LLM`.  ``generate`` gives results as they grow, ``stream`` only what is new;
    leaving the loop, cancelling the task or :meth:`abort` ends a request within a step.
    """

    def __init__(self, model: str, *, progress: bool = False, **settings: Any) -> None:
        config = EngineConfig.of(**settings)
        with load_bar(progress) as told:
            self._parts: Parts = build(str(model), config, told)
        self._service = Service(self._parts.engine)
        self._requests: dict[str, Request] = {}

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """New tokens and text of each branch as they come; raises EngineError if the engine fails on the request."""
        async with aclosing(self._events(prompt, params, request_id, priority, user, cache_salt)) as events:
            async for _, event in events:
                if isinstance(event, Delta):
                    yield event

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str = "",
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The result so far, whenever it has grown; the last one has ``finished`` set."""
        growing: Growing | None = None
        async with aclosing(self._events(prompt, params, request_id, priority, user, cache_salt)) as events:
            async for request, event in events:
                if isinstance(event, Finished):
                    yield request_output(request)
                else:
                    growing = growing or Growing(request)
                    yield growing.add(event)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> AsyncGenerator[Delta, None]:
        """Like ``stream``, for a conversation."""
        text = self._parts.template.render(messages, tools=tools, **checked_options(chat_template_kwargs))
        tokens = self._parts.tokenizer.encode(text, add_special=False)
        async with aclosing(self.stream(tokens, params, **options)) as deltas:
            async for delta in deltas:
                yield delta

    async def session(
        self, prompt: Prompt | None = None, *, cache_salt: str | None = None, user: str = ""
    ) -> AsyncSession:
        """A text that stays in blocks: append to it, continue it, fork it, rewind it, score what might follow."""
        parts = self._parts
        tokens = array("i") if prompt is None else parts.intake.tokens(prompt)
        salt = salted(cache_salt)
        make = partial(SessionState, parts.engine, parts.intake, tokens, salt, user)
        return AsyncSession(await asyncio.to_thread(self._service.call, make), self._service)

    async def beam_search(self, prompt: Prompt, width: int = 4, max_tokens: int = 64, **options: Any) -> RequestOutput:
        """The best answers by beam search; arguments as :meth:`octavo.LLM.beam_search`, for one prompt."""
        done = asyncio.Event()

        def receive(event: Event) -> None:
            if isinstance(event, Finished):
                done.set()

        sink = self._service.mailbox().sink(receive)
        request = self._parts.intake.beam_search(prompt, width=width, max_tokens=max_tokens, sink=sink, **options)
        self._service.submit(request)
        try:
            await done.wait()
        finally:
            if not request.finished:
                self._abort(request)
        if request.error is not None:
            raise EngineError(f"request {request.id}: {request.error}")
        return request_output(request, self._parts.tokenizer.decode)

    async def _events(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int,
        user: str,
        cache_salt: str | None,
    ) -> AsyncGenerator[tuple[Request, Event], None]:
        queue: asyncio.Queue[Event] = asyncio.Queue()
        sink = self._service.mailbox().sink(queue.put_nowait)
        request = self._parts.intake.request(
            prompt, params, id=request_id, priority=priority, user=user, cache_salt=cache_salt, sink=sink
        )
        self._service.submit(request)
        self._requests[request.id] = request
        try:
            while True:
                event = await queue.get()
                if isinstance(event, Finished) and event.error is not None:
                    raise EngineError(f"request {request.id}: {event.error}")
                yield request, event
                if isinstance(event, Finished):
                    return
        finally:
            self._requests.pop(request.id, None)
            if not request.finished:
                self._abort(request)

    def abort(self, request_id: str) -> None:
        """End a request; its stream ends with finish_reason "abort".  Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            self._abort(request)

    def _abort(self, request: Request) -> None:
        try:
            self._service.abort(request)
        except EngineError:
            pass  # closed: everything has been ended already

    @property
    def parts(self) -> Parts:
        """The engine and its parts, for those who build on them; the engine is its own thread's to touch."""
        return self._parts

    @property
    def service(self) -> Service:
        """The engine's thread, for those who submit requests and give orders themselves."""
        return self._service

    @property
    def tokenizer(self) -> Any:
        return self._parts.tokenizer

    def stats(self) -> Stats:
        return self._parts.engine.stats()

    def close(self) -> None:
        """End every request and the engine's thread, give back the memory."""
        self._service.close()
        self._parts.engine.close()

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
