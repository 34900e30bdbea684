"""What a server says of the GPU backend that it runs on: in the log, in /health, in fingerprints, in bench's table."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from conftest import TinyModels  # noqa: E402
from octavo import AsyncLLM  # noqa: E402
from octavo.cli import main  # noqa: E402
from octavo.cli.replay import as_recorded  # noqa: E402
from octavo.server.fingerprint import Fingerprint  # noqa: E402
from serving import served, until  # noqa: E402

SOME: dict[str, Any] = {"backend": "triton", "kv_blocks": 32}


@pytest.mark.parametrize("gemm", ["fixed", "cublas"])
def test_a_given_up_promise_is_said(tiny_models: TinyModels, gemm: str, caplog: pytest.LogCaptureFixture) -> None:
    """With cublas the log warns, /health says it, and every answer's fingerprint has it; else none of them does."""
    with caplog.at_level(logging.WARNING, "octavo"):
        llm = AsyncLLM(str(tiny_models.folder("llama", "F16")), gemm=gemm, **SOME)
    given_up = gemm == "cublas"
    assert ("other bytes in another batch" in caplog.text) == given_up
    executor: Any = llm.parts.engine.executor
    with llm, served(llm) as server:
        assert server.http.get("/health").json().get("gpu") == executor.backend.gpu
        executor.backend.gpu = "NVIDIA H100, compute capability 9.0"
        health = server.http.get("/health").json()
        assert health["gpu"] == executor.backend.gpu
        assert health["status"] == "ok" and ("other bytes" in health.get("gemm", "")) == given_up
        text = server.http.get("/version").json()["system_fingerprint"]
    fingerprint = Fingerprint.parse(text)
    assert fingerprint is not None and fingerprint.compute == gemm and fingerprint.kv_dtype == "float16"
    assert fingerprint.backend.startswith("triton-")
    assert as_recorded(text) == {"kv_dtype": "float16", "gemm": gemm}


def test_bench_says_it_beside_its_figures(tiny_models: TinyModels, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny_models.folder("llama", "F16"))
    options = ["--prompt", "3", "--output", "2", "--requests", "1", "--backend", "triton", "--kv-blocks", "32"]
    assert main(["bench", model, *options, "--gemm", "cublas"]) == 0
    assert "cublas: bytes depend on the batch" in capsys.readouterr().out


def test_what_a_cpu_answered_is_replayed_on_the_cpu() -> None:
    told = str(Fingerprint("0.1.0", "cpu-scalar", "0123abcd", "89abcdef", "int8", "exact"))
    assert as_recorded(told) == {"kv_dtype": "int8", "compute": "exact", "device": "cpu", "isa": "scalar"}


def test_a_rank_that_dies_fails_who_waits_and_turns_health_red(tiny_models: TinyModels) -> None:
    llm = AsyncLLM(str(tiny_models.folder("llama")), backend="reference", device="cpu", tensor_parallel=2, kv_blocks=64)
    with llm, served(llm) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 900, "ignore_eos": True}
        assert server.post("/v1/completions", {**body, "max_tokens": 3}).status_code == 200
        executor: Any = llm.parts.engine.executor
        process, _ = executor.team._workers[0]
        threading.Timer(0.5, process.kill).start()
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 500 and "rank 1 of 2 died (killed by SIGKILL)" in answer.text
        until(lambda: server.http.get("/health").status_code == 503, 3)
        assert "rank 1 of 2" in server.http.get("/health").json()["status"]
