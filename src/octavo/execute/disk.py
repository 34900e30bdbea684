"""The disk tier's bytes: one file a block, written aside and renamed, checked when read; a thread does the waiting.

File, little-endian::

    8  magic "OCTKV\\x01\\0\\0"
    4  length of the label        4  length of the payload
    .. label: what the block is (its key, its group, its tokens)
    .. payload: the block's bytes
    16 BLAKE2b over all of the above

A file that is cut off, altered, or of another label is a miss.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import IO

import numpy as np

from octavo.core.plan import Move

log = logging.getLogger("octavo.disk")

MAGIC = b"OCTKV\x01\0\0"
HEAD = struct.Struct("<8sII")
SUM = 16
QUEUE = 64  # blocks that may wait to be written; more are dropped (a miss later, never a stall)


def file_bytes(block_bytes: int, label_bytes: int) -> int:
    return HEAD.size + label_bytes + block_bytes + SUM


def encode(label: bytes, payload: bytes) -> bytes:
    body = HEAD.pack(MAGIC, len(label), len(payload)) + label + payload
    return body + blake2b(body, digest_size=SUM).digest()


def decode(data: bytes, label: bytes, size: int) -> bytes | None:
    """The payload, or None if the file is not the whole and unaltered block that ``label`` names."""
    if len(data) != file_bytes(size, len(label)):
        return None
    magic, label_size, payload_size = HEAD.unpack_from(data)
    if magic != MAGIC or label_size != len(label) or payload_size != size:
        return None
    if data[HEAD.size : HEAD.size + label_size] != label:
        return None
    if blake2b(data[:-SUM], digest_size=SUM).digest() != data[-SUM:]:
        return None
    return data[HEAD.size + label_size : -SUM]


class DiskStore:
    """Owns: a folder of block files, its lock, and the thread that reads and writes them.

    Promises: ``write`` and ``read`` return at once; what became of them comes from :meth:`completed`; killing the
    process at any moment leaves whole files and leftovers that the next start removes; only the user can read them.
    """

    def __init__(self, folder: Path, block_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(folder, 0o700)
        self.folder = folder
        self.block_bytes = block_bytes
        self._lock: IO[bytes] | None = open(folder / "lock", "wb")  # noqa: SIM115 - held while the store lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise
        for leftover in folder.glob("*.tmp"):
            leftover.unlink(missing_ok=True)
        self._names: dict[int, str] = {}  # of the file in each slot
        self._slots: dict[str, int] = {}  # and back; a file that was given up and written again is in its newest slot
        self._work: deque[tuple[Move | None, str, np.ndarray | None, np.ndarray | None]] = deque()
        self._done: deque[tuple[Move, bool]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._busy = 0
        self._thread = threading.Thread(target=self._loop, name="octavo-disk", daemon=True)
        self._thread.start()

    def files(self) -> list[str]:
        """Names of the block files that are there, the one used longest ago first."""
        entries = [entry for entry in os.scandir(self.folder) if entry.name.endswith(".kv")]
        found = [(entry.stat().st_mtime_ns, entry.name) for entry in entries]
        return [name[:-3] for _, name in sorted(found)]

    def adopt(self, kept: list[tuple[int, str]]) -> None:
        """These files are in these slots; all others go."""
        for slot, name in kept:
            self._names[slot], self._slots[name] = name, slot
        for name in self.files():
            if name not in self._slots:
                self._remove(name)

    def write(self, move: Move, block: np.ndarray, wait: bool = False) -> None:
        """Take a copy of ``block``, to be written as ``move.name``; the slot's old file goes."""
        with self._wake:
            slot = move.target.slot
            old = self._names.pop(slot, None)
            if old is not None and self._slots.get(old) == slot:
                del self._slots[old]
                if old != move.name or (not wait and len(self._work) >= QUEUE):
                    # In its turn: the file may still be waiting to be written or read.
                    self._work.append((None, old, None, None))
            while wait and len(self._work) >= QUEUE:
                self._wake.wait()
            if len(self._work) >= QUEUE:
                self._done.append((move, False))
                return
            self._names[slot], self._slots[move.name] = move.name, slot
            self._work.append((move, move.name, block.copy(), None))
            self._wake.notify_all()

    def read(self, move: Move, into: np.ndarray) -> None:
        """Fill ``into`` (a slot that nobody else touches meanwhile) from the file of ``move.name``."""
        with self._wake:
            self._work.append((move, move.name, None, into))
            self._wake.notify_all()

    def completed(self, wait: float = 0.0) -> list[tuple[Move, bool]]:
        """What has been done since the last call; with ``wait``, waits up to so many seconds for the first."""
        with self._wake:
            if not self._done and wait and (self._work or self._busy):
                self._wake.wait_for(lambda: self._done, wait)
            done = list(self._done)
            self._done.clear()
        return done

    def close(self) -> None:
        """Finish what is queued, end the thread, let go of the folder."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not self._work and not self._closing:
                    self._wake.wait()
                if not self._work:
                    return
                move, name, block, into = self._work.popleft()
                self._busy += 1
            if move is None:
                self._remove(name)
                with self._wake:
                    self._busy -= 1
                    self._wake.notify_all()
                continue
            ok = self._write_file(name, move.label, block) if block is not None else self._read_file(name, move, into)
            with self._wake:
                self._busy -= 1
                self._done.append((move, ok))
                self._wake.notify_all()

    def _write_file(self, name: str, label: bytes, block: np.ndarray) -> bool:
        path = self.folder / f"{name}.kv"
        aside = path.with_suffix(".tmp")
        try:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(encode(label, block.tobytes()))
            os.replace(aside, path)
            return True
        except OSError as error:
            log.warning("a block could not be written to %s: %s", self.folder, error)
            aside.unlink(missing_ok=True)
            return False

    def _read_file(self, name: str, move: Move, into: np.ndarray | None) -> bool:
        assert into is not None
        path = self.folder / f"{name}.kv"
        try:
            payload = decode(path.read_bytes(), move.label, self.block_bytes)
            if payload is not None:
                os.utime(path)
        except OSError as error:
            log.warning("a block could not be read from %s: %s", self.folder, error)
            return False
        if payload is None:
            log.warning("%s is cut off, altered or of something else: it is ignored and removed", path.name)
            self._remove(name)
            return False
        into[:] = np.frombuffer(payload, np.uint8)
        return True

    def _remove(self, name: str) -> None:
        try:
            (self.folder / f"{name}.kv").unlink(missing_ok=True)
        except OSError as error:
            log.warning("a block file could not be removed: %s", error)
