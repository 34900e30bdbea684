"""The disk tier: what survives a restart, what is a miss, what a broken or full disk costs.  Case R69."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, alone, answer, ids, outputs
from octavo.core.plan import DISK, HOST, Move, Place, Plan
from octavo.core.sequence import State
from octavo.engine.persist import fingerprint, identity
from octavo.errors import ConfigError
from octavo.execute import disk as disk_module
from octavo.execute.disk import DiskStore, decode, encode, file_bytes
from octavo.schedule.scheduler import Decision

PROMPT = 1000


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def settings(folder: Path, **given: Any) -> dict[str, Any]:
    return {"kv_disk": "64MiB", "kv_disk_path": str(folder), "kv_blocks": 80, "max_batched_tokens": 512, **given}


def ask(parts: real.Parts, prompt: list[int], most: int = 4, **given: Any) -> Any:
    request = real.add(parts, prompt, most, **given)
    real.finish(parts)
    return request


def ask_once(model: Path, folder: Path, prompt: list[int], most: int = 4, **given: Any) -> Any:
    """In an engine of its own, that is closed in good order."""
    salt = {"cache_salt": given.pop("cache_salt")} if "cache_salt" in given else {}
    with real.engine(model, **settings(folder, **given)) as parts:
        request = ask(parts, prompt, most, **salt)
        parts.engine.close()
    return request


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


# ---- R69: restarts --------------------------------------------------------------------------------------------------


def test_r69_a_long_prompt_survives_a_restart(tiny_models: TinyModels, tmp_path: Path) -> None:
    """1,000 tokens: all of their full blocks are hits after a restart, and the answer is the same."""
    model, prompt = tiny_models.folder("llama"), tiny.prompt(PROMPT)
    cold = ask_once(model, tmp_path, prompt)
    assert cold.cached == 0 and len(files(tmp_path)) == PROMPT // 16
    warm = ask_once(model, tmp_path, prompt)
    assert warm.cached == 992 and answer(warm) == answer(cold)
    longer = ask_once(model, tmp_path, prompt + tiny.prompt(15, 7))
    assert longer.cached == 992


@pytest.mark.parametrize(
    "change",
    [{"kv_dtype": "float16"}, {"kv_dtype": "int8"}, {"block_size": 8}, {"compute": "exact"}, {"isa": "scalar"}],
    ids=lambda c: " ".join(map(str, *c.items())),
)
def test_r69_other_settings_are_a_miss(change: dict[str, Any], tiny_models: TinyModels, tmp_path: Path) -> None:
    model, prompt = tiny_models.gguf("llama", "Q8_0"), tiny.prompt(100)
    ask_once(model, tmp_path, prompt)
    blocks = {"kv_blocks": 160}
    assert ask_once(model, tmp_path, prompt, **{**blocks, **change}).cached == 0
    assert ask_once(model, tmp_path, prompt, **blocks).cached == 96


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_r69_another_model_is_a_miss(name: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Changed weights, tokenizer or rotary settings in the same place are another model."""
    model, prompt = tmp_path / "model", tiny.prompt(100)
    shutil.copytree(tiny_models.folder("llama"), model)
    disk = tmp_path / "disk"
    ask_once(model, disk, prompt)
    path = model / name
    if name == "model.safetensors":
        data = bytearray(path.read_bytes())
        data[-2] ^= 1  # one bit of one weight
        path.write_bytes(data)
    elif name == "config.json":
        text = path.read_text()
        assert "10000.0" in text
        path.write_text(text.replace("10000.0", "20000.0"))
    else:
        text = path.read_text()
        assert '"<|end|>"' in text
        path.write_text(text.replace('"<|end|>"', '"<|over|>"'))
        for other in ("tokenizer_config.json", "special_tokens_map.json"):
            if (model / other).exists():
                (model / other).write_text((model / other).read_text().replace("<|end|>", "<|over|>"))
    assert ask_once(model, disk, prompt).cached == 0
    assert ask_once(model, disk, prompt).cached == 96


def test_the_fingerprint_is_kept(tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are hashed once for a path, size and time, and again when a file has changed."""
    model = tmp_path / "model"
    shutil.copytree(tiny_models.folder("llama"), model)
    with real.engine(model) as parts:
        checkpoint = parts.checkpoint
        first = fingerprint(checkpoint)
        calls: list[int] = []
        honest = type(checkpoint).fingerprint
        monkeypatch.setattr(type(checkpoint), "fingerprint", lambda self: calls.append(1) or honest(self))
        assert fingerprint(checkpoint) == first and not calls
        os.utime(checkpoint.files[0], (1, 1))
        assert fingerprint(checkpoint) == first and calls == [1]
        config, layout = parts.config, parts.memory.layout
        assert identity(checkpoint, layout, config, parts.engine.executor.backend) != first  # type: ignore[attr-defined]


@pytest.mark.parametrize("harm", ["cut", "bit", "empty", "other", "gone", "grown"])
def test_r69_a_harmed_file_is_a_miss(harm: str, tiny_models: TinyModels, tmp_path: Path) -> None:
    """Block 30 of 62 is harmed: what comes before it is a hit, the answer is right, and the file is written anew."""
    model, prompt = tiny_models.folder("llama"), tiny.prompt(PROMPT)
    want = ask_once(model, tmp_path, prompt)
    by_label = {}  # what follows the keys: the block's tokens
    for path in files(tmp_path):
        data = path.read_bytes()
        by_label[data[16 : 16 + int.from_bytes(data[8:12], "little")][36:]] = path
    wanted = np.array(prompt[480:496], np.int32).tobytes()
    path = next(p for label, p in by_label.items() if label.endswith(wanted))
    data = path.read_bytes()
    if harm == "cut":
        path.write_bytes(data[:-700])
    elif harm == "bit":
        path.write_bytes(data[:900] + bytes([data[900] ^ 16]) + data[901:])
    elif harm == "empty":
        path.write_bytes(b"")
    elif harm == "grown":
        path.write_bytes(data + b"x")
    elif harm == "other":
        shutil.copy(next(p for p in files(tmp_path) if p != path), path)
    else:
        path.unlink()
    again = ask_once(model, tmp_path, prompt)
    assert answer(again) == answer(want) and again.cached == 480
    assert ask_once(model, tmp_path, prompt).cached == 992


def test_salts_separate_tenants(tiny_models: TinyModels, tmp_path: Path) -> None:
    model, prompt = tiny_models.folder("llama"), tiny.prompt(100)
    assert ask_once(model, tmp_path, prompt, cache_salt="a").cached == 0
    assert ask_once(model, tmp_path, prompt).cached == 0
    assert ask_once(model, tmp_path, prompt, cache_salt="b").cached == 0
    assert ask_once(model, tmp_path, prompt, cache_salt="").cached == 0
    assert ask_once(model, tmp_path, prompt, cache_salt="a").cached == 96
    assert ask_once(model, tmp_path, prompt).cached == 96


@pytest.mark.parametrize("limit", [3, 10, 40])
def test_r69_the_size_limit_is_kept(limit: int, tiny_models: TinyModels, tmp_path: Path) -> None:
    """At no restart are there more files than the limit has room for; the newest stay."""
    model = tiny_models.folder("llama")
    with real.engine(model) as parts:
        size = file_bytes(parts.memory.layout.block_bytes, 36 + 64)
    for seed in range(5):
        ask_once(model, tmp_path, tiny.prompt(300, 100 * seed), kv_disk=limit * size)
        found = files(tmp_path)
        assert 0 < len(found) <= limit and sum(p.stat().st_size for p in found) <= limit * size
    ask_once(model, tmp_path, tiny.prompt(40, 3), kv_disk=2 * size)
    assert len(files(tmp_path)) <= 2, "a smaller limit holds from the next start on"


def test_other_models_files_make_room(tiny_models: TinyModels, tmp_path: Path) -> None:
    """What other models and settings have left is part of the limit: the oldest of it goes."""
    with real.engine(tiny_models.folder("llama")) as parts:
        size = file_bytes(parts.memory.layout.block_bytes, 36 + 64)
    ask_once(tiny_models.folder("llama"), tmp_path, tiny.prompt(300), kv_disk=20 * size)
    ask_once(tiny_models.folder("qwen3"), tmp_path, tiny.prompt(300), kv_disk=20 * size)
    assert sum(p.stat().st_size for p in files(tmp_path)) <= 20 * size
    assert len({p.parent for p in files(tmp_path)}) == 2


def test_files_are_the_users_alone(tiny_models: TinyModels, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        ask_once(tiny_models.folder("llama"), tmp_path / "new" / "kv", tiny.prompt(100))
    finally:
        os.umask(old)
    found = files(tmp_path)
    assert found and all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in found)
    assert {stat.S_IMODE(p.parent.stat().st_mode) for p in found} == {0o700}


def test_the_second_process_runs_without(
    tiny_models: TinyModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One owner a folder: a second engine says so and serves without a disk tier; when the first ends, it is free."""
    model, prompt = tiny_models.folder("llama"), tiny.prompt(100)
    with real.engine(model, **settings(tmp_path)) as first:
        want = ask(first, prompt)
        with caplog.at_level(logging.WARNING), real.engine(model, **settings(tmp_path)) as second:
            assert "in use by another process" in caplog.text
            assert second.engine.kv.disk is None
            assert answer(ask(second, prompt)) == answer(want)
        first.engine.close()
    assert ask_once(model, tmp_path, prompt).cached == 96


WRITER = """
import sys
from pathlib import Path
import numpy as np
from octavo.core.plan import DISK, HOST, Move, Place
from octavo.execute.disk import DiskStore
store = DiskStore(Path(sys.argv[1]), 65536)
print("ready", flush=True)
i = 0
while True:
    block = np.full(65536, i % 251, np.uint8)
    store.write(Move(Place(HOST, 0), Place(DISK, i), f"{i:08d}-0", b"label%d" % i), block, wait=True)
    i += 1
"""


def test_r69_kill_while_writing(tmp_path: Path) -> None:
    """kill -9 at five moments: every file that is there is whole, leftovers go, the folder is free at once."""
    for moment in range(5):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(0.03 + 0.037 * moment)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        found = files(tmp_path)
        for path in found:
            i = int(path.name[:8])
            assert decode(path.read_bytes(), b"label%d" % i, 65536) == bytes([i % 251]) * 65536
        store = DiskStore(tmp_path, 65536)
        assert not list(tmp_path.glob("*.tmp"))
        assert sorted(store.files()) == [p.name[:-3] for p in found] and found
        store.close()


# ---- a disk that fails ----------------------------------------------------------------------------------------------


def serve(model: Path, folder: Path, **given: Any) -> Any:
    """Three long prompts in turn in a pool that holds one: each round, most of them have to come back from disk."""
    prompts = [tiny.prompt(120, 200 * i) for i in range(3)]
    with real.engine(model, **settings(folder, kv_blocks=10, swap_memory=0, **given)) as parts:
        # The least host tier would hold all of it
        host = parts.engine.kv.host
        assert host is not None
        got = []
        for _ in range(3):
            for prompt in prompts:
                got.append(answer(ask(parts, prompt)))
                for slot in range(host.pool.size):
                    host.pool.forget(slot)
        disk = parts.engine.kv.disk
        parts.engine.close()
    return got, disk


@pytest.fixture(scope="module")
def served(tiny_models: TinyModels) -> list[Any]:
    solo = real.Solo(tiny_models.folder("llama"))
    return [solo.answer(tiny.prompt(120, 200 * i), 4) for i in range(3)] * 3


def test_promotion_in_a_running_engine(tiny_models: TinyModels, tmp_path: Path, served: list[Any]) -> None:
    got, disk = serve(tiny_models.folder("llama"), tmp_path)
    assert got == served and disk.read > 10 and disk.failed == 0


def test_a_full_disk(
    tiny_models: TinyModels, tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """ENOSPC on every write: logged misses, right answers, no file left lying about."""

    honest = os.replace

    def full(source: Any, target: Any) -> None:
        if str(target).endswith(".kv"):
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(source, target)

    monkeypatch.setattr(disk_module.os, "replace", full)
    with caplog.at_level(logging.WARNING):
        got, disk = serve(tiny_models.folder("llama"), tmp_path)
    assert got == served and disk.read == 0 and disk.failed > 5
    assert "No space left" in caplog.text
    monkeypatch.undo()
    assert not files(tmp_path) and not list(tmp_path.rglob("*.tmp"))


def test_reads_that_fail(
    tiny_models: TinyModels, tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second read gives half a block, a flipped bit, or an error."""
    honest, count = Path.read_bytes, [0]

    def flaky(self: Path) -> bytes:
        data = honest(self)
        if self.suffix == ".kv":
            count[0] += 1
            if count[0] % 4 == 1:
                return data[: len(data) // 2]
            if count[0] % 4 == 2:
                return data[:500] + bytes([data[500] ^ 1]) + data[501:]
            if count[0] % 8 == 3:
                raise OSError(errno.EIO, "Input/output error")
        return data

    monkeypatch.setattr(Path, "read_bytes", flaky)
    got, disk = serve(tiny_models.folder("llama"), tmp_path)
    assert got == served and disk.failed > 5


def test_a_slow_disk(
    tiny_models: TinyModels, tmp_path: Path, served: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads and writes take their time; nothing waits for a write, and who waits for a read gets its blocks."""
    honest = DiskStore._read_file
    slow_write = DiskStore._write_file

    def slowly(self: DiskStore, *given: Any) -> bool:
        time.sleep(0.01)
        return honest(self, *given)

    def slowly_written(self: DiskStore, *given: Any) -> bool:
        time.sleep(0.01)
        return slow_write(self, *given)

    monkeypatch.setattr(DiskStore, "_read_file", slowly)
    monkeypatch.setattr(DiskStore, "_write_file", slowly_written)
    got, disk = serve(tiny_models.folder("llama"), tmp_path)
    assert got == served and disk.read > 0


def test_writes_beyond_the_queue_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk slower than the engine costs misses, never a stall."""
    honest = DiskStore._write_file

    def slowly(self: DiskStore, *given: Any) -> bool:
        time.sleep(0.02)
        return honest(self, *given)

    monkeypatch.setattr(DiskStore, "_write_file", slowly)
    store = DiskStore(tmp_path, 64)
    moves = [Move(Place(HOST, 0), Place(DISK, i), f"{i}-0", b"x") for i in range(100)]
    for move in moves:
        store.write(move, np.zeros(64, np.uint8))
    store.close()
    done = store.completed()
    kept = {move.name for move, ok in done if ok}
    assert len(done) == 100 and 64 <= len(kept) < 80
    assert {p.name[:-3] for p in files(tmp_path)} == kept


def test_a_file_says_what_it_is() -> None:
    data = encode(b"label", b"payload")
    assert decode(data, b"label", 7) == b"payload"
    assert decode(data, b"Label", 7) is None and decode(data, b"label", 8) is None
    for i in range(len(data)):
        harmed = data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :]
        assert decode(harmed, b"label", 7) is None and decode(data[:i], b"label", 7) is None


# ---- scripted -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("swap", [1, 4, 30])
@pytest.mark.parametrize("lost", [0.0, 0.5, 1.0])
def test_lost_moves_lose_no_request(swap: int, lost: float) -> None:
    import random

    chance, store = random.Random(3), {}
    for _ in range(3):
        store = dict(store)
        rig = Rig(pool=8, swap=swap, disk=20, files=store, lose=lambda move: chance.random() < lost)
        rig.executor.disk = store
        asked = [(rig.add(ids(12, i % 5), 8), i % 5) for i in range(20)]
        rig.run()
        for request, i in asked:
            assert outputs(request) == alone(ids(12, i), 8)
        disk = rig.kv.disk
        assert disk is not None and (disk.failed == 0 or lost > 0)
        assert not disk.flights and not disk.flying and disk.pool.free == disk.pool.size
        rig.engine.close()
        if lost == 1.0:
            assert not store and disk.read == 0


def on_disk(*prompts: list[int], **given: Any) -> Rig:
    """A rig whose disk holds the prompts' blocks from an engine before it."""
    store: dict[str, Any] = {}
    before = Rig(pool=30, swap=1, disk=40, files=store)
    before.executor.disk = store
    for prompt in prompts:
        before.add(prompt, 1)
        before.run()
    before.engine.close()
    before.executor._slow_ones(Plan(0, (), ()))
    return Rig(swap=1, disk=40, files=store, **given)


def test_a_victim_takes_no_room_of_what_comes_from_disk() -> None:
    """A step of nothing but a fetch has it in flight, though a victim of the same step would fill the host tier.

    Such a victim is one that was to make room for a sequence that then did not fit after all.
    """
    rig = on_disk(ids(13, 1))
    victim = rig.add(ids(6, 2), 8)
    rig.step()
    reader = rig.add(ids(13, 1), 4)
    decide, decision = rig._decide, Decision(victims=[*victim.branches], fetches=[(reader.branches[0], None, 1)])
    rig._decide = lambda now, budget: decision
    rig.step()
    rig._decide = decide
    disk = rig.kv.disk
    assert disk is not None and len(disk.flights) + disk.read == 1
    assert victim.branches[0].state is State.WAITING and not rig.kv.saved, "there was room for one block only"
    rig.run()
    assert outputs(reader) == alone(ids(13, 1), 4) and outputs(victim) == alone(ids(6, 2), 8)


def test_a_decision_counts_the_room_for_what_comes_from_disk() -> None:
    """Room for one block: the second one who wants it waits for the first one's, a third one computes its own."""
    rig = on_disk(ids(13, 1), ids(13, 2))
    first, second, third = (rig.add(ids(13, seed), 2) for seed in (1, 1, 2))
    decision = rig.engine.scheduler.decide(0.0, 100)
    assert [(s, blocks) for s, _, blocks in decision.fetches] == [(first.branches[0], 1)]
    assert decision.rows == [(third.branches[0], 0, 13)]
    rig.run()
    assert outputs(first) == outputs(second) == alone(ids(13, 1), 2) and outputs(third) == alone(ids(13, 2), 2)


def test_a_fetch_leaves_hits_of_the_same_step_in_the_host_tier() -> None:
    """One whose hit lies where the fetch of a better-ranked one goes comes in a step later; commit cannot fail."""
    rig = on_disk(ids(13, 1), policy="priority")
    rig.add(ids(5, 3), 1)
    rig.run()
    for block in range(rig.kv.pool.size):
        rig.kv.pool.forget(block)  # to the host tier's only slot
    rig.add(ids(5, 3), 2, priority=1)
    reader = rig.add(ids(13, 1), 2, priority=0)
    decision = rig.engine.scheduler.decide(0.0, 100)
    assert [s for s, _, _ in decision.fetches] == reader.branches and not decision.attached and not decision.rows
    rig.run()
    assert outputs(reader) == alone(ids(13, 1), 2)


# ---- bad settings ---------------------------------------------------------------------------------------------------


def test_bad_folders_and_sizes(tiny_models: TinyModels, tmp_path: Path) -> None:
    model = tiny_models.folder("llama")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="disk tier's folder cannot be used.*file") as wrong:
        ask_once(model, tmp_path / "file", tiny.prompt(5))
    assert wrong.value.field == "kv_disk_path"
    with pytest.raises(ConfigError, match=r"kv_disk 100 B holds no block of \d") as small:
        ask_once(model, tmp_path / "a", tiny.prompt(5), kv_disk=100)
    assert small.value.field == "kv_disk"
    for given in ("lots", 0, -5, True, 1.5, "-1GiB"):
        with pytest.raises(ConfigError, match="kv_disk"):
            ask_once(model, tmp_path / "a", tiny.prompt(5), kv_disk=given)
    for given in ("lots", -5, True, "-1GiB"):
        with pytest.raises(ConfigError, match="swap_memory"):
            ask_once(model, tmp_path / "a", tiny.prompt(5), swap_memory=given)
    with pytest.raises(ConfigError, match="preempt must be one of"):
        ask_once(model, tmp_path / "a", tiny.prompt(5), preempt="never")


def test_a_folder_that_is_not_writable(
    tiny_models: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and honest(path, mode))
    with pytest.raises(ConfigError, match="not writable"):
        ask_once(tiny_models.folder("llama"), tmp_path / "a", tiny.prompt(5))
