"""A conversation: each turn sends all of it, and the prefix cache answers for what was computed before."""

import sys

from octavo import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
TURNS = ["My cat is called Luna. She is black.", "Write one sentence about my cat.", "And a shorter one."]

with LLM(MODEL) as llm:
    messages = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=40))[0]
        answer = output.outputs[0].text.strip()
        messages.append({"role": "assistant", "content": answer})
        cached, prompt = output.num_cached_tokens, len(output.prompt_token_ids)
        print(f"> {turn}\n{answer}\n({cached} of {prompt} prompt tokens came from the cache)\n")
