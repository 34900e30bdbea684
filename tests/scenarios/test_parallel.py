"""Tensor parallelism on the CPU: processes that share a model answer as one does, and one that dies ends them all."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conftest import TinyModels  # noqa: E402
from octavo import LLM, SamplingParams  # noqa: E402
from octavo.core.guide import Guide  # noqa: E402
from octavo.core.plan import HOST, Draw, Move, Place, Plan, Row  # noqa: E402
from octavo.engine import ranks  # noqa: E402
from octavo.engine.outputs import RequestOutput  # noqa: E402
from octavo.errors import ConfigError, EngineError  # noqa: E402
from octavo.execute import inputs  # noqa: E402
from octavo.execute import team as team_module  # noqa: E402
from octavo.execute.parallel import bare  # noqa: E402
from octavo.execute.team import Team  # noqa: E402
from octavo.kernels.parallel import cut  # noqa: E402
from tiny import make, prompt  # noqa: E402

SOME = {"device": "cpu", "kv_blocks": 64, "kv_dtype": "float32", "max_batched_tokens": 32, "audit": True}
GREEDY, DRAWN = {"temperature": 0.0}, {"temperature": 1.0, "seed": 3}
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    (prompt(20), {**GREEDY, "max_tokens": 12}),
    (prompt(9, 50), {**DRAWN, "max_tokens": 12, "logprobs": 2, "n": 2}),
    (prompt(40, 100), {**GREEDY, "max_tokens": 4, "prompt_logprobs": 1}),
    (prompt(5, 300), {**DRAWN, "max_tokens": 6, "guide": Guide.regex("[a-z]+"), "repetition_penalty": 1.2}),
]


def answers(folder: Path, backend: str, size: int, asked: Any = ASKED, **settings: Any) -> list[RequestOutput]:
    with LLM(str(folder), backend=backend, tensor_parallel=size, **{**SOME, **settings}) as llm:
        return llm.generate([p for p, _ in asked], [SamplingParams(**given) for _, given in asked])


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    assert all(o.error is None for o in outputs)
    return [[list(branch.token_ids) for branch in o.outputs] for o in outputs]


@pytest.mark.parametrize("family", ["llama", "llama-bias", "llama-untied", "mistral", "qwen3", "gemma3-softcap"])
def test_two_ranks_answer_as_one(tiny_models: TinyModels, family: str) -> None:
    """Chunks, branches, scores, penalties, guides; every family's norms, biases and windows."""
    folder = tiny_models.folder(family)
    one, two = answers(folder, "reference", 1), answers(folder, "reference", 2)
    assert tokens(one) == tokens(two)


def test_four_ranks_and_a_vocabulary_that_they_do_not_divide(tmp_path: Path) -> None:
    """Shares of unequal width: 511 rows of the head, 95 of the MLP."""
    folder = make("llama", num_key_value_heads=4, vocab_size=511, intermediate_size=95).save(tmp_path / "odd")
    asked = [(p, {k: v for k, v in given.items() if k != "guide"}) for p, given in ASKED]
    one = tokens(answers(folder, "reference", 1, asked))
    assert one == tokens(answers(folder, "reference", 2, asked)) == tokens(answers(folder, "reference", 4, asked))


def test_every_rank_moves_its_blocks(tiny_models: TinyModels) -> None:
    """A pool too small for all, a host tier: copies on write, swaps and restores on all ranks, to the same tokens."""
    folder = tiny_models.folder("llama")
    asked = [(prompt(30, 40 * i), {**DRAWN, "max_tokens": 20, "n": 2}) for i in range(4)]
    tight = {"kv_blocks": 14, "block_size": 8, "swap_memory": "1MiB", "preempt": "swap"}
    roomy = tokens(answers(folder, "reference", 1, asked))
    with LLM(str(folder), backend="reference", tensor_parallel=2, **{**SOME, **tight}) as llm:
        assert tokens(llm.generate([p for p, _ in asked], [SamplingParams(**given) for _, given in asked])) == roomy
        counters = llm.stats().counters
        assert counters.swaps and counters.copies


@pytest.fixture
def triton_device() -> str:
    """Where two ranks of Triton's kernels can be: on two GPUs, or in the interpreter."""
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU, and two ranks need two")
    return "cuda"


def test_triton_gives_the_same_bytes_on_one_rank_and_on_two(tiny_models: TinyModels, triton_device: str) -> None:
    """Not the tokens alone: log-probabilities bit for bit."""
    folder = tiny_models.folder("qwen3")
    asked = [(p, {**given, "max_tokens": 5}) for p, given in ASKED[:2]]
    one, two = (answers(folder, "triton", size, asked, device=triton_device) for size in (1, 2))
    assert tokens(one) == tokens(two)
    assert [b.logprobs for o in one for b in o.outputs] == [b.logprobs for o in two for b in o.outputs]


def test_triton_rounds_the_same_on_one_rank_and_on_two(tmp_path: Path, triton_device: str) -> None:
    """Values beyond float16, where products with 16-bit weights read what ranks have exchanged."""
    made = make("llama", "F16")
    for name, parameter in made.model.named_parameters():
        if "gate_proj" in name or "up_proj" in name:
            parameter.data *= 500  # so that their product is beyond 65504
    folder = made.save(tmp_path / "large")
    asked = [(prompt(6), {**GREEDY, "max_tokens": 4, "logprobs": 1})]
    one, two = (answers(folder, "triton", size, asked, device=triton_device) for size in (1, 2))
    assert tokens(one) == tokens(two)
    assert [b.logprobs for o in one for b in o.outputs] == [b.logprobs for o in two for b in o.outputs]


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def workers(llm: LLM) -> list[int]:
    return [process.pid for process, _ in llm._parts.engine.executor.team._workers]  # type: ignore[union-attr]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("when", ["idle", "at work"])
def test_a_killed_rank_ends_the_engine_with_an_error_that_names_it(
    tiny_models: TinyModels, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(tiny_models.folder("llama")), backend="reference", tensor_parallel=2, **SOME) as llm:
        llm.generate([prompt(5)], SamplingParams(temperature=0.0, max_tokens=2))
        worker = workers(llm)[0]
        with caplog.at_level(logging.ERROR, "octavo"):
            if when == "idle":
                os.kill(worker, signal.SIGKILL)
                until(lambda: "rank 1 of 2 died (killed by SIGKILL)" in caplog.text, 3)
            else:
                threading.Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
            began = time.monotonic()
            with pytest.raises(EngineError, match=r"rank 1 of 2 died \(killed by SIGKILL\).* started anew"):
                llm.generate([prompt(20)], LONG)
            assert time.monotonic() - began < 5
        with pytest.raises(EngineError, match="rank 1 of 2"):
            llm.generate([prompt(5)], SamplingParams(max_tokens=2))
    assert gone(worker)


@pytest.mark.timeout(60)
def test_an_interrupt_ends_a_generation_and_no_rank(tiny_models: TinyModels) -> None:
    """Between two steps, as with one process; a signal in the middle of an exchange disturbs it not."""
    with LLM(str(tiny_models.folder("llama")), backend="reference", tensor_parallel=2, **SOME) as llm:
        for i in range(4):
            for delay in (0.3, 0.31, 0.32):
                threading.Timer(delay + 0.07 * i, os.kill, (os.getpid(), signal.SIGWINCH)).start()
            threading.Timer(0.4 + 0.07 * i, os.kill, (os.getpid(), signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate([prompt(20, 9 * i)], LONG)
        short = SamplingParams(temperature=0.0, max_tokens=2)
        assert llm.generate([prompt(5)], short)[0].error is None


@pytest.mark.timeout(60)
def test_a_rank_that_dies_before_all_have_met(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "Team", lambda size, module, order: Team(size, "octavo.no_such_module", order))
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 of 2 died \(exit code 1\)"):
        LLM(str(tiny_models.folder("llama")), backend="reference", tensor_parallel=2, **SOME)
    assert time.monotonic() - began < 10


@pytest.mark.timeout(60)
def test_a_rank_that_stands_still_is_given_up(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT", 2.0)
    with LLM(str(tiny_models.folder("llama")), backend="reference", tensor_parallel=2, **SOME) as llm:
        worker = workers(llm)[0]
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(EngineError, match="another does not answer"):
            llm.generate([prompt(20)], LONG)
    assert gone(worker)


def test_a_step_that_was_broken_off_from_outside_is_an_error(tiny_models: TinyModels) -> None:
    """As with NCCL, whose exchanges do not raise: a slow step is given up, and what it computed does not count."""
    with LLM(str(tiny_models.folder("llama")), backend="reference", tensor_parallel=2, **SOME) as llm:
        executor: Any = llm.parts.engine.executor
        aborted: list[bool] = []
        executor.team.on_loss = lambda: aborted.append(True)
        executor.patience, run = 0.2, executor.program.run
        executor.program.run = lambda *a: (time.sleep(0.5), run(*a))[1]
        with pytest.raises(EngineError, match="another rank than 0 of 2 does not answer"):
            llm.generate([prompt(5)], SamplingParams(max_tokens=2))
        assert aborted == [True]


@pytest.mark.timeout(60)
def test_workers_end_with_rank_0(tiny_models: TinyModels) -> None:
    """Killed, it can tell them nothing: its pipes close."""
    code = (
        "import sys; from octavo import LLM, SamplingParams\n"
        f"llm = LLM(sys.argv[1], backend='reference', tensor_parallel=2, **{SOME!r})\n"
        "print(llm._parts.engine.executor.team._workers[0][0].pid, flush=True)\n"
        "llm.generate([[5, 6, 7]], SamplingParams(max_tokens=900, ignore_eos=True))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, tiny_models.folder("llama")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        assert not gone(worker)
        process.kill()
    until(lambda: gone(worker), 5)


@pytest.mark.timeout(60)
def test_a_worker_that_cannot_begin(capfd: pytest.CaptureFixture[str]) -> None:
    """It dies at once, or it tells why it failed; either way nobody waits for it."""
    team = Team(2, "octavo.no_such_module", lambda rank, folder: None)
    with pytest.raises(EngineError, match=r"rank 1 of 2 died \(exit code 1\)"):
        team.hear()
    team.close()
    order = ranks.Order("no-such-model", ranks.EngineConfig(tensor_parallel=2), 1, Path("/"), 1.0)
    team = Team(2, "octavo.engine.ranks", lambda rank, folder: order)
    with pytest.raises(EngineError, match="rank 1 of 2 failed: .*no-such-model"):
        team.hear()
    team.close()
    assert not team.folder.exists()


@pytest.mark.timeout(60)
def test_a_worker_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is larger than the pipe holds does not wait for ever."""
    monkeypatch.setattr(team_module, "PATIENCE", 1)
    (tmp_path / "deaf.py").write_text("import time; time.sleep(60)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    team = Team(2, "deaf", lambda rank, folder: None)
    with pytest.raises(EngineError, match="rank 0 of 2 failed, or another does not answer"):
        team.tell(("run", bytes(8 << 20)))
    team.close()


def test_what_cannot_be_shared_is_refused(tiny_models: TinyModels) -> None:
    folder = str(tiny_models.folder("llama"))
    for settings, words in [
        ({"tensor_parallel": 3, "backend": "reference"}, "4 query heads and 2 key-value heads"),
        ({"tensor_parallel": 4, "backend": "reference"}, "4 query heads and 2 key-value heads"),
        ({"tensor_parallel": 2}, "is for GPUs, and the CPU computes here"),
        ({"tensor_parallel": 2, "backend": "reference", "kv_disk": "1GiB"}, "several"),
    ]:
        with pytest.raises(ConfigError, match=words):
            LLM(folder, **{**SOME, **settings})


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_a_plan_goes_over_whole_but_for_what_is_drawn() -> None:
    """Masks hold threads and stay at rank 0; the worker's inputs are equal to rank 0's."""

    class Mask:
        def begin(self) -> None: ...

        def bits(self) -> bytes:
            raise AssertionError

        def __reduce__(self) -> str:
            raise AssertionError("a mask may not be sent")

    draw = Draw(1, 7, 1.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 2**63, 5, ((3, -1.0),), ((4, 2),), Mask())
    ids = array("i", [4, 5, 6])
    rows = (
        Row(1, 4, ids, (ids, ids), (draw, draw)),
        Row(2, 0, ids, (ids, ids), (), array("i", [5, 6]), 3),
        Row(3, 9, ids, (ids, ids), (draw,) * 3, drafts=2),
        Row(4, 9, ids, (ids, ids), (draw,), array("i", [5, 6, 7]), 0),
    )
    plan = Plan(3, (Move(Place(HOST, 2), Place(0, 1)),), rows)
    sent = pickle.loads(pickle.dumps(bare(plan)))
    assert sent == bare(plan) and sent.moves == plan.moves
    mine, theirs = inputs.batch(plan.rows, 2), inputs.batch(sent.rows, 2)
    for name in ("tokens", "positions", "starts", "logits_at"):
        assert np.array_equal(getattr(mine, name), getattr(theirs, name))
    assert sum(map(inputs.wanted, plan.rows)) == len(mine.logits_at)
    assert [inputs.wanted(row) for row in plan.rows] == [1, 2, 3, 3]


def test_shares_cover_all_rows_once() -> None:
    for rows in (1, 2, 7, 512):
        for size in (1, 2, 3, 4):
            bounds = cut(rows, size)
            assert bounds[0] == 0 and bounds[-1] == rows and list(bounds) == sorted(bounds)
