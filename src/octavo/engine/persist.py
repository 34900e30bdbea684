"""Which files of the disk tier belong to this engine, and who owns their folder."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path

from octavo.config import EngineConfig, format_size
from octavo.core.layout import KVLayout
from octavo.errors import ConfigError
from octavo.execute.disk import DiskStore, file_bytes
from octavo.kernels.backend import Backend
from octavo.loading.checkpoint import Checkpoint
from octavo.loading.pull import cache_dir

log = logging.getLogger("octavo.disk")


def identity(checkpoint: Checkpoint, layout: KVLayout, config: EngineConfig, backend: Backend) -> str:
    """A name that changes with anything that may change a bit of K or V, or the meaning of a token id.

    Weights, tokenizer and rotary settings (the fingerprint), KV dtype and layout, compute mode, backend, instruction
    set or GPU, and kernel build.
    """
    parts = [fingerprint(checkpoint), repr(layout), compute_mode(config, backend), backend.name, backend.build]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def compute_mode(config: EngineConfig, backend: Backend) -> str:
    """How matrices are multiplied: "fast" or "exact" on the CPU, "fixed" or "cublas" on a GPU."""
    return config.gemm if backend.name.startswith("triton") else config.compute


def fingerprint(checkpoint: Checkpoint) -> str:
    """The checkpoint's content hash, itself cached by path, size and time of its files."""
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in checkpoint.files]
    key = hashlib.blake2b(repr((stats, checkpoint.spec)).encode(), digest_size=16).hexdigest()
    known = cache_dir() / "fingerprints" / f"{key}.json"
    try:
        return str(json.loads(known.read_text())["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    found = checkpoint.fingerprint()
    try:
        known.parent.mkdir(parents=True, exist_ok=True)
        aside = known.with_suffix(f".{os.getpid()}.tmp")
        aside.write_text(json.dumps({"fingerprint": found}))
        os.replace(aside, known)
    except OSError as error:
        log.warning("the model's fingerprint could not be kept: %s", error)
    return found


def open_disk(
    checkpoint: Checkpoint, layout: KVLayout, config: EngineConfig, backend: Backend
) -> tuple[DiskStore, int] | None:
    """The store and its number of slots; None if another process owns the folder.

    Raises ConfigError if the folder can't be made or written, or if not one block fits.
    """
    assert isinstance(config.kv_disk, int)
    root = Path(config.kv_disk_path) if config.kv_disk_path else cache_dir() / "kv"
    size = file_bytes(layout.block_bytes, 36 + 4 * layout.block_size)
    folder = root / identity(checkpoint, layout, config, backend)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(root, os.W_OK):
            raise PermissionError(f"{root} is not writable")
        others = _make_room(root, folder.name, config.kv_disk)
        slots = (config.kv_disk - others) // size
        if slots < len(layout.groups):
            raise ConfigError(f"kv_disk {format_size(config.kv_disk)} holds no block of {format_size(size)}", "kv_disk")
        store = DiskStore(folder, layout.block_bytes)
    except BlockingIOError:
        log.warning("%s is in use by another process: the disk tier is off", folder)
        return None
    except OSError as error:
        raise ConfigError(f"the disk tier's folder cannot be used: {error}", "kv_disk_path") from None
    return store, slots


def _make_room(root: Path, own: str, limit: int) -> int:
    """Remove the oldest files of other models, settings and builds beyond half of the limit; returns what is left."""
    found = []
    for folder in root.iterdir():
        if folder.is_dir() and folder.name != own:
            for path in folder.glob("*.kv"):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= limit // 2:
            break
        path.unlink(missing_ok=True)
        total -= size
    return total
