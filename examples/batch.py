"""Many prompts in one continuous batch, each with its own parameters."""

import sys

from octavo import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
QUESTIONS = ["Name five fruits.", "What is gravity?", "Write one sentence about autumn leaves."]

with LLM(MODEL) as llm:
    talks = [[{"role": "user", "content": question}] for question in QUESTIONS]
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=40)
    outputs = llm.chat(talks, [greedy, drawn, greedy], progress=True)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        answer = output.outputs[0]
        print(f"> {question}\n{answer.text.strip()}\n({len(answer.token_ids)} tokens, {answer.finish_reason})\n")
    print(llm.stats())
