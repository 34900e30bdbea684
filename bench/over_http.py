"""What HTTP costs: the same token ids through the offline engine and over HTTP, streamed, in turn.

Throughput on the load of 64 requests at once; and, of single requests, the time to the first token.  Both engines are
loaded all the time, the one that is not asked sleeps.  Each round has other text, so that no prefix cache helps.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

import loads
from common import save, table, verdict

from octavo import LLM
from octavo.cli.bench import Ask, measure
from octavo.kernels.threads import choose_threads
from octavo.loadgen.asking import Asker
from octavo.loadgen.drive import Drive, Limits
from octavo.loadgen.http import Address, Client
from octavo.loadgen.process import ServerProcess
from octavo.loadgen.traffic import Planned

MOST_COST = 0.05


class Given:
    """Owns: prompts that are there already, by the number of their request."""

    def __init__(self, load: Sequence[Ask]) -> None:
        self.load = load

    def prompt(self, planned: Planned) -> list[int]:
        return self.load[planned.number].prompt

    def requests(self) -> list[Planned]:
        return [Planned(i, None, len(ask.prompt), ask.max_tokens) for i, ask in enumerate(self.load)]


async def over_http(asker: Asker, load: Sequence[Ask]) -> Drive:
    given = Given(load)
    drive = Drive(asker, given, iter(given.requests()), Limits(len(load)))
    await drive.run()
    failed = next((r.error for r in drive.records if not r.whole), None)
    if failed is not None:
        raise SystemExit(f"error: a request failed over HTTP: {failed}")
    asked, told = sum(ask.max_tokens for ask in load), sum(r.output_tokens for r in drive.records)
    if asked != told:
        raise SystemExit(f"error: {told} tokens came over HTTP instead of {asked}")
    return drive


async def compare(llm: LLM, server: ServerProcess, rounds: int, singles: int, load: str) -> bool:
    make = loads.own(llm.tokenizer)
    asker = Asker(Client(Address.of(server.url)), server.model, extra={"ignore_eos": True})
    short = [Ask(ask.prompt, min(ask.max_tokens, 8)) for ask in make(load, 0)]
    measure(llm, short)
    await over_http(asker, short)
    rates: dict[str, list[float]] = {"offline": [], "http": []}
    for round in range(1, rounds + 1):
        asks = make(load, round)
        tokens = sum(ask.max_tokens for ask in asks)
        order = ("offline", "http") if round % 2 else ("http", "offline")
        for name in order:
            seconds = measure(llm, asks).seconds if name == "offline" else (await over_http(asker, asks)).seconds
            rates[name].append(tokens / seconds)
        print(f"round {round}: offline {rates['offline'][-1]:,.1f}, HTTP {rates['http'][-1]:,.1f} tokens/s", flush=True)
    firsts: dict[str, list[float]] = {"offline": [], "http": []}
    for i in range(singles):
        ask = [Ask(make("single", 1000 + i)[0].prompt, 1)]
        began = time.perf_counter()
        measure(llm, ask)
        firsts["offline"].append(time.perf_counter() - began)
        (record,) = (await over_http(asker, ask)).records
        firsts["http"].append(record.to_first or 0.0)
    cost = 1 - statistics.median(h / o for h, o in zip(rates["http"], rates["offline"], strict=True))
    added = statistics.median(h - o for h, o in zip(firsts["http"], firsts["offline"], strict=True))
    lines = [
        [name, f"{statistics.median(rates[name]):,.1f}", f"{1000 * statistics.median(firsts[name]):,.1f}"]
        for name in rates
    ]
    table(["", "tokens/s", "first token, ms"], lines)
    print(f"\nHTTP adds {1000 * added:.2f} ms to the first token (median of {singles} pairs)")
    save("http", {"rates": rates, "firsts": firsts, "cost": cost, "added_seconds": added})
    return verdict("share of the throughput that HTTP costs", cost, MOST_COST, at_least=False)


def main() -> int:
    p = argparse.ArgumentParser(prog="bench/over_http.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a .gguf file (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="pairs of measured runs (default: %(default)s)")
    p.add_argument("--singles", type=int, default=20, help="pairs of single requests (default: %(default)s)")
    p.add_argument("--load", default="chat64", choices=loads.NAMES, help="(default: %(default)s)")
    given = p.parse_args()
    threads = choose_threads().count
    options = ("--threads", str(threads), "--kv-memory", "1GiB", "--access-log", "off")
    with ServerProcess(given.model, *options) as server:
        with LLM(given.model, threads=threads, kv_memory="1GiB") as llm:
            return 0 if asyncio.run(compare(llm, server, given.rounds, given.singles, given.load)) else 1


if __name__ == "__main__":
    sys.exit(main())
