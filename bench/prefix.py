"""What the prefix cache and its disk tier save: 32 cold requests on one prefix, and a prompt after a restart.

- together: requests that arrive at once, cold, with a common prefix and tokens of their own, with the cache on and
  off, in turn; each round has another prefix
- restart: time to first token of a prompt in a fresh process with an empty disk tier, and in another fresh process
  after that one has ended; the files are dropped from the page cache in between, where the system lets them
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table, verdict

from octavo import LLM, SamplingParams


def tokens(llm: LLM, count: int, seed: str) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(llm.tokenizer.vocab_size) for _ in range(count)]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


# ---- together ------------------------------------------------------------------------------------------------------


def together(given: argparse.Namespace) -> dict[str, Any]:
    length = given.prefix + given.own + given.output
    blocks = given.requests * (-(-length // 16) + 2)
    settings: dict[str, Any] = {"kv_blocks": blocks, "threads": given.threads}
    seconds: dict[str, list[float]] = {"on": [], "off": []}
    with LLM(given.model, prefix_cache=True, **settings) as on, LLM(given.model, prefix_cache=False, **settings) as off:
        for llm in (on, off):  # touches memory, settles the step size
            llm.generate([tokens(llm, 256, "warm"), tokens(llm, 256, "up")], greedy(4))
        for round in range(given.rounds):
            prefix = tokens(on, given.prefix, f"{given.seed} prefix {round}")
            prompts = [prefix + tokens(on, given.own, f"{given.seed} {round} {i}") for i in range(given.requests)]
            answers = []
            for name, llm in (("on", on), ("off", off)):
                began = time.perf_counter()
                outputs = llm.generate(prompts, greedy(given.output))
                seconds[name].append(time.perf_counter() - began)
                answers.append([o.outputs[0].token_ids for o in outputs])
            if answers[0] != answers[1]:
                raise SystemExit("error: answers with and without the cache differ")
        cached = on.stats().counters.cached_tokens
    return {"seconds": seconds, "cached_tokens": cached, **{k: statistics.median(v) for k, v in seconds.items()}}


# ---- restart -------------------------------------------------------------------------------------------------------


def first_token(given: argparse.Namespace) -> None:
    """In a fresh process: the prompt once, and how long its first token took, as JSON."""
    settings: dict[str, Any] = {"kv_disk": "1GiB", "kv_disk_path": given.folder, "threads": given.threads}
    with LLM(given.model, **settings) as llm:
        llm.generate([tokens(llm, 64, f"{given.seed} warm {os.getpid()}")], greedy(2))
        before = llm.stats().counters.cached_tokens
        (output,) = llm.generate([tokens(llm, given.prompt, f"{given.seed} prompt")], greedy(4))
        cached = llm.stats().counters.cached_tokens - before
    answer = {"seconds": output.first_token_seconds, "cached": cached, "answer": list(output.outputs[0].token_ids)}
    print(json.dumps(answer))


def restart(given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {"cold": [], "restarted": []}
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(dir=given.disk) as folder:
            for name in ("cold", "restarted"):
                found[name].append(fresh_process(given, folder))
                uncache(Path(folder))
        if found["cold"][-1]["answer"] != found["restarted"][-1]["answer"]:
            raise SystemExit("error: answers before and after the restart differ")
    medians = {name: statistics.median(f["seconds"] for f in runs) for name, runs in found.items()}
    return {"runs": found, **medians, "cached": found["restarted"][-1]["cached"]}


def fresh_process(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--first-token", "--folder", folder, "--model", given.model]
    command += ["--prompt", str(given.prompt), "--seed", str(given.seed)]
    if given.threads:
        command += ["--threads", str(given.threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed with {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def uncache(folder: Path) -> None:
    """Have the files read from the disk next time, as after a reboot."""
    for path in folder.rglob("*.kv"):
        with contextlib.suppress(OSError, AttributeError), path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/prefix.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a .gguf file (default: %(default)s)")
    p.add_argument("--only", choices=("together", "restart"), help="one part of the two")
    p.add_argument("--requests", type=int, default=32, help="at once (default: %(default)s)")
    p.add_argument("--prefix", type=int, default=1024, help="tokens in common (default: %(default)s)")
    p.add_argument("--own", type=int, default=32, help="tokens of its own that each has (default: %(default)s)")
    p.add_argument("--output", type=int, default=32, help="tokens to generate (default: %(default)s)")
    p.add_argument("--prompt", type=int, default=1000, help="tokens of the restarted prompt (default: %(default)s)")
    p.add_argument("--disk", type=Path, metavar="DIR", help="where to make the disk tier's folder (default: temporary)")
    p.add_argument("--rounds", type=int, default=3, help="measured rounds (default: %(default)s)")
    p.add_argument("--threads", type=int, help="threads of the model")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    p.add_argument("--first-token", action="store_true", help=argparse.SUPPRESS)
    p.add_argument("--folder", help=argparse.SUPPRESS)
    given = p.parse_args()
    if min(given.requests, given.prefix, given.own, given.output, given.prompt, given.rounds) < 1:
        p.error("all counts must be at least 1")
    return given


def main() -> int:
    given = arguments()
    if given.first_token:
        first_token(given)
        return 0
    report: dict[str, Any] = {"settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(given).items()}}
    good = True
    if given.only != "restart":
        report["together"] = found = together(given)
        what = f"{given.requests} requests of {given.prefix:,} + {given.own} and {given.output} out"
        table([what, "seconds"], [["cache on", f"{found['on']:.2f}"], ["cache off", f"{found['off']:.2f}"]])
        good &= verdict("off over on", found["off"] / found["on"], 5)
    if given.only != "together":
        report["restart"] = found = restart(given)
        rows = [[name, f"{1000 * found[name]:,.0f}"] for name in ("cold", "restarted")]
        table([f"first token of {given.prompt:,}", "ms"], rows)
        print(f"tokens from disk after the restart: {found['cached']:,}")
        good &= verdict("restarted over cold", found["restarted"] / found["cold"], 0.2, at_least=False)
    save("prefix", report)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
