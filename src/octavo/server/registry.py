"""The sessions that clients have open."""

from __future__ import annotations

import asyncio
import secrets

from octavo.engine.async_session import AsyncSession
from octavo.server.errors import ApiError


class Kept:
    """Owns: a session, whose it is, and when it is to go."""

    def __init__(self, session: AsyncSession, user: str) -> None:
        self.session = session
        self.user = user
        self.using = 0
        self.timer: asyncio.TimerHandle | None = None


class Sessions:
    """Owns: the sessions of all clients, by id.

    Promises: at most ``most`` at a time; one that nobody has used for ``idle`` seconds is deleted, its blocks with it;
    with keys, a session is there only for the key that made it.
    """

    def __init__(self, most: int, idle: float) -> None:
        self._most = most
        self._idle = idle
        self.kept: dict[str, Kept] = {}

    def add(self, session: AsyncSession, user: str) -> str:
        id = f"session-{secrets.token_hex(16)}"
        self.kept[id] = kept = Kept(session, user)
        self._rest(id, kept)
        return id

    def room(self, more: int = 1) -> None:
        """Raises ApiError if there is none."""
        if len(self.kept) + more > self._most:
            message = f"there are {len(self.kept)} sessions, and {self._most} is the limit: delete some"
            raise ApiError(429, message, code="too_many_sessions", headers={"Retry-After": "10"})

    def find(self, id: str, user: str) -> Kept:
        kept = self.kept.get(id)
        if kept is None or kept.user != user:
            raise ApiError(404, f"there is no session {id!r}; unused ones go after {self._idle:g} s", param="id")
        return kept

    def use(self, id: str, user: str) -> Using:
        return Using(self, id, self.find(id, user))

    def begin(self, kept: Kept) -> None:
        kept.using += 1
        if kept.timer is not None:
            kept.timer.cancel()

    def end(self, id: str, kept: Kept) -> None:
        kept.using -= 1
        if not kept.using and self.kept.get(id) is kept:
            self._rest(id, kept)

    def _rest(self, id: str, kept: Kept) -> None:
        loop = asyncio.get_running_loop()
        kept.timer = loop.call_later(self._idle, self.kept.pop, id, None)  # dropped sessions give back their blocks


class Using:
    """A session while it is worked on: it does not go for lack of use."""

    def __init__(self, sessions: Sessions, id: str, kept: Kept) -> None:
        self._sessions, self._id, self._kept = sessions, id, kept

    def __enter__(self) -> AsyncSession:
        self._sessions.begin(self._kept)
        return self._kept.session

    def __exit__(self, *_: object) -> None:
        self._sessions.end(self._id, self._kept)
