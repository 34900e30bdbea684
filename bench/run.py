"""``make bench``: Octavo's figures on three loads, and llama.cpp's beside them if its server is given.

Both run the same file, the same token ids and the same number of threads, in turn, round by round, so that a change of
the machine's speed meets both; medians are printed, and their ratio.  Everything measured goes to bench/out as JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import loads
import numpy as np
import peer
import plain

import octavo
from octavo import LLM
from octavo.cli.bench import Ask, Measured, measure
from octavo.cli.console import rows
from octavo.kernels.threads import choose_threads
from octavo.loading import find

OUT = Path(__file__).parent / "out"
FIGURES = {
    "single": ("decode, one request", "tokens/s", lambda m: m.decode_rate),
    "prefill": ("prefill, one request", "tokens/s", lambda m: m.prompt_rate),
    "chat64": ("generated, all requests at once", "tokens/s", lambda m: m.output_rate),
}
SETUPS = [peer.Setup(slots, split) for slots in (16, 32, 64) for split in (False, True)]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/run.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a .gguf file (default: %(default)s)")
    p.add_argument("--loads", type=Path, metavar="DIR", help="take the loads from DIR/workloads.py")
    p.add_argument("--only", action="append", choices=loads.NAMES, help="a load to run (may be given again)")
    p.add_argument("--rounds", type=int, default=3, help="measured rounds after one warm-up (default: %(default)s)")
    p.add_argument("--threads", type=int, help="threads of both (default: the CPUs this process may use)")
    p.add_argument("--peer-server", type=Path, metavar="PATH", help="llama.cpp's llama-server binary")
    p.add_argument("--peer-slots", type=int, help="slots of the peer on chat64 (default: the best of several setups)")
    p.add_argument("--peer-split-kv", action="store_true", help="with --peer-slots: a KV cache for each slot")
    p.add_argument(
        "--transformers", type=int, metavar="N", help="also N of chat64's requests by transformers in float32"
    )
    p.add_argument("--no-start", action="store_true", help="leave out the time from process start to first token")
    return p.parse_args()


def main() -> int:
    given = arguments()
    if given.rounds < 1:
        raise SystemExit("error: --rounds must be at least 1")
    if given.transformers is not None and not 1 <= given.transformers <= 64:
        raise SystemExit("error: --transformers must be in [1, 64]")
    threads = given.threads or choose_threads().count
    report: dict[str, Any] = {
        "octavo": octavo.__version__,
        "model": given.model,
        "threads": threads,
        "machine": platform.platform(),
        "loads": {},
    }
    if not given.no_start:
        starts = [start_to_first_token(given.model, threads) for _ in range(given.rounds)]
        report["start_s"] = starts
        print(f"process start to first token: {statistics.median(starts):.2f} s\n", flush=True)
    if given.peer_server:
        report["peer"] = peer.version(given.peer_server)
    with LLM(given.model, threads=threads) as llm:
        report["backend"] = llm.parts.engine.executor.backend.name
        print(f"octavo {octavo.__version__}, {report['backend']}, {threads} threads")
        make = loads.outside(given.loads) if given.loads else loads.own(llm.tokenizer)
        for name in given.only or loads.NAMES:
            report["loads"][name] = one_load(llm, name, make, given, threads)
        if given.transformers:
            report["transformers"] = one_at_a_time(llm, make, given, threads)
        print(f"\nwaste over all loads: {100 * llm.stats().waste:.1f} % of the held slots")
    OUT.mkdir(exist_ok=True)
    path = OUT / time.strftime("%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"all figures: {path}")
    return 0


def one_load(llm: LLM, name: str, make: loads.Maker, given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Measures a load on both, in turn; prints its row."""
    what, unit, figure = FIGURES[name]
    ours: list[Measured] = []
    theirs: list[Measured] = []
    reads: list[float] = []
    memory = np.ones(512 << 20, np.uint8) if name == "single" else None
    with peer_server(llm, name, make, given, threads) as (server, setup):
        warm(llm, server, make(name, 0))
        for round in range(1, given.rounds + 1):
            load = make(name, round)
            llm.reset_prefix_cache()
            if memory is not None:
                reads.append(llm.parts.engine.executor.backend.kernels.probe_read(memory, threads))
            ours.append(measure(llm, load))
            if server is not None:
                theirs.append(server.measure(load))
    mine = statistics.median(figure(m) for m in ours)
    size = f"{ours[0].prompt_tokens:,} + {ours[0].output_tokens:,} tokens"
    line = [(f"{what} ({size})", f"{mine:,.1f} {unit}")]
    result = {"octavo": [vars(m) | {"figure": figure(m)} for m in ours]}
    if theirs:
        other = statistics.median(figure(m) for m in theirs)
        line += [(f"  llama.cpp ({setup})", f"{other:,.1f} {unit}"), ("  octavo / llama.cpp", f"{mine / other:.2f}")]
        result["peer"] = [vars(m) | {"figure": figure(m)} for m in theirs]
        result["setup"] = str(setup)
    if reads:
        weights = llm.parts.checkpoint.nbytes
        share = statistics.median(m.decode_rate * weights / read for m, read in zip(ours, reads, strict=True))
        line.append(("  of what reading the weights once a token allows", f"{share:.0%}"))
        result |= {"read": reads, "weights": weights}
        line.append(
            ("first token, one request", f"{statistics.median(m.first_token or 0.0 for m in ours) * 1e3:,.0f} ms")
        )
        if theirs:
            other = statistics.median(m.first_token or 0.0 for m in theirs)
            line.append(("  llama.cpp", f"{other * 1e3:,.0f} ms"))
    print()
    rows([(label.ljust(60), value) for label, value in line])
    sys.stdout.flush()
    return result


def one_at_a_time(llm: LLM, make: loads.Maker, given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Octavo on all of chat64 at once, transformers on some of its requests one after the other; in turn."""
    other = plain.Transformers(find(given.model), threads)
    other.measure([Ask(make("chat64", 0)[0].prompt, 4)])
    ours, theirs = [], []
    for round in range(1, given.rounds + 1):
        load = make("chat64", round)
        llm.reset_prefix_cache()
        ours.append(measure(llm, load).output_rate)
        time.sleep(0.3)  # the threads of one must not spin into the other's time
        theirs.append(other.measure(load[:: len(load) // given.transformers][: given.transformers]).output_rate)
        time.sleep(0.3)
    a, b = statistics.median(ours), statistics.median(theirs)
    shown = [
        (f"generated, chat64, {given.transformers} requests one at a time", ""),
        ("  transformers, float32", f"{b:,.1f} tokens/s"),
        ("  octavo, all requests at once", f"{a:,.1f} tokens/s"),
        ("  octavo / transformers", f"{a / b:.1f}"),
    ]
    print()
    rows([(label.ljust(60), value) for label, value in shown])
    return {"octavo": ours, "transformers": theirs}


def warm(llm: LLM, server: peer.Server | None, load: Sequence[Ask]) -> None:
    """The load's shape once, shortened where it is long: memory is touched, step sizes settle."""
    short = [Ask(ask.prompt, min(ask.max_tokens, 16)) for ask in load]
    measure(llm, short)
    if server is not None:
        server.measure(short)


@contextlib.contextmanager
def peer_server(
    llm: LLM, name: str, make: loads.Maker, given: argparse.Namespace, threads: int
) -> Iterator[tuple[peer.Server | None, peer.Setup | None]]:
    """The peer in the setup that suits the load best, or nothing if it is not asked for."""
    if given.peer_server is None:
        yield None, None
        return
    binary, model = given.peer_server, find(given.model)

    def server(setup: peer.Setup) -> peer.Server:
        longest = max(len(a.prompt) + a.max_tokens for a in make(name, 0)) + 16
        slots = setup.slots if name == "chat64" else 1
        return peer.Server(binary, model, threads, longest * slots if setup.split else max(4096, 1024 * slots), setup)

    if name != "chat64":
        setup = peer.Setup(1, False)
    elif given.peer_slots:
        setup = peer.Setup(given.peer_slots, given.peer_split_kv)
    else:
        trials = {}
        for setup in SETUPS:
            with server(setup) as tried:
                trials[setup] = tried.measure(make(name, given.rounds + 1)).output_rate
            print(f"  llama.cpp with {setup}: {trials[setup]:,.1f} tokens/s", flush=True)
        setup = max(trials, key=lambda s: trials[s])
    with server(setup) as running:
        yield running, setup


def start_to_first_token(model: str, threads: int) -> float:
    """Seconds from starting a fresh ``octavo generate`` to the first byte of its answer."""
    command = [sys.executable, "-m", "octavo", "generate", model, "Name five fruits.", "-t", "0", "-m", "4"]
    began = time.perf_counter()
    with subprocess.Popen([*command, "--threads", str(threads)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        process.stdout.read()
    if not first or process.returncode:
        raise SystemExit(f"error: `octavo generate` failed with {process.returncode}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
