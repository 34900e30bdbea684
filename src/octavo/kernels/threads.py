"""How many threads to compute with: the CPUs that this process may really use, not those that the machine has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_Reader = Callable[[Path], float | None]


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads and, for the log, where it comes from."""

    count: int
    reason: str


def choose_threads(
    asked: int | None = None, root: Path = Path("/"), affinity: Iterable[int] | None = None
) -> ThreadChoice:
    """One thread for each core in the process's affinity, at most what the cgroup quota pays for.

    ``asked`` overrides all of it.  ``root`` is where proc and sys are found, ``affinity`` the CPUs allowed; both are
    for tests.  A quota of 2.5 CPUs gives two threads: a third would wait for its share half of the time, and the
    others for it.
    """
    if asked is not None:
        if asked < 1:
            raise ValueError(f"threads must be at least 1, not {asked}")
        return ThreadChoice(asked, "as asked")
    cpus = sorted(_affinity() if affinity is None else affinity)
    count = max(1, len(cpus))
    reason = f"{count} CPU{'s' if count > 1 else ''} in the process's affinity"
    cores = _cores(root, cpus)
    if cores < count:
        reason += f", which are {cores} core{'s' if cores > 1 else ''}"
        count = cores
    quota = cpu_quota(root)
    if quota is not None and quota < count:
        count = max(1, int(quota))
        reason = f"the cgroup's quota of {quota:g} CPUs ({reason})"
    return ThreadChoice(count, reason)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs that the process's cgroup and all its parents allow; None without a limit.  Reads cgroup v2 and v1."""
    limits = [limit for folder, read in _cgroup_folders(root) if (limit := read(folder)) is not None]
    return min(limits, default=None)


def _affinity() -> Iterable[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def _cores(root: Path, cpus: list[int]) -> int:
    """Distinct cores among CPUs: two threads of one core share its vector units, so a second one gains nothing."""
    cores = set()
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        cores.add(_text(folder / "thread_siblings_list") or _text(folder / "core_cpus_list") or f"cpu {cpu}")
    return max(1, len(cores))


def _cgroup_folders(root: Path) -> list[tuple[Path, _Reader]]:
    """Folders of the process's cgroup and its parents, innermost first, each with what reads its quota."""
    mounts = _cgroup_mounts(root)
    folders: list[tuple[Path, _Reader]] = []
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            kind, read = "cgroup2", _quota_v2
        elif "cpu" in controllers.split(","):
            kind, read = "cgroup", _quota_v1
        else:
            continue
        for mount_root, mount_point in mounts.get(kind, []):
            base = root / mount_point.lstrip("/")
            inner = _inside(path, mount_root)
            folders += [(base / part, read) for part in (inner, *inner.parents)]
    return folders


def _inside(path: str, mount_root: str) -> PurePosixPath:
    """A cgroup's path relative to its mount; in a container the mount often shows the group itself as its root."""
    try:
        relative = PurePosixPath(path).relative_to(mount_root)
    except ValueError:
        relative = PurePosixPath(path.lstrip("/"))
    return PurePosixPath(*[part for part in relative.parts if part not in ("..", "/")])


def _cgroup_mounts(root: Path) -> dict[str, list[tuple[str, str]]]:
    """Filesystem kind -> (root inside the filesystem, mount point), from mountinfo; v1 mounts of the cpu controller."""
    mounts: dict[str, list[tuple[str, str]]] = {}
    for line in (_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3 or tail[0] not in ("cgroup", "cgroup2"):
            continue
        if tail[0] == "cgroup" and "cpu" not in tail[2].split(","):
            continue
        mounts.setdefault(tail[0], []).append((fields[3], fields[4]))
    return mounts


def _quota_v2(folder: Path) -> float | None:
    """cpu.max is "quota period" in microseconds, or "max period"."""
    fields = (_text(folder / "cpu.max") or "").split()
    return _ratio(*fields) if len(fields) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    """cpu.cfs_quota_us is -1 without a limit."""
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    return _ratio(quota, period) if quota and period else None


def _ratio(quota: str, period: str) -> float | None:
    try:
        q, p = int(quota), int(period)
    except ValueError:
        return None
    return q / p if q > 0 and p > 0 else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
