"""How large the KV cache becomes, and what the messages say of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import EngineConfig, format_size, parse_size
from octavo.core.layout import KVLayout, LayerGroup, group_layers
from octavo.engine import memory
from octavo.engine.memory import HEAD_ROOM, MemoryPlan, memory_limit, plan_memory
from octavo.errors import ConfigError
from octavo.paging.kv import KV

LAYOUT = KVLayout(16, 2, 32, "float16", (LayerGroup(None, (0, 1)),))  # blocks of 8 KiB
MIB = 1 << 20


def machine(root: Path, available: int, cgroup: str | None = None, **files: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available // 1024} kB\n")
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit(machine(tmp_path, 512 * MIB)) == (512 * MIB, "available memory")


def test_the_container_is_the_limit(tmp_path: Path) -> None:
    """cgroup v2: the tightest of the group and its parents, less what is used."""
    root = machine(
        tmp_path,
        8192 * MIB,
        "0::/a/b\n",
        a__b__memory_dot_max="max\n",
        a__b__memory_dot_current=f"{100 * MIB}\n",
        a__memory_dot_max=f"{2048 * MIB}\n",
        a__memory_dot_current=f"{48 * MIB}\n",
    )
    assert memory_limit(root) == (2000 * MIB, "memory limit of cgroup a")


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        8192 * MIB,
        "5:memory:/c\n4:cpu:/c\n",
        memory__c__memory_dot_limit_in_bytes=f"{300 * MIB}",
        memory__c__memory_dot_usage_in_bytes=f"{400 * MIB}",
    )
    assert memory_limit(root)[0] == 0, "over its limit already"


def test_nothing_is_known(tmp_path: Path) -> None:
    limit, why = memory_limit(tmp_path)
    assert limit == 1 << 40 and why == "no limit found"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: many kB\n")
    assert memory_limit(tmp_path)[1] == "no limit found"


def planned(monkeypatch: pytest.MonkeyPatch, available: int, context: int = 4096, **settings: object) -> MemoryPlan:
    monkeypatch.setattr(memory, "memory_limit", lambda: (available, "available memory"))
    return plan_memory(EngineConfig.of(**settings), LAYOUT, context, weights=100 * MIB)


def test_r62_the_default_leaves_head_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """R62: weights and head room first, then a share of the rest, and never more than can be of use."""
    plan = planned(monkeypatch, 2048 * MIB, context=10**6)
    assert 0.3 * 2048 * MIB < plan.nbytes < 0.6 * (2048 * MIB - HEAD_ROOM)
    assert plan.nbytes + 100 * MIB + HEAD_ROOM < 2048 * MIB
    useful = planned(monkeypatch, 2048 * MIB, context=64, max_running=4)
    assert useful.blocks == 4 * 4 and useful.why == "all that can be used"


def test_sizes_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(monkeypatch, 2048 * MIB, kv_blocks=7).blocks == 7
    assert planned(monkeypatch, 2048 * MIB, kv_memory="1MiB").blocks == 128
    plan = planned(monkeypatch, 2048 * MIB, kv_blocks=1)
    assert plan.longest == 16 and plan.limit == 16 and plan.fitting(16) == 1


@pytest.mark.parametrize(
    ("settings", "field"),
    [({"kv_memory": "100GiB"}, "kv_memory"), ({"kv_blocks": 10**9}, "kv_blocks"), ({"kv_memory": 8191}, "kv_memory")],
)
def test_r62_sizes_that_cannot_be(settings: dict[str, object], field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R62: beyond memory, or too small for a token: the message has bytes a token and the tokens that would fit."""
    with pytest.raises(ConfigError, match="512 B a token, .* tokens would fit") as refused:
        planned(monkeypatch, 2048 * MIB, **settings)
    assert refused.value.field == field


def test_no_room_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="cannot hold one token"):
        planned(monkeypatch, 50 * MIB)


@pytest.mark.parametrize("value", [0, -1, "0", "-5MB", "much", "5 parsecs", "", True, 1.5, None, [1], "1e9"])
def test_sizes_that_are_none(value: object) -> None:
    with pytest.raises(ConfigError, match="kv_memory") as refused:
        parse_size(value, "kv_memory")
    assert refused.value.field == "kv_memory"


@pytest.mark.parametrize(
    ("value", "size"),
    [(7, 7), ("7", 7), ("2k", 2000), ("2KiB", 2048), ("1.5 GiB", 3 << 29), (" 3MB ", 3_000_000), ("1T", 10**12)],
)
def test_sizes(value: object, size: int) -> None:
    assert parse_size(value, "kv_memory") == size


def test_sizes_for_people() -> None:
    assert [format_size(s) for s in (5, 2048, 3 * MIB, 5 << 30, 5 << 40)] == [
        "5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB", "5120.0 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize("windows", [(None,), (8,), (None, 8), (None, 3, 3), (1, None)])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_longest_request(windows: tuple[int | None, ...], size: int) -> None:
    """One token more than the longest would not fit, and what is said to fit does."""
    for pool in range(1, 30):
        kv = KV(pool, size, windows)
        longest = kv.longest()
        if None in windows:
            assert kv.blocks_for(longest) <= pool and (kv.blocks_for(longest + 1) > pool)
        elif longest == 2**31 - 1:
            assert kv.blocks_for(10**6) <= pool
        else:
            assert kv.blocks_for(longest) <= pool < kv.blocks_for(longest + 1)


def test_a_windowed_sequence_never_holds_more() -> None:
    """blocks_for is what a span of window and chunk touches at most, wherever it starts in a block."""
    for window in range(1, 12):
        for size in range(1, 6):
            for chunk in range(1, 6):
                kv = KV(1, size, (window,))
                spans = [(max(0, p - window + 1) // size, (p + chunk - 1) // size) for p in range(61 - chunk)]
                worst = max(last - first + 1 for first, last in spans)
                assert worst == kv.blocks_for(60, chunk)


def test_layers_in_groups() -> None:
    """Gemma 3 270M: 3 full and 15 windowed layers are six groups of three; counts that don't divide are padded."""
    pattern = tuple(None if i % 6 == 5 else 512 for i in range(18))
    groups = group_layers(pattern)
    assert len(groups) == 6 and {len(g.layers) for g in groups} == {3}
    assert sorted(i for g in groups for i in g.layers) == list(range(18))
    assert [g.window for g in groups].count(None) == 1
    odd = group_layers((None,) * 4 + (8,) * 29)
    assert len(odd) == 1 + 8 and KVLayout(16, 1, 8, "float32", odd).layers_per_block == 4
    assert len(group_layers((None,) * 30)) == 1


@pytest.mark.parametrize("head_dim, kv_heads", [(64, 1), (64, 3), (80, 4), (128, 8), (256, 1)])
def test_int8_holds_nearly_twice_the_tokens_of_float16(head_dim: int, kv_heads: int) -> None:
    groups = (LayerGroup(None, (0, 1)),)
    half, small = (KVLayout(16, kv_heads, head_dim, dtype, groups) for dtype in ("float16", "int8"))
    assert half.bytes_per_token / small.bytes_per_token >= 1.85
    assert EngineConfig(kv_dtype="int8").kv_dtype == "int8"


def test_another_type_of_keys_and_values_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"kv_dtype must be one of float32, float16, bfloat16, int8, fp8, not 'int4'"):
        EngineConfig(kv_dtype="int4")
