"""Same request, same bytes, whatever tier its blocks have been in: swap, disk, restarts, beams, sessions, policies.

Like the loads of test_same_bytes, but every engine has a host tier of some size, a disk tier that outlives it and may
lose what it is given, a policy drawn from all, and a way to preempt; on the scripted executor and on the real kernels.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import real
import tiny
from conftest import TinyModels
from engines import Rig, answer, ids, outputs, solo
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.session import SessionState
from octavo.errors import RequestError
from octavo.paging.audit import audit_idle
from octavo.sim.executors import mixed

POLICIES = ("fcfs", "priority", "shortest", "fair")
HAPPENED: dict[str, int] = {}
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 8), (8,), (None, None, 12))


def happened(**times: int) -> None:
    for what, count in times.items():
        HAPPENED[what] = HAPPENED.get(what, 0) + count


# ---- scripted -------------------------------------------------------------------------------------------------------


def drawn_rig(rng: random.Random, windows: tuple[int | None, ...], size: int, files: Any) -> Rig:
    lossy, chance = rng.random() < 0.4, random.Random(rng.random())
    return Rig(
        swap=rng.choice([0, 1, 4, 100]),
        disk=rng.choice([0, 1, 5, 30, 300]),
        files=files,
        lose=lambda move: lossy and chance.random() < 0.3,
        pool=rng.choice([6, 8, 12, 24, 40]) * len(windows),
        block_size=size,
        budget=rng.choice([1, 3, 7, 16, 64]),
        windows=windows,
        max_running=rng.choice([1, 2, 5, 64]),
        policy=rng.choice(POLICIES),
        drafts=rng.choice([0, 0, 5]),
        ahead=rng.random() < 0.5,
    )


def drawn_swap(rng: random.Random, rig: Rig) -> None:
    """Swap always, never, or as it comes."""
    mode, chance = rng.choice(["swap", "recompute", "auto"]), random.Random(rng.random())
    rig.engine.scheduler.swap_pays = lambda s: mode == "swap" or (mode == "auto" and chance.random() < 0.5)


def beams(rig: Rig, prompt: list[int], width: int, most: int) -> Request:
    request = rig.intake.beam_search(prompt, width=width, max_tokens=most)
    rig.engine.add(request)
    return request


def found(request: Request) -> list[tuple[tuple[int, ...], float]]:
    return [(h.tokens, h.score) for h in request.beams.search.finished]


def beams_alone(prompt: list[int], width: int, most: int, windows: tuple[int | None, ...]) -> Any:
    rig = Rig(pool=256 * len(windows), budget=4096, prefix_cache=False, windows=windows)
    request = beams(rig, prompt, width, most)
    rig.run()
    return found(request)


def requests(rng: random.Random, rig: Rig) -> list[tuple[Request, Any]]:
    """A load is played to its end, with what each request has to answer."""
    windows = rig.kv.windows
    heads = [ids(rng.randint(1, 20), s) for s in range(3)]
    asked: list[tuple[Request, Any]] = []
    for _ in range(rng.randint(1, 25)):
        prompt = rng.choice(heads) + ids(rng.randint(0, 10), rng.randrange(4))
        most = rng.randint(1, 24)
        try:
            if rng.random() < 0.15:
                width, most = rng.choice([2, 4]), min(most, 6)
                request = beams(rig, prompt, width, most)
                asked.append((request, (beams_alone, prompt, width, most, windows)))
            else:
                given: dict[str, Any] = {"n": rng.choice([1, 1, 1, 3]), "seed": rng.randrange(5)}
                given.update(temperature=rng.choice([0.0, 1.0]), logprobs=rng.choice([None, 2]))
                if rng.random() < 0.2:
                    given["prompt_logprobs"] = 2
                outer: dict[str, Any] = {"priority": rng.randrange(3), "user": rng.choice("abc")}
                outer["cache_salt"] = rng.choice([None, None, "a"])
                request = rig.add(prompt, most, **given, **outer)
                asked.append((request, (prompt, most, given)))
        except RequestError as error:
            assert "exceed" in str(error) or "whole KV cache" in str(error)
        rig.steps(rng.choice([0, 0, 1, 5]))
        if rng.random() < 0.1 and asked:
            rig.engine.abort(rng.choice(asked)[0])
    rig.run()
    return asked


@pytest.mark.parametrize("seed", range(60))
def test_same_bytes_across_tiers(seed: int) -> None:
    """Three engines one after the other on the same files: what one wrote to disk the next one hits."""
    rng = random.Random(seed)
    windows, size = rng.choice(WINDOWS), rng.choice([1, 3, 4, 8])
    files: dict[str, Any] = {}
    for restart in range(3):
        rig = drawn_rig(rng, windows, size, files)
        rig.executor.disk = files
        drawn_swap(rng, rig)
        for request, want in requests(rng, rig):
            if any(s.finish_reason == "abort" for s in request.branches) or not request.finished:
                continue
            if request.beams is not None:
                if request.beams.search.done:
                    assert found(request) == want[0](*want[1:]), f"seed {seed}, restart {restart}: {request.id}"
                continue
            prompt, most, given = want
            alone = answer(solo(prompt, most, windows=windows, **given))
            assert answer(request) == alone, f"seed {seed}, restart {restart}: {request.id}"
        scheduler, host, disk = rig.engine.scheduler, rig.kv.host, rig.kv.disk
        happened(preemptions=scheduler.preemptions, swaps=scheduler.swaps, recomputes=scheduler.recomputes)
        happened(demoted=host.demoted if host else 0, aborted=rig.engine.counters.aborted)
        happened(steps_ahead=rig.engine.counters.steps_ahead)
        if disk is not None:
            happened(written=disk.written, lost=disk.failed, read=disk.read, restarted_hits=disk.read if restart else 0)
        rig.engine.close()


def test_the_tiers_were_used() -> None:
    """The loads above did swap, recompute, demote, read back from disk after a restart, and lose what was there."""
    if HAPPENED.get("written", 0) < 100:
        for seed in range(30):
            test_same_bytes_across_tiers(seed)
    few = {name: times for name, times in HAPPENED.items() if times < 40}
    assert len(HAPPENED) == 10 and not few, HAPPENED


@pytest.mark.parametrize("seed", range(12))
def test_same_bytes_in_sessions(seed: int) -> None:
    """A session, forked, rewound, appended to and swapped out, goes on as its text alone would."""
    rng = random.Random(seed)
    windows = rng.choice(WINDOWS)
    rig = Rig(
        pool=rng.choice([8, 14, 30]) * len(windows),
        swap=rng.choice([0, 1, 4, 200]),
        disk=rng.choice([0, 50]),
        files={},
        windows=windows,
        budget=rng.choice([2, 16]),
        policy=rng.choice(POLICIES),
        drafts=rng.choice([0, 3, 8]),
        context=40,
        ahead=seed % 2 == 0,
    )
    drawn_swap(rng, rig)
    from array import array

    sessions = [SessionState(rig.engine, rig.intake, array("i", ids(9, seed)), b"", "")]
    for _ in range(40):
        state = rng.choice(sessions)
        what = rng.random()
        try:
            if what < 0.5 and state.tokens:
                before, most = list(state.tokens), rng.choice([1, 5])
                request = state.begin(SamplingParams(temperature=0.0, max_tokens=most))
                rig.add(ids(11, rng.randrange(9)), 4)
                while not request.finished:
                    rig.step()
                state.end(request)
                want = outputs(solo(before, most, windows=windows))[0]
                assert list(state.tokens) == before + want, f"seed {seed}"
                happened(continued=1)
            elif what < 0.7:
                state.append(ids(rng.randint(1, 5), rng.randrange(9)))
            elif what < 0.8 and len(sessions) < 5:
                sessions.append(state.fork())
            elif what < 0.95:
                state.rewind(rng.randint(0, len(state.tokens)))
        except RequestError as error:
            assert "exceed" in str(error)
    for state in sessions:
        state.close()
    rig.run()
    assert rig.engine.scheduler.waiting == rig.engine.scheduler.running == []


# ---- the real kernels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_same_bytes_on_the_kernels(seed: int, tiny_models: TinyModels, tmp_path: Path) -> None:
    rng = random.Random(seed)
    family, type = (("llama", "F32"), ("llama", "Q8_0"), ("gemma3", "F32"), ("mistral", "F16"))[seed % 4]
    path = tiny_models.folder(family, type) if type in ("F32", "F16") else tiny_models.gguf(family, type)
    groups = 6 if family == "gemma3" else 1
    dtype = rng.choice(["float32", "float16", "bfloat16", "int8"])
    alone = real.Solo(path, kv_dtype=dtype)
    settings: dict[str, Any] = {"block_size": rng.choice([1, 4, 5]), "kv_dtype": dtype, "user_weights": None}
    if rng.random() < 0.7:
        settings.update(kv_disk="64MiB", kv_disk_path=str(tmp_path))
    heads = [tiny.prompt(rng.randint(1, 40), 300 * i) for i in range(2)]
    load = [
        (rng.choice(heads) + tiny.prompt(rng.randint(0, 9), 100 * rng.randrange(5)), rng.choice([4, 16]),
         {"n": rng.choice([1, 1, 3]), "seed": rng.randrange(3), "temperature": rng.choice([0.0, 0.9])})
        for _ in range(rng.choice([4, 10]))
    ]  # fmt: skip
    for restart in range(2):
        with real.engine(
            path,
            kv_blocks=max(12, rng.choice([80, 120]) // settings["block_size"]) * groups,
            policy=rng.choice(POLICIES),
            preempt=rng.choice(["auto", "swap", "swap", "recompute"]),
            swap_memory=rng.choice([0, 20_000, "16MiB"]),
            max_batched_tokens=rng.choice([5, 16, 64]),
            **settings,
        ) as parts:
            parts.engine.ahead = seed % 2 == 0
            asked = []
            for prompt, most, given in load:
                asked.append(real.add(parts, prompt, most, priority=rng.randrange(3), **given))
                for _ in range(rng.choice([0, 1, 3])):
                    parts.engine.step()
            real.finish(parts)
            for request, (prompt, most, given) in zip(asked, load, strict=True):
                assert answer(request) == alone.answer(prompt, most, **given), f"seed {seed}, restart {restart}"
            audit_idle(parts.engine.kv)
            scheduler, disk = parts.engine.scheduler, parts.engine.kv.disk
            happened(kernel_swaps=scheduler.swaps, kernel_reads=disk.read if disk and restart else 0)
            parts.engine.close()


def test_the_kernels_tiers_were_used(tiny_models: TinyModels, tmp_path: Path) -> None:
    if "kernel_swaps" not in HAPPENED:
        for seed in range(8):
            folder = tmp_path / str(seed)
            folder.mkdir()
            test_same_bytes_on_the_kernels(seed, tiny_models, folder)
    assert HAPPENED["kernel_swaps"] > 10 and HAPPENED["kernel_reads"] > 10, HAPPENED


def test_the_mix_is_a_function() -> None:
    """What all of this rests on: another token anywhere gives another hash."""
    base = ids(30)
    hashes = {mixed([*base[:i], base[i] + 1, *base[i + 1 :]]) for i in range(30)}
    assert len(hashes | {mixed(base)}) == 31
