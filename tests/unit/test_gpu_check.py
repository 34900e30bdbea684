"""bench/gpu_check.py, tried without a GPU: every part runs, tiny, in Triton's interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The command's module, whose reports go to a folder of the test's."""
    monkeypatch.syspath_prepend(str(BENCH))
    import common
    import gpu_check

    monkeypatch.setattr(common, "OUT", tmp_path / "out")
    return gpu_check


def test_a_dry_run_of_every_part(check: Any, tmp_path: Path) -> None:
    """Tests, kernels, engine and transformers, in processes of their own as on a GPU; nothing fails or is left out."""
    written = tmp_path / "results.md"
    assert check.main(["--dry", "--plots", str(tmp_path / "plots"), "--write", str(written)]) == 0
    (saved,) = (tmp_path / "out").glob("gpu-check-*.json")
    report = json.loads(saved.read_text())
    assert report["tests"]["passed"] and "1 passed" in report["tests"]["summary"]
    assert report["kernels"]["limits"]["copy"] > 0 and len(report["kernels"]["products"]) == 3
    attention = report["kernels"]["decode"] + report["kernels"]["prefill"]
    assert len(attention) >= 2 and all(r["rate"] > 0 for r in attention)
    engine, peers = report["engine"]["models"]["dry"], report["peers"]["models"]["dry"]
    assert [r["batch"] for r in engine["decode"]] == [1, 3] and engine["load"]["requests"] == 3
    for way in ("one at a time", "best static", "continuous batching"):
        assert peers[way]["rate"] > 0, peers
    assert peers["continuous batching"]["tokens"] == engine["load"]["tokens"]
    text = written.read_text()
    assert "dry run" in text and "transformers, continuous batching" in text and "gate and up" in text
    assert len(list((tmp_path / "plots").glob("*.svg"))) == 3


def test_without_a_gpu_it_says_so(check: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from octavo.kernels.triton import device

    monkeypatch.setattr(device, "driver_seen", lambda root=None: False)
    assert check.main([]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no driver of NVIDIA's is found" in said and "--dry" in said


def test_a_part_that_fails_is_told_and_the_others_go_on(
    check: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    kept = check.isolated

    def isolated(name: str, options: Any) -> Any:
        return {"error": "exit code -9"} if name == "kernels" else kept(name, options)

    monkeypatch.setattr(check, "isolated", isolated)
    assert check.main(["--dry", "--only", "kernels", "tests"]) == 1
    out = capsys.readouterr()
    assert "kernels failed: exit code -9" in out.err and "1 passed" in out.out


def test_goals_are_judged_by_the_worst_model(check: Any) -> None:
    import gpu_report

    def model(share: float, load: float) -> dict[str, Any]:
        return {
            "memory": "much",
            "decode": [{"batch": 64, "rate": 5000.0, "waiting": 4000.0, "roofline": 5000 / share, "share": share}],
            "load": {"requests": 512, "tokens": 9, "seconds": 1.0, "rate": load},
        }

    report = {
        "date": "a day",
        "dry": False,
        "about": {"device": "0: NVIDIA H100"},
        "kernels": {
            "limits": {"copy": 100.0, "matmul": 1000.0},
            "decode": [
                {"model": "m", "dtype": "float16", "rows": rows, "context": context, "seconds": 1.0, "rate": rate}
                for rows, context, rate in [(64, 8192, 88.0), (64, 8192, 86.0), (1, 8192, 10.0), (64, 512, 10.0)]
            ],
            "prefill": [{"model": "m", "tokens": 8192, "seconds": 1.0, "rate": 550.0}],
            "products": [],
        },
        "engine": {
            "gemm": "cublas",
            "models": {"a": model(0.9, 300.0), "b": model(0.7, 100.0), "c": {"error": "full"}},
        },
        "peers": {"models": {"a": {"one at a time": {"rate": 10.0}}, "b": {"one at a time": {"error": "no"}}}},
    }
    reached = gpu_report.goals(report, check.GOALS)
    assert [(round(value, 2), least) for _, value, least in reached] == [
        (0.86, 0.85),
        (0.7, 0.8),
        (0.55, 0.6),
        (30, 24),
    ]
    text = gpu_report.markdown(report, reached, [])
    assert (
        "| missed |" in text and "| met |" in text and "bytes depend on the batch" in text and "Not run: full" in text
    )


def test_a_real_run_hides_no_gpu_and_uses_no_interpreter(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in check.environment(dry=False)
    assert check.environment(dry=True)["TRITON_INTERPRET"] == "1"
    assert set(check.environment(dry=False)) == set(os.environ) - {"TRITON_INTERPRET"}


def test_a_decode_step_takes_its_bytes_or_its_products(check: Any) -> None:
    """16 GB of weights: at 3.2 TB/s a step of one takes 4.7 ms; a step of many takes what products take."""
    from gpu_engine import least_seconds
    from gpu_shapes import SHAPES, read_bytes, token_bytes

    spec = SHAPES["llama-3.1-8b"]
    assert read_bytes(spec) == pytest.approx(15.01e9, rel=0.01) and token_bytes(spec) == 128 << 10
    limits = {"copy": 3.2e12, "matmul": 6e14}
    assert least_seconds(spec, 1, 100, limits) == pytest.approx(4.69e-3, rel=0.01)
    assert least_seconds(spec, 4096, 1, limits) == pytest.approx(4096 * 15.01e9 / 6e14, rel=0.01)
