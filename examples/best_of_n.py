"""Eight answers to one prompt: the branches share the prompt's blocks, and the likeliest one wins."""

import sys

from octavo import LLM, SamplingParams

MODEL = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"

with LLM(MODEL) as llm:
    params = SamplingParams(n=8, temperature=0.5, seed=7, max_tokens=24, logprobs=0)
    output = llm.chat([{"role": "user", "content": "Suggest a name for a small black cat."}], params)[0]

    def mean_logprob(branch):
        return branch.cumulative_logprob / len(branch.token_ids)

    for branch in sorted(output.outputs, key=mean_logprob, reverse=True):
        print(f"{mean_logprob(branch):6.2f}  {branch.text.strip()!r}")
    stats = llm.stats()
    print(f"{stats.blocks_peak} blocks at the peak, {stats.counters.copies} copied on write")
