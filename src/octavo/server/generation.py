"""From a request that is checked to its events: into the queue, through the engine, out again, whatever happens."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.core.events import Delta, Finished
from octavo.core.request import Request
from octavo.engine.mailbox import Event
from octavo.errors import EngineError, RequestError
from octavo.server.admission import Place
from octavo.server.errors import ApiError
from octavo.server.to_request import Asked

if TYPE_CHECKING:
    from octavo.server.state import State

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Told = list[tuple[int, Delta]]  # which prompt, and what is new of one of its branches

LONG_TEXT = 4096  # characters from which on a text is tokenised beside the event loop


class ClientLeft(Exception):
    """Nobody listens any more."""


class Generation:
    """Owns: the engine's requests that answer one HTTP request, their places in the queue, and the events that the
    reader has not taken yet.

    Promises: however it ends, every request is finished or taken back and every place given back; what a slow reader
    leaves lying is joined, a branch at a time, and never holds up the engine or a neighbour.
    """

    def __init__(self, state: State, asked: Asked) -> None:
        self.state = state
        self.asked = asked
        self.requests: list[Request] = []
        self.generated = 0  # output tokens told so far
        self._places: list[Place] = []
        self._told: Told = []
        self._open = 0
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None  # waits for news
        self._watch: asyncio.Task[None] | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._began = state.now()
        self._last: dict[tuple[int, int], float] = {}  # when a branch was last heard of

    # ---- the beginning ---------------------------------------------------------------------------------------------

    async def start(self, prompts: Sequence[Any], receive: Receive, *, add_special: bool, request_id: str) -> None:
        """Check, queue and submit; raises RequestError or ApiError, and then nothing has begun."""
        state, asked = self.state, self.asked
        state.admission.check()
        ids = [await self._tokens(prompt, add_special) for prompt in prompts]
        await self._compile()
        mailbox = state.llm.service.mailbox()
        for index, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
            request = asked.request(
                state.llm.parts.intake,
                tokens,
                seed=asked.seeds[index] if asked.seeds else None,
                id=request_id if len(prompts) == 1 else f"{request_id}-{index}",
                sink=mailbox.sink(partial(self._receive, index)),
            )
            request.prompt_text = prompt if isinstance(prompt, str) else None
            self.requests.append(request)
        self._places = state.admission.enter([(asked.sequences, len(tokens)) for tokens in ids])
        self._open = len(self.requests)
        loop = asyncio.get_running_loop()
        self._watch = loop.create_task(self._watched(receive))
        seconds = asked.timeout or state.settings.request_timeout
        if seconds is not None:
            self._limit = loop.call_later(seconds, self._too_late, seconds)
        state.generations[self] = None
        try:
            for request in self.requests:
                state.llm.service.submit(request)
        except EngineError:
            for place in self._places:
                place.leave()
            self.end()
            raise

    async def _compile(self) -> None:
        """A guide is compiled beside the event loop: a large schema takes its time."""
        guide, guides = self.asked.params.guide, self.state.llm.parts.intake.guides
        if guide is not None and guides is not None:
            try:
                await asyncio.to_thread(guides.compile, guide)
            except RequestError as error:
                field = self.asked.form
                raise RequestError(f"{field}: {str(error).removeprefix('guide: ')}", field) from None

    async def _tokens(self, prompt: Any, add_special: bool) -> array[int]:
        intake = self.state.llm.parts.intake
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            return await asyncio.to_thread(intake.tokens, prompt, add_special)
        return intake.tokens(prompt, add_special)

    # ---- what comes ------------------------------------------------------------------------------------------------

    def _receive(self, index: int, event: Event) -> None:
        """An event of the engine's, in the loop; the reader may be slow, but this is not."""
        now, metrics = self.state.now(), self.state.metrics
        if isinstance(event, Finished):
            self._places[index].leave()
            self._open -= 1
            metrics.ended(self.requests[index], now - self._began)
            if event.error is not None and self._error is None:
                self._error = EngineError(event.error)
        else:
            key = index, event.branch
            before = self._last.get(key)
            if before is not None:
                metrics.inter_token.observe(now - before)
            elif event.tokens:
                if not any(i == index for i, _ in self._last):
                    self._places[index].started()
                    metrics.first_token.observe(now - self._began)
            self._last[key] = now
            self.generated += len(event.tokens)
            self._told.append((index, event))
        self._wake()

    async def take(self) -> Told:
        """What is new, joined for each branch; empty when all has been told.

        Raises EngineError, ApiError or ClientLeft; what was told before an error of the engine's is lost with it.
        """
        while True:
            if self._error is not None:
                raise self._error
            if self._told:
                told, self._told = self._told, []
                return told if len(told) == 1 else joined(told)
            if not self._open:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def whole(self) -> bool:
        """Whether all of the answer came, and no error."""
        return self._error is None and not self._open and bool(self.requests)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End everything with an error for the reader."""
        if self._error is None and self._open:
            self._error = error
            self._abort()
            self._wake()

    def end(self) -> None:
        """The reader is done, or gone: what still runs is taken back."""
        self.state.generations.pop(self, None)
        if self._watch is not None:
            self._watch.cancel()
        if self._limit is not None:
            self._limit.cancel()
        self._abort()

    def _abort(self) -> None:
        for request in self.requests:
            if not request.finished:
                try:
                    self.state.llm.service.abort(request)
                except EngineError:  # closed: everything has been ended already
                    pass

    def _too_late(self, seconds: float) -> None:
        message = f"the request took longer than its limit of {seconds:g} s"
        # Trying again would only take as long: the official clients are told not to.
        self.fail(ApiError(504, message, code="request_timeout", headers={"x-should-retry": "false"}))

    async def _watched(self, receive: Receive) -> None:
        while (await receive()).get("type") != "http.disconnect":
            pass
        self.fail(ClientLeft())

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()


def joined(told: Told) -> Told:
    """One delta for each branch, in the order in which the branches were first heard of."""
    out: dict[tuple[int, int], Delta] = {}
    for index, new in told:
        key = index, new.branch
        old = out.get(key)
        if old is not None:
            new = Delta(
                new.request,
                new.branch,
                old.tokens + new.tokens,
                old.text + new.text,
                old.logprobs + new.logprobs,
                new.finish_reason,
                new.stop_reason,
            )
        out[key] = new
    return [(index, delta) for (index, _), delta in out.items()]
