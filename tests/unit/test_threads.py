"""R61: threads follow affinity and cgroup quota, not the host's core count (ollama 17916, vLLM 10971)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.kernels.threads import choose_threads, cpu_quota


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/outer/inner\n",
    "proc/self/mountinfo": "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/job\n3:cpu,cpuacct:/job/step\n1:name=systemd:/x\n",
    "proc/self/mountinfo": (
        "31 25 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 25 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    ),
}


def test_affinity_alone(tmp_path: Path) -> None:
    choice = choose_threads(root=machine(tmp_path, {}), affinity=[0, 2, 5])
    assert choice.count == 3 and "affinity" in choice.reason
    assert choose_threads(root=tmp_path, affinity=[0]).count == 1


def test_what_is_asked_for_wins(tmp_path: Path) -> None:
    choice = choose_threads(7, root=machine(tmp_path, V2), affinity=[0])
    assert choice.count == 7 and "asked" in choice.reason
    with pytest.raises(ValueError, match="0"):
        choose_threads(0)


@pytest.mark.parametrize(
    "own, parent, top, count",
    [
        ("200000 100000", "max 100000", None, 2),
        ("max 100000", "300000 100000", None, 3),  # a parent's limit binds too
        ("400000 100000", "150000 100000", None, 1),  # 1.5 CPUs: one thread that never waits for its share
        ("50000 100000", "max 100000", None, 1),
        ("max 100000", "max 100000", "200000 100000", 2),
        ("max 100000", "max 100000", None, 8),
        ("1600000 100000", "max 100000", None, 8),  # more than the affinity
        ("nonsense", "", None, 8),
    ],
)
def test_quota_of_cgroup_v2(tmp_path: Path, own: str, parent: str, top: str | None, count: int) -> None:
    files = {"sys/fs/cgroup/outer/inner/cpu.max": own, "sys/fs/cgroup/outer/cpu.max": parent}
    if top:
        files["sys/fs/cgroup/cpu.max"] = top
    choice = choose_threads(root=machine(tmp_path, V2 | files), affinity=range(8))
    assert choice.count == count
    assert ("quota" in choice.reason) == (count < 8)


def test_quota_of_cgroup_v1(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/cpu,cpuacct/job/step/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu,cpuacct/job/step/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
        "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
    }
    root = machine(tmp_path, V1 | files)
    assert cpu_quota(root) == 2.5
    assert choose_threads(root=root, affinity=range(16)).count == 2


def test_a_container_that_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    """The mount shows the group itself, while /proc still tells the path on the host, or one above the namespace."""
    mount = "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n"
    files = {"proc/self/mountinfo": mount, "sys/fs/cgroup/cpu.max": "200000 100000"}
    for path in ("/docker/abc", "/", "/../../other"):
        root = machine(tmp_path, files | {"proc/self/cgroup": f"0::{path}\n"})
        assert cpu_quota(root) == 2


def test_two_threads_of_one_core_count_once(tmp_path: Path) -> None:
    cpu = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = machine(tmp_path, {cpu.format(i): f"{i % 4},{i % 4 + 4}" for i in range(8)})
    choice = choose_threads(root=root, affinity=range(8))
    assert choice.count == 4 and "4 cores" in choice.reason
    assert choose_threads(root=root, affinity=[0, 4]).count == 1
    assert choose_threads(root=root, affinity=[0, 1, 2]).count == 3


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_process_on_one_cpu_takes_one_thread() -> None:
    """What `taskset -c 0` does."""
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from octavo.kernels.cpu import CpuBackend\n"
        "print(CpuBackend().threads.count)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "1"


def test_here() -> None:
    assert 1 <= choose_threads().count <= len(os.sched_getaffinity(0))
