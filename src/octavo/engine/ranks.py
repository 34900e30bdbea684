"""A tensor-parallel engine's processes: what rank 0 and the workers do to load a model together."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.backends import make_backend, settled
from octavo.engine.gpu_memory import room_for
from octavo.engine.load import layout_of, load
from octavo.engine.memory import MemoryPlan, plan_swap, planned
from octavo.errors import OctavoError
from octavo.execute.executor import LocalExecutor
from octavo.execute.parallel import ParallelExecutor, follow
from octavo.execute.team import Team
from octavo.kernels.backend import Backend
from octavo.kernels.parallel import ParallelBackend
from octavo.loading import open_model
from octavo.loading.checkpoint import Checkpoint

TIMEOUT = 120.0  # seconds that a rank waits for the others in an exchange
NO_ROOM = "when the KV cache was taken"
GRACE = 5.0  # more of them, after which a step is broken off from outside


@dataclass(frozen=True)
class Order:
    """What a worker needs to begin."""

    model: str
    config: EngineConfig
    rank: int
    folder: Path
    timeout: float


def load_parallel(
    model: str,
    checkpoint: Checkpoint,
    config: EngineConfig,
    inner: Backend,
    banned: Sequence[int],
    progress: Callable[[int, int], None] | None,
) -> tuple[ParallelExecutor, MemoryPlan, int]:
    """Rank 0's part of loading; returns the executor, the size of the cache, and the slots of the host tier.

    Raises ConfigError, ModelError, or EngineError that says which rank failed.
    """
    _sharing(checkpoint, config)
    chosen = settled(config)
    team = Team(
        config.tensor_parallel,
        "octavo.engine.ranks",
        lambda rank, folder: Order(model, chosen, rank, folder, TIMEOUT),
    )
    try:
        backend = _joined(inner, Order(model, chosen, 0, team.folder, TIMEOUT), team)
        own = backend.layout(layout_of(checkpoint, config), checkpoint.spec.heads)
        program, memory = load(checkpoint, config, backend, own, progress)
        fewest = min(memory.blocks, *team.hear())
        if fewest < memory.blocks:  # another GPU has less room
            memory = planned(config, memory.layout, memory.context, fewest, f"{memory.why}, of the fullest", "")
        host = plan_swap(config, layout_of(checkpoint, config), memory.blocks)
        team.tell(("store", (memory.blocks, host)))
        with room_for(NO_ROOM, backend, config, checkpoint.nbytes // config.tensor_parallel):
            executor = ParallelExecutor(team, TIMEOUT + GRACE, backend, program, own, memory.blocks, banned, host)
        team.hear()
        return executor, memory, host
    except BaseException as error:
        expected = isinstance(error, OctavoError) or not isinstance(error, Exception)
        failure = None if expected else team.failure(error)
        team.close(0.0)
        if failure is None:
            raise
        raise failure from error


def _sharing(checkpoint: Checkpoint, config: EngineConfig) -> None:
    """Raises ConfigError before any process is started, if heads can't be shared."""
    ParallelBackend.share(layout_of(checkpoint, config), checkpoint.spec.heads, config.tensor_parallel)


def _joined(inner: Any, order: Order, team: Team | None = None) -> ParallelBackend:
    """This rank's backend, once all ranks have met."""
    from octavo.kernels.triton.ranks import ProcessGroup

    device, size = getattr(inner, "device", None), order.config.tensor_parallel
    if team is not None:
        team.hear()  # that all are there: who waits to meet another does not see it die
    ranks = ProcessGroup(order.rank, size, order.folder, device, order.timeout)
    if team is not None:
        team.on_loss = ranks.abort
    return ParallelBackend(inner, ranks)


# ---- a worker --------------------------------------------------------------------------------------------------------


def work(order: Order, pipe: Connection) -> None:
    """A worker's life."""
    checkpoint = open_model(order.model, order.config.max_context)
    inner = make_backend(order.config, order.rank)
    pipe.send(("here", None))
    backend = _joined(inner, order)
    try:
        own = backend.layout(layout_of(checkpoint, order.config), checkpoint.spec.heads)
        program, memory = load(checkpoint, order.config, backend, own)
        pipe.send(("blocks", memory.blocks))
        _, (blocks, host) = pipe.recv()
        with room_for(NO_ROOM, backend, order.config, checkpoint.nbytes // order.config.tensor_parallel):
            executor = LocalExecutor(backend, program, own, blocks, (), host)
        pipe.send(("ready", None))
        follow(executor, pipe)
    finally:
        backend.close()


def main(descriptor: int) -> int:
    """Runs the worker that the first message on the pipe orders; signals are for rank 0, whose end is a worker's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent, pipe = os.getppid(), Connection(descriptor)
    order: Order | None = None
    try:
        order = pipe.recv()
        threading.Thread(target=_follow_parent, args=(parent, order.folder), daemon=True).start()
        work(order, pipe)
    except (EOFError, BrokenPipeError, ConnectionResetError):  # rank 0 is gone
        if order is not None:
            shutil.rmtree(order.folder, ignore_errors=True)
        return 1
    except BaseException as error:
        try:
            pipe.send(("failed", str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"))
        except OSError:
            pass  # nobody is left to hear it
        return 1
    return 0


def _follow_parent(parent: int, folder: Path) -> None:
    """End with the parent, also in the middle of an exchange that would wait for it."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
