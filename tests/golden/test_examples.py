"""The README's program, the examples and the demo, run as a newcomer runs them, on the demo model.

Skipped where the model isn't pulled, unless OCTAVO_REAL_MODELS is set, as it is in CI.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.loading.pull import path_of

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
PROGRAM = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)

pytestmark = pytest.mark.skipif(
    path_of(MODEL) is None and not os.environ.get("OCTAVO_REAL_MODELS"), reason=f"{MODEL} is not pulled"
)


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_readme_programs() -> None:
    _, first, branches, guides = PROGRAM
    out = run("-c", first)
    assert "The sea is -> " in out and "Apples" in out and "3 requests finished" in out
    out = run("-c", branches)
    assert len(out.splitlines()) >= 7
    scores = {word: float(value) for word, value in (line.split() for line in out.splitlines()[4:6])}
    assert scores["giraffe"] > scores["mouse"]
    form, choice, word = run("-c", guides).splitlines()
    assert set(json.loads(form)) >= {"city", "big"} and choice == "Paris" and re.fullmatch("[A-Z]{4,9}!", word)


def test_the_readme_program_of_a_client() -> None:
    """The server as its command starts it, and the official client; a signal ends it well."""
    command = [sys.executable, "-m", "octavo", "serve", MODEL, "--port", "0", "--kv-memory", "256MiB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            lines = iter(server.stderr.readline, "")
            url = next(found[1] for line in lines if (found := re.search(r"serving .* at (http\S+)", line)))
            out = run("-c", PROGRAM[0].replace("http://127.0.0.1:8000", url))
        finally:
            server.terminate()
            server.stderr.read()
        assert server.wait(30) == 0
    assert "Apples" in out and len(out.splitlines()) > 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("batch", "3 requests finished"),
        ("chat", "prompt tokens came from the cache"),
        ("async_stream", "2 requests finished"),
        ("best_of_n", "copied on write"),
    ],
)
def test_example(name: str, words: str) -> None:
    assert words in run(str(ROOT / "examples" / f"{name}.py"))


def test_every_example_is_run() -> None:
    names = {p.stem for p in (ROOT / "examples").glob("*.py")}
    marks = test_example.pytestmark  # type: ignore[attr-defined]
    assert names == {row[0] for mark in marks for row in mark.args[1]}


def test_the_demo() -> None:
    out = run("-m", "octavo", "demo", "-m", "24")
    assert out.count("\n> ") == 16 and "tokens a second" in out and "KV blocks" in out
    assert all(fruit in out for fruit in ("Apples", "Oranges"))
