"""How much memory the KV cache gets, and what fits in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.config import EngineConfig, format_size
from octavo.core.layout import KVLayout
from octavo.errors import ConfigError
from octavo.paging.kv import KV

SHARE = 0.6  # of what is left beside the weights, for K and V
STAGING = 64  # host slots a group that a disk tier has at least
HEAD_ROOM = 256 << 20  # for activations, the interpreter, and the rest of the machine


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that this process may still use, and what says so: the machine's available memory or a cgroup's limit."""
    best, why = 1 << 40, "no limit found"
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                best, why = int(line.split()[1]) * 1024, "available memory"
    except (OSError, ValueError, IndexError):
        pass
    for used, limit, reason in _cgroups(root):
        if limit - used < best:
            best, why = max(0, limit - used), reason
    return best, why


def _cgroups(root: Path) -> list[tuple[int, int, str]]:
    """(used, limit, name) of every memory cgroup that holds this process, its parents included; v1 and v2."""
    found = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        base = root / "sys/fs/cgroup"
        if controllers == "":
            names = ("memory.current", "memory.max")
        elif "memory" in controllers.split(","):
            base, names = base / "memory", ("memory.usage_in_bytes", "memory.limit_in_bytes")
        else:
            continue
        here = base / path.lstrip("/")
        for folder in (here, *here.parents):
            try:
                used, limit = ((folder / n).read_text().strip() for n in names)
                if limit != "max" and int(limit) < 1 << 50:
                    found.append((int(used), int(limit), f"memory limit of cgroup {folder.relative_to(base) or '/'}"))
            except (OSError, ValueError):
                pass
            if folder == base:
                break
    return found


@dataclass(frozen=True)
class MemoryPlan:
    """The size of the KV cache and what it means for requests."""

    blocks: int
    layout: KVLayout
    context: int  # most tokens of one sequence that the model and the settings allow
    longest: int  # most tokens of one sequence that the pool allows
    why: str

    @property
    def nbytes(self) -> int:
        return self.blocks * self.layout.block_bytes

    @property
    def limit(self) -> int:
        return min(self.context, self.longest)

    def fitting(self, length: int) -> int:
        """How many requests of ``length`` tokens fit at a time."""
        return self.blocks // max(1, _kv(self.blocks, self.layout).blocks_for(length))

    def describe(self) -> str:
        layout = self.layout
        tokens = self.blocks * layout.block_size // len(layout.groups)
        return (
            f"KV cache {format_size(self.nbytes)} ({self.why}): {self.blocks} blocks of {layout.block_size} tokens, "
            f"{format_size(layout.bytes_per_token)} a token, {tokens} tokens in all; "
            f"longest request {self.limit} tokens (model {self.context}), "
            f"{self.fitting(self.limit)} of that length at a time"
        )


def _kv(blocks: int, layout: KVLayout) -> KV:
    return KV(1, layout.block_size, layout.windows) if blocks < 1 else KV(blocks, layout.block_size, layout.windows)


def plan_swap(config: EngineConfig, layout: KVLayout, blocks: int) -> int:
    """Slots of the host tier behind a pool of ``blocks``.  A disk tier needs a few, for blocks to pass through."""
    if config.swap_memory is None:
        size = min(1 << 30, memory_limit()[0] // 10, 2 * blocks * layout.block_bytes)
    else:
        size = int(config.swap_memory)
    if config.preempt == "recompute":
        size = 0
    slots = size // layout.block_bytes
    return max(slots, STAGING * len(layout.groups)) if config.kv_disk is not None else slots


def plan_memory(config: EngineConfig, layout: KVLayout, context: int, weights: int) -> MemoryPlan:
    """Size the KV cache: as set, or from what the process may use, leaving head room.

    ``weights``: bytes that the weights take or will take beside it.  Raises ConfigError naming what would fit.
    """
    available, source = memory_limit()
    free = max(0, available - weights - HEAD_ROOM)
    size = layout.block_bytes
    if config.kv_blocks is not None:
        blocks, why = config.kv_blocks, "kv_blocks"
    elif config.kv_memory is not None:
        assert isinstance(config.kv_memory, int)
        blocks, why = config.kv_memory // size, "kv_memory"
    else:
        shape = KV(1, layout.block_size, layout.windows)
        useful = config.max_running * shape.blocks_for(context)
        blocks = min(int(free * SHARE) // size, useful)
        why = f"{SHARE:.0%} of what {source} leaves" if blocks < useful else "all that can be used"
    fits = f"{format_size(layout.bytes_per_token)} a token, {int(free / layout.bytes_per_token)} tokens would fit"
    if blocks * size > available:
        raise ConfigError(
            f"a KV cache of {format_size(blocks * size)} is beyond the {format_size(available)} of {source} ({fits})",
            sizing(config),
        )
    return planned(config, layout, context, blocks, why, fits)


def planned(config: EngineConfig, layout: KVLayout, context: int, blocks: int, why: str, fits: str) -> MemoryPlan:
    """Raises ConfigError if so few blocks do not hold a token."""
    size = layout.block_bytes
    least = KV(1, layout.block_size, layout.windows).blocks_for(1)
    if blocks < least:
        raise ConfigError(
            f"a KV cache of {blocks} blocks ({format_size(max(0, blocks) * size)}) cannot hold one token: at least "
            f"{least} blocks of {format_size(size)} are needed ({fits})",
            sizing(config),
        )
    longest = KV(blocks, layout.block_size, layout.windows).longest()
    return MemoryPlan(blocks, layout, context, longest, why)


def sizing(config: EngineConfig) -> str:
    """The setting that decides how many blocks there are, for messages."""
    return "kv_blocks" if config.kv_blocks is not None else "kv_memory"
