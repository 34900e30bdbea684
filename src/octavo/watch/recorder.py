"""The last minutes of the pool, as frames; and who is told of new ones."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.errors import EngineError
from octavo.watch.snapshot import Snapshot, encode

log = logging.getLogger("octavo.watch")

SHARE = 0.005  # of the time: most that the copies made in the engine's thread may take, and the frames of a core
KEY_EVERY = 50  # frames


class Frame(NamedTuple):
    serial: int
    time: float
    data: bytes


@dataclass
class Segment:
    """A key frame and those that build on it."""

    frames: list[Frame] = field(default_factory=list)
    size: int = 0


class Recorder:
    """Owns: a thread that asks for snapshots between steps, and the frames of the last minutes.

    Promises: ``seconds`` of history in at most ``most_bytes``, given up from its old end; a snapshot every ``slow``
    seconds while the engine works, every ``fast`` while somebody listens, and none while nothing happens; more
    rarely where copying takes long, so that it never takes more than SHARE of the engine's time.

    ``take`` makes a snapshot in the engine's thread; ``call`` runs it there, between steps, and waits; ``stirred``
    gives a number that changes whenever the engine has worked, and may be asked from any thread.
    """

    def __init__(
        self,
        take: Callable[[], Snapshot],
        call: Callable[[Callable[[], Any]], Any],
        stirred: Callable[[], int],
        *,
        seconds: float = 300.0,
        most_bytes: int = 16 << 20,
        slow: float = 0.25,
        fast: float = 0.1,
    ) -> None:
        self.take, self._call, self._stirred = take, call, stirred
        self._seconds, self._most_bytes = seconds, most_bytes
        self._slow, self._fast = slow, fast
        self._segments: deque[Segment] = deque()
        self._size = 0
        self._serial = 0
        self._latest: Snapshot | None = None
        self._taken = float("-inf")  # when the latest snapshot was made, on this thread's clock
        self._cost = 0.0  # seconds that the last snapshot and its frame took, as a share of what they may
        self._guard = threading.Lock()  # of the segments and the listeners
        self._turn = threading.Lock()  # one snapshot at a time
        self._listeners: list[Callable[[], None]] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="octavo-watch", daemon=True)
        self._thread.start()

    # ---- for readers -----------------------------------------------------------------------------------------------

    def history(self) -> list[Frame]:
        """All frames that are kept; the first is a key."""
        with self._guard:
            return [frame for segment in self._segments for frame in segment.frames]

    def since(self, serial: int) -> list[Frame]:
        """The frames after ``serial``, to one who has that frame; to others, all from the latest key on."""
        with self._guard:
            if not self._segments:
                return []
            last = self._segments[-1].frames
            if self._segments[0].frames[0].serial <= serial <= last[-1].serial and last[-1].serial - serial <= 100:
                return [f for segment in self._segments for f in segment.frames if f.serial > serial]
            return list(last)

    def fresh(self) -> tuple[int, Snapshot]:
        """A snapshot not older than a frame's interval, which is a frame of the history, and that one's number.

        Waits for the running step.  Raises EngineError if the engine is closed or has failed.
        """
        with self._turn:
            if self._latest is None or time.monotonic() - self._taken >= self._fast:
                self._snap()
            assert self._latest is not None
            return self._serial, self._latest

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have ``listener`` called, in some thread, when there is a new frame or the end; the result stops that."""
        with self._guard:
            self._listeners.append(listener)

        def leave() -> None:
            with self._guard:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return leave

    @property
    def watched(self) -> int:
        return len(self._listeners)

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """Nothing more is recorded; waits for nobody, and may be called twice, and after the engine was closed."""
        self._closing.set()
        self._tell()

    def _tell(self) -> None:
        with self._guard:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        seen, still = -1, 0
        while not self._closing.wait(self._pause()):
            stirred = self._stirred()
            # One more snapshot when the engine has come to rest, and then only for those who look.
            still = still + 1 if stirred == seen else 0
            seen = stirred
            if still > 1 and (not self._listeners or still % 5):
                continue
            try:
                with self._turn:
                    self._snap()
            except EngineError:  # closed, or failed: what has been recorded stays
                return
            except Exception:  # the map is no reason for anything else to end
                log.exception("the memory map has no more frames")
                return

    def _pause(self) -> float:
        return max(self._fast if self._listeners else self._slow, self._cost / SHARE)

    def _snap(self) -> None:
        spent = 0.0

        def timed() -> Snapshot:
            nonlocal spent
            began = time.thread_time()
            taken = self.take()
            spent = time.thread_time() - began
            return taken

        now: Snapshot = self._call(timed)
        began = time.thread_time()
        self._taken = time.monotonic()
        if self._latest is None or not now.shows_the_same(self._latest):
            self._keep(now)
        self._cost = max(spent, time.thread_time() - began)

    def _keep(self, now: Snapshot) -> None:
        key = not self._segments or len(self._segments[-1].frames) >= KEY_EVERY
        serial = self._serial + 1
        frame = Frame(serial, now.time, encode(now, None if key else self._latest, serial))
        with self._guard:
            if key:
                self._segments.append(Segment())
            segment = self._segments[-1]
            segment.frames.append(frame)
            segment.size += len(frame.data)
            self._size += len(frame.data)
            while len(self._segments) > 1 and (
                self._size > self._most_bytes or self._segments[0].frames[-1].time < now.time - self._seconds
            ):
                self._size -= self._segments.popleft().size
            self._serial, self._latest = serial, now
        self._tell()
