"""Events on their way from the engine's thread to an event loop: one wake-up a step, however many readers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from octavo.core.events import Delta, Finished
from octavo.core.request import Sink

log = logging.getLogger("octavo.engine")

Event = Delta | Finished
Receive = Callable[[Event], None]


class Mailbox:
    """Owns: what the engine has told the readers of one event loop since that loop was last woken.

    Promises: every reader gets its events in order, in the loop's thread; the loop is woken once a flush; a loop that
    is closed loses its events and disturbs nobody.  Sinks and ``flush`` are called in the engine's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, dirty: list[Mailbox]) -> None:
        self._loop = loop
        self._dirty = dirty  # the mailboxes that have something to deliver
        self._batch: list[tuple[Receive, Event]] = []

    def sink(self, receive: Receive) -> Sink:
        """What a request's events go into, for ``receive`` to get them in the loop."""

        def post(event: Event) -> None:
            if not self._batch:
                self._dirty.append(self)
            self._batch.append((receive, event))

        return post

    def flush(self) -> None:
        batch, self._batch = self._batch, []
        try:
            self._loop.call_soon_threadsafe(_deliver, batch)
        except RuntimeError:  # the loop is closed: nobody listens any more
            pass


def _deliver(batch: list[tuple[Receive, Event]]) -> None:
    for receive, event in batch:
        try:
            receive(event)
        except Exception:  # one reader's fault is not its neighbours'
            log.exception("an event could not be delivered")
