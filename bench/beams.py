"""Beam search against transformers' in float32, and the memory that branches share.

- speed: one prompt of real text, Octavo on its default path and transformers' ``generate(num_beams=...)`` of the same
  GGUF file dequantised to float32, in turn, neither ending early; medians and their ratio
- saving: 1 - physical / logical blocks of the running branches, summed over steps, of beams and of parallel samples,
  on the same prompt and on chats' lengths (beams need the model to choose; samples' blocks depend on lengths only and
  run scripted)
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import loads  # noqa: E402
from common import Length, save, shared_chats, table, verdict  # noqa: E402
from oversubscribe import VOCAB, Counting  # noqa: E402
from plain import Transformers  # noqa: E402

from octavo import LLM, SamplingParams  # noqa: E402
from octavo.clock import RealClock  # noqa: E402
from octavo.core.request import Request  # noqa: E402
from octavo.engine.engine import Engine  # noqa: E402
from octavo.engine.intake import Intake  # noqa: E402
from octavo.loading import find  # noqa: E402
from octavo.paging.kv import KV  # noqa: E402

# Figure 15 of the PagedAttention paper and its text, in %: (Alpaca, ShareGPT), for 2 to 6 branches.
PAPER = {"beams": ("37.6-55.2", "44.3-66.3"), "samples": ("6.1-9.8", "16.2-30.5")}


def speed(llm: LLM, prompt_of: Any, given: argparse.Namespace) -> dict[str, Any]:
    peer = Transformers(Path(find(given.model)), given.peer_threads or given.threads)
    ours: list[float] = []
    theirs: list[float] = []
    same, gaps = 0, []
    peer.search(prompt_of(0), given.width, 4)
    llm.beam_search([prompt_of(0)], given.width, 4, ignore_eos=True)
    for round in range(1, given.rounds + 1):
        prompt = prompt_of(round)
        began = time.perf_counter()
        (found,) = llm.beam_search([prompt], given.width, given.output, ignore_eos=True)
        ours.append(time.perf_counter() - began)
        time.sleep(0.3)  # the threads of one must not spin into the other's time
        began = time.perf_counter()
        ids, score = peer.search(prompt, given.width, given.output)
        theirs.append(time.perf_counter() - began)
        time.sleep(0.3)
        best = found.outputs[0]
        same += list(best.token_ids) == ids
        assert best.score is not None
        gaps.append(abs(best.score - score))
    return {"octavo_s": ours, "transformers_s": theirs, "same_best": same, "score_gaps": gaps}


def saving(engine: Engine, requests: Iterable[Request], together: int = 8) -> float:
    """Runs requests, ``together`` at a time; 1 - physical / logical blocks, both summed over steps."""
    waiting = list(requests)
    inside: list[Request] = []
    physical = logical = 0
    while waiting or inside:
        while waiting and len(inside) < together:
            inside.append(waiting.pop(0))
            engine.add(inside[-1])
        engine.step()
        holdings = engine.kv.holdings
        tables = [t.live() for s in engine.scheduler.running for t in holdings[s.number].tables]
        logical += sum(len(t) for t in tables)
        physical += len({b for t in tables for b in t})
        inside = [r for r in inside if not r.finished]
    return 1 - physical / logical if logical else 0.0


def samples(width: int, lengths: list[Length], given: argparse.Namespace) -> float:
    """What parallel samples of these lengths share."""
    context = max(x.total for x in lengths)
    kv = KV(8 * width * (-(-context // 16) + 1), 16, prefix_cache=False)
    clock = RealClock()
    engine = Engine(Counting(), kv, clock=clock)
    intake = Intake(tokenizer=None, vocab=VOCAB, context=context, longest=kv.longest(), now=clock.now)
    asked = []
    for length in lengths:
        params = SamplingParams(n=width, max_tokens=length.output, ignore_eos=True, temperature=1.0)
        asked.append(intake.request([1] * length.prompt, params))
    return saving(engine, asked)


def beams(llm: LLM, width: int, prompts: list[tuple[list[int], int]]) -> float:
    intake = llm.parts.intake
    asked = [intake.beam_search(p, width=width, max_tokens=count, ignore_eos=True) for p, count in prompts]
    llm.reset_prefix_cache()
    return saving(llm.parts.engine, asked)


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="bench/beams.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled GGUF model or a .gguf file (default: %(default)s)")
    p.add_argument("--only", choices=("speed", "saving"), help="one part of the two")
    p.add_argument("--width", type=int, default=4, help="beams (default: %(default)s)")
    p.add_argument("--prompt", type=int, default=256, help="tokens of the prompt (default: %(default)s)")
    p.add_argument("--output", type=int, default=64, help="tokens to generate (default: %(default)s)")
    p.add_argument("--rounds", type=int, default=3, help="measured rounds (default: %(default)s)")
    p.add_argument("--requests", type=int, default=16, help="with chats' lengths, for beams (default: %(default)s)")
    p.add_argument("--context", type=int, default=512, help="most tokens of these (default: %(default)s)")
    p.add_argument("--widths", type=int, nargs="+", default=[2, 4, 6], help="of the savings (default: 2 4 6)")
    p.add_argument("--threads", type=int, default=2, help="of both (default: %(default)s)")
    p.add_argument("--peer-threads", type=int, help="of transformers, if others suit it better")
    p.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    given = p.parse_args()
    if min(given.width, given.output, given.rounds, given.requests, *given.widths) < 1 or given.context < 2:
        p.error("all counts must be at least 1")
    if not 1 <= given.prompt <= 2048:
        p.error("--prompt must be in [1, 2048]")
    return given


def main() -> int:
    given = arguments()
    report: dict[str, Any] = {"settings": vars(given)}
    good = True
    with LLM(given.model, threads=given.threads) as llm:
        make = loads.own(llm.tokenizer)

        def prompt_of(number: int, length: int = given.prompt) -> list[int]:
            return make("prefill", 1000 * given.seed + number)[0].prompt[:length]

        if given.only != "saving":
            report["speed"] = found = speed(llm, prompt_of, given)
            a, b = statistics.median(found["octavo_s"]), statistics.median(found["transformers_s"])
            what = f"{given.prompt} in, {given.width} beams, {given.output} out"
            table([what, "seconds"], [["octavo, fast path", f"{a:.2f}"], ["transformers, float32", f"{b:.2f}"]])
            print(
                f"the same best answer in {found['same_best']} of {given.rounds}; "
                f"scores apart by up to {max(found['score_gaps']):.4f} (8-bit arithmetic against float32)"
            )
            good &= verdict("transformers over octavo", b / a, 4)
        if given.only != "speed":
            report["saving"] = savings(llm, prompt_of, given)
    save("beams", report)
    return 0 if good else 1


def savings(llm: LLM, prompt_of: Any, given: argparse.Namespace) -> list[dict[str, Any]]:
    lengths = shared_chats(given.requests, given.context, given.seed)
    many = shared_chats(300, 2048, given.seed)
    out = []
    for width in given.widths:
        one = [(prompt_of(1), given.output)]
        chats = [(prompt_of(10 + i, x.prompt), x.output) for i, x in enumerate(lengths)]
        out.append(
            {
                "width": width,
                "beams_one": beams(llm, width, one),
                "beams_chats": beams(llm, width, chats),
                "samples_one": samples(width, [Length(given.prompt, given.output)], given),
                "samples_chats": samples(width, many, given),
            }
        )
    one_name = f"{given.prompt} + {given.output}"
    head = ["saving by sharing, %", f"beams {one_name}", "beams chats", f"samples {one_name}", "samples chats"]
    keys = ("beams_one", "beams_chats", "samples_one", "samples_chats")
    table(head, [[f"{s['width']} branches", *(f"{100 * s[k]:.1f}" for k in keys)] for s in out])
    for name, (alpaca, chat) in PAPER.items():
        print(f"the paper, {name}: {alpaca} % on Alpaca, {chat} % on ShareGPT")
    print(f"beams of chats: {given.requests} requests cut to {given.context} tokens; samples: 300 cut to 2,048")
    return out


if __name__ == "__main__":
    sys.exit(main())
