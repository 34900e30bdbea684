"""The short forms of the soak and of the fuzzer, and what the dashboard shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyModels
    from octavo.loadgen.process import ServerProcess

ROOT = Path(__file__).parents[2]


def test_a_hundred_streams_some_dropped_some_slow(tiny_models: TinyModels) -> None:
    """Survivors are whole and right, memory is flat, blocks are back; after kill -9 it serves again."""
    command = [sys.executable, str(ROOT / "bench" / "soak.py"), "--model", str(tiny_models.folder("llama"))]
    command += ["--connections", "100", "--seconds", "10", "--kv-blocks", "600"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_request_of_the_openapi_is_a_fault() -> None:
    """Schemathesis' edge cases of every operation: no 5xx, no hang."""
    command = [sys.executable, str(ROOT / "tests" / "run_fuzz.py"), "--minutes", "0.5", "--phases", "coverage"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d{3} generated, [\d,]+ passed", done.stdout), done.stdout


def test_modalities_that_are_no_list_are_refused(tiny_server: ServerProcess) -> None:
    """Found by the fuzzer."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "modalities": 6.2}).encode()
    request = urllib.request.Request(
        f"{tiny_server.url}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=30)
    assert caught.value.code == 400 and json.loads(caught.value.read())["error"]["param"] == "modalities"


def test_the_dashboard_shows_metrics_that_exist(tiny_server: ServerProcess) -> None:
    body = json.dumps({"prompt": "The sea is", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{tiny_server.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=30).read()
    board = json.loads((ROOT / "docs" / "grafana" / "octavo.json").read_text(encoding="utf-8"))
    known = {name.partition("{")[0] for name in tiny_server.metrics()}
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    shown = {name for query in queries for name in re.findall(r"octavo:\w+", query)}
    assert len(shown) > 15 and shown <= known, sorted(shown - known)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
