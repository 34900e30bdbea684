"""The loads that are measured: seeded, of real English text, greedy, every answer of a fixed length.

``variant`` changes the text and not the lengths, so that a repeat is not answered from the prefix cache.
"""

from __future__ import annotations

import importlib.util
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from typing import Any

from octavo.cli.bench import Ask

NAMES = ("single", "prefill", "chat64")
Maker = Callable[[str, int], list[Ask]]


def own(tokenizer: Any) -> Maker:
    """Loads cut from Python's own help texts.

    - single: 128 prompt tokens, 256 generated
    - prefill: 2,048 prompt tokens, 1 generated
    - chat64: 64 requests at once with log-normal lengths like those of shared chats: prompts of 161 tokens on average
      (4 to 768), answers of 200 (8 to 512)
    """
    from pydoc_data import topics

    ids = tokenizer.encode("\n\n".join(topics.topics.values()), add_special=False)
    bos = [tokenizer.bos_id] if tokenizer.add_bos else []

    def make(name: str, variant: int) -> list[Ask]:
        rng = random.Random(f"{name} {variant}")
        starts = rng.sample(range(len(ids) - 2048), 64)

        def text(number: int, length: int) -> list[int]:
            return (bos + ids[starts[number] : starts[number] + length])[:length]

        if name == "single":
            return [Ask(text(0, 128), 256)]
        if name == "prefill":
            return [Ask(text(0, 2048), 1)]
        order = random.Random("lengths")
        prompts = log_normal(64, 161, 1.0, 4, 768)
        answers = log_normal(64, 200, 0.8, 8, 512)
        order.shuffle(prompts)
        order.shuffle(answers)
        return [Ask(text(i, p), a) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]

    return make


def log_normal(count: int, mean: float, sigma: float, low: int, high: int) -> list[int]:
    """Evenly spread quantiles of a log-normal law, cut to low..high and scaled so that their mean is ``mean``."""
    shape = [math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    small, large = low / shape[-1], high / shape[0]
    for _ in range(60):
        scale = math.sqrt(small * large)
        lengths = [round(min(high, max(low, scale * s))) for s in shape]
        small, large = (scale, large) if sum(lengths) < mean * count else (small, scale)
    return lengths


def outside(folder: Path) -> Maker:
    """Loads of a ``workloads.py`` in another folder: ``make(name, variant)`` gives requests as dicts."""
    path = folder / "workloads.py"
    found = importlib.util.spec_from_file_location("outside_workloads", path)
    if found is None or found.loader is None or not path.is_file():
        raise SystemExit(f"error: there is no {path}")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)

    def make(name: str, variant: int) -> list[Ask]:
        return [Ask(list(r["prompt_token_ids"]), int(r["max_tokens"])) for r in module.make(name, variant)]

    return make
