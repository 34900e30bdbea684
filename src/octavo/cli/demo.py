"""``octavo demo``: a real model answers sixteen prompts in one continuous batch."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from octavo.cli.generate import summary
from octavo.cli.models import fetch
from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM

MODEL = "smollm2-135m"
PROMPTS = (
    "Explain in one sentence why the sky is blue.",
    "What is gravity?",
    "Write a haiku about the sea.",
    "Name five fruits.",
    "What is photosynthesis?",
    "Suggest a name for a small black cat.",
    "What does a compiler do?",
    "Tell me a fun fact about octopuses.",
    "Why do we sleep?",
    "What is the boiling point of water?",
    "List four planets of the solar system.",
    "Write one sentence about autumn leaves.",
    "Give me a tip for learning a language.",
    "What is a prime number?",
    "Write a short poem about the moon.",
    "Why is exercise good for you?",
)


def run(max_tokens: int, engine: dict[str, Any]) -> int:
    fetch(MODEL)
    with LLM(MODEL, progress=True, **engine) as llm:
        talks = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        began = time.perf_counter()
        outputs = llm.chat(talks, SamplingParams(temperature=0.0, max_tokens=max_tokens), progress=True)
        elapsed = time.perf_counter() - began
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            print(f"\n> {prompt}")
            answer = output.error or " ".join(output.outputs[0].text.split())
            print(textwrap.fill(textwrap.shorten(answer, 220, placeholder=" ..."), 100))
        print("\n" + summary(llm, outputs, elapsed))
    return 1 if any(output.error for output in outputs) else 0
