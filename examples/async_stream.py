"""Requests from several tasks join the running batch at once; their text streams as it comes."""

import asyncio
import sys

from octavo import AsyncLLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"


async def ask(llm: AsyncLLM, name: str, question: str, delay: float) -> None:
    await asyncio.sleep(delay)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    async for delta in llm.chat([{"role": "user", "content": question}], params):
        print(f"{name}: {delta.text!r}")


async def main() -> None:
    async with AsyncLLM(MODEL) as llm:
        await asyncio.gather(
            ask(llm, "first", "Name five fruits.", 0.0),
            ask(llm, "second", "Why is exercise good for you?", 0.1),
        )
        print(llm.stats())


asyncio.run(main())
