"""What prompt lookup saves one stream: tokens a second with and without it, on text that repeats its prompt and not.

- repeats: answers that quote, edit or extract from their prompt
- other: prose, greedy and sampled at temperature 1, where there is nothing to look up
- crowd: the repeating prompts so many at a time that nothing is drafted

Each round asks the same engine with its drafter and without, in alternating order, so that nothing else differs (two
engines in a process do: in where their memory lies).  A round's ratio is that of tokens a second after the first token
(crowd: in all).  The answers must be the same, token for token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from common import save, table, verdict

from octavo import LLM, SamplingParams

CODE = '''\
def total(prices, rates):
    """Sum of prices in one currency."""
    result = 0.0
    for name, price in prices.items():
        rate = rates.get(name, 1.0)
        result += price * rate
    return round(result, 2)


def report(prices, rates, limit):
    """Lines of text, one for each price, and the total."""
    lines = []
    for name in sorted(prices):
        value = prices[name] * rates.get(name, 1.0)
        if value > limit:
            lines.append(f"{name}: {value:.2f} (above the limit)")
        else:
            lines.append(f"{name}: {value:.2f}")
    lines.append(f"total: {total(prices, rates):.2f}")
    return "\\n".join(lines)
'''

MINUTES = """\
The harbour board met on Tuesday. The chair reported that the dredging of the north channel is two weeks late because
the contractor's barge was damaged in the storm of March 4. The treasurer said that repairs to the east pier will cost
84,000 crowns, of which the county pays half. Members voted seven to two to raise berth fees by four percent from
June. The ferry company asked for a second landing stage. The board will decide on it at the meeting of May 12.
"""

REPEATS = {
    "code edit": f"Add a comment above the function `report` and return the whole code:\n\n```python\n{CODE}```",
    "quotation": f"Repeat the following text word for word:\n\n{MINUTES}",
    "correction": f"Correct the spelling mistakes in this text and change nothing else:\n\n"
    f"{MINUTES.replace('because', 'becuase').replace('damaged', 'damagd')}",
    "extraction": f"List the sentences of this text that mention money, exactly as they are written:\n\n{MINUTES}",
}

OTHER = {
    "greedy, explains": ("Explain how rainbows form.", 0.0),
    "greedy, a story": ("Write a short story about a lighthouse keeper and a storm.", 0.0),
    "sampled, a story": ("Write a short story about two brothers who build a boat.", 1.0),
    "sampled, advice": ("How do I learn to play the violin as an adult?", 1.0),
}


@dataclass
class Run:
    """One answer: its tokens, and its tokens a second after the first."""

    tokens: list[int]
    rate: float
    seconds: float


def ask(llm: LLM, prompt: str, given: SamplingParams) -> Run:
    began = time.perf_counter()
    (output,) = llm.chat([{"role": "user", "content": prompt}], given)
    seconds = time.perf_counter() - began
    tokens = list(output.outputs[0].token_ids)
    return Run(tokens, (len(tokens) - 1) / (seconds - (output.first_token_seconds or 0.0)), seconds)


@contextmanager
def drafter(llm: LLM, which: str) -> Iterator[None]:
    """The engine with its drafter, or without."""
    engine = llm.parts.engine
    kept = engine.drafter
    if which == "without":
        engine.drafter = None
    try:
        yield
    finally:
        engine.drafter = kept


def compare(llm: LLM, name: str, prompt: str, given: SamplingParams, rounds: int) -> dict[str, Any]:
    """Ratios of rounds with over without, each first in turn."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    before = llm.stats().counters
    for round in range(rounds + 1):
        runs = {}
        for which in ("with", "without") if round % 2 else ("without", "with"):
            with drafter(llm, which):
                runs[which] = ask(llm, prompt, given)
        if runs["with"].tokens != runs["without"].tokens:
            raise SystemExit(f"error: {name}: the answers with and without speculation differ")
        if round:  # the first reads the prompt and touches memory
            for which, run in runs.items():
                rates[which].append(run.rate)
    after = llm.stats().counters
    return {
        "tokens": len(runs["with"].tokens),
        "rates": rates,
        "ratios": [a / b for a, b in zip(rates["with"], rates["without"], strict=True)],
        "drafted": (after.drafted_tokens - before.drafted_tokens) / (rounds + 1),
        "accepted": (after.accepted_tokens - before.accepted_tokens) / (rounds + 1),
    }


def crowd(llm: LLM, given: argparse.Namespace) -> dict[str, Any]:
    prompts = [list(REPEATS.values())[i % len(REPEATS)] for i in range(given.crowd)]
    params = SamplingParams(temperature=0.0, max_tokens=given.output, ignore_eos=True)
    talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
    rates: dict[str, list[float]] = {"with": [], "without": []}
    for round in range(given.crowd_rounds + 1):
        answers = {}
        for which in ("with", "without") if round % 2 else ("without", "with"):
            began = time.perf_counter()
            with drafter(llm, which):
                outputs = llm.chat(talks, params)
            seconds = time.perf_counter() - began
            answers[which] = [list(o.outputs[0].token_ids) for o in outputs]
            if round:
                rates[which].append(sum(map(len, answers[which])) / seconds)
        if answers["with"] != answers["without"]:
            raise SystemExit("error: crowd: the answers with and without speculation differ")
    ratios = [a / b for a, b in zip(rates["with"], rates["without"], strict=True)]
    return {"rates": rates, "ratios": ratios}


def interval(ratios: list[float]) -> tuple[float, float]:
    """Between these order statistics lies the median with a probability of at least 95 %."""
    ordered, n = sorted(ratios), len(ratios)
    outside, chance, low = 0.0, 0.5**n, 0
    while low < n // 2 and outside + chance <= 0.025:
        outside += chance
        chance *= (n - low) / (low + 1)
        low += 1
    low = max(0, low - 1)
    return ordered[low], ordered[n - 1 - low]


def shown(found: dict[str, dict[str, Any]]) -> list[float]:
    """Prints a table; returns the ratios of rounds over all texts, each text counting alike."""
    lines = []
    for name, one in found.items():
        with_, without = (statistics.median(one["rates"][which]) for which in ("with", "without"))
        low, high = interval(one["ratios"])
        ratio = f"{statistics.median(one['ratios']):.2f} ({low:.2f} to {high:.2f})"
        drafts = f"{one['accepted']:.0f} of {one['drafted']:.0f}"
        lines.append([name, str(one["tokens"]), f"{without:.0f}", f"{with_:.0f}", ratio, drafts])
    table(["text", "tokens", "without/s", "with/s", "ratio (95 %)", "drafts right"], lines)
    return [statistics.geometric_mean(round) for round in zip(*(f["ratios"] for f in found.values()), strict=True)]


def judged(what: str, ratios: list[float], bound: float) -> bool:
    low, high = interval(ratios)
    print(f"{what}: {len(ratios)} pairs, 95 % interval of the median {low:.3f} to {high:.3f}")
    return verdict(f"{what}, with over without", statistics.median(ratios), bound)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/speculate.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a .gguf file (default: %(default)s)")
    p.add_argument("--only", choices=("repeats", "other", "crowd"), help="one part of the three")
    p.add_argument("--speculate", type=int, default=8, help="drafts a step (default: %(default)s)")
    p.add_argument("--output", type=int, default=128, help="most tokens of an answer (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=15, help="measured pairs (default: %(default)s)")
    p.add_argument("--crowd", type=int, default=8, help="requests at a time in the crowd (default: %(default)s)")
    p.add_argument("--crowd-rounds", type=int, default=15, help="measured pairs of the crowd (default: %(default)s)")
    p.add_argument("--threads", type=int, help="threads of the model")
    p.add_argument("--seed", type=int, default=0, help="of the sampled texts (default: %(default)s)")
    given = p.parse_args()
    if min(given.output - 1, given.rounds, given.crowd, given.crowd_rounds, given.speculate) < 1:
        p.error("all counts must be at least 1, and --output at least 2")
    return given


def main() -> int:
    given = arguments()
    report: dict[str, Any] = {"settings": vars(given)}
    good = True
    with LLM(given.model, kv_memory="256MiB", threads=given.threads, speculate=given.speculate) as llm:
        if given.only in (None, "repeats"):
            params = SamplingParams(temperature=0.0, max_tokens=given.output)
            found = {name: compare(llm, name, p, params, given.rounds) for name, p in REPEATS.items()}
            report["repeats"] = found
            good &= judged("text that repeats its prompt", shown(found), 1.5)
        if given.only in (None, "other"):
            found = {}
            for name, (prompt, temperature) in OTHER.items():
                params = SamplingParams(temperature=temperature, max_tokens=given.output, seed=given.seed)
                found[name] = compare(llm, name, prompt, params, given.rounds)
            report["other"] = found
            good &= judged("text that does not", shown(found), 0.97)
        if given.only in (None, "crowd"):
            report["crowd"] = one = crowd(llm, given)
            with_, without = (statistics.median(one["rates"][which]) for which in ("with", "without"))
            print(f"{given.crowd} at a time: {without:.0f} tokens a second without, {with_:.0f} with")
            good &= judged(f"{given.crowd} at a time", one["ratios"], 0.97)
    save("speculate", report)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
