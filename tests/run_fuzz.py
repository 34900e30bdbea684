"""Schemathesis against the server's own OpenAPI: no 5xx, no hang.

python tests/run_fuzz.py [--minutes N]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import tiny
from octavo.loadgen.process import ServerProcess

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
SERVER = ("--kv-blocks", "256", "--threads", "1", "--access-log", "off", "--request-timeout", "20")
SERVER += ("--max-context", "128")  # an answer without a limit would take most of the time
ENDLESS = "/v1/kv/stream"  # by its nature: it ends when the client leaves
PATIENCE = 60  # seconds without an answer are a hang: the server's own limit is far below


def fuzz(url: str, seconds: float, examples: int, seed: int, phases: str, folder: str) -> int:
    """Schemathesis' exit code: 0 if no request was answered with a fault of the server's, or not at all."""
    command = [sys.executable, "-m", "schemathesis.cli", "run"]
    command += [f"{url}/openapi.json", "--checks", "not_a_server_error", "--request-timeout", str(PATIENCE)]
    command += ["--max-time", str(round(seconds)), "--max-examples", str(examples), "--seed", str(seed)]
    command += ["--phases", phases, "--suppress-health-check", "all", "--no-color"]
    command += ["--warnings", "off", "--continue-on-failure", "--generation-database", "none"]
    command += ["--exclude-path", ENDLESS]
    # It leaves a folder of its own where it runs.
    return subprocess.run(command, cwd=folder, timeout=seconds + 10 * PATIENCE, check=False).returncode


def main() -> int:
    p = argparse.ArgumentParser(prog="tests/run_fuzz.py", description=__doc__)
    p.add_argument("--minutes", type=float, default=20.0, help="(default: %(default)s)")
    p.add_argument("--examples", type=int, default=100_000, help="most for an operation (default: %(default)s)")
    p.add_argument("--phases", default="examples,coverage,fuzzing", help="of Schemathesis (default: %(default)s)")
    p.add_argument("--seed", type=int, default=1, help="(default: %(default)s)")
    given = p.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = tiny.make("llama").save(Path(root) / "tiny")
        (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
        with ServerProcess(folder, *SERVER) as server:
            code = fuzz(server.url, 60 * given.minutes, given.examples, given.seed, given.phases, root)
            alive = server.get("/health")
            print(f"after it: {alive}")
            if "Traceback" in server.log():
                print(server.log()[-4000:])
                code = code or 1
    return code


if __name__ == "__main__":
    sys.exit(main())
