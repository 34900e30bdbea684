"""``octavo generate``: one prompt streamed, or many answered in one continuous batch."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.params import SamplingParams
from octavo.engine.llm import LLM
from octavo.engine.outputs import Logprob, RequestOutput
from octavo.errors import EngineError, RequestError

Settings = dict[str, Any]


def run(
    model: str,
    prompts: Sequence[str],
    *,
    file: str | None,
    system: str | None,
    template: bool | None,
    as_json: bool,
    progress: bool,
    engine: Settings,
    sampling: Settings,
) -> int:
    """``template``: through the model's chat template; None: if it has one.  Returns the exit code."""
    texts = read_prompts(prompts, file)
    for text in texts:
        if not text.strip():
            raise RequestError("prompt is empty", "prompt")
    params = SamplingParams(**sampling)
    with LLM(model, progress=progress, **engine) as llm:
        tokens = [_encode(llm, text, system, template) for text in texts]
        if len(tokens) == 1 and not as_json and params.n == 1:
            return _stream_one(llm, tokens[0], params)
        began = time.perf_counter()
        outputs = llm.generate(tokens, params, progress=progress)
        elapsed = time.perf_counter() - began
        for text, output in zip(texts, outputs, strict=True):
            print(json.dumps(record(text, output), ensure_ascii=False) if as_json else _shown(text, output))
        failed = sum(o.error is not None for o in outputs)
        if progress:
            print(summary(llm, outputs, elapsed), file=sys.stderr)
    if failed:
        raise EngineError(f"the engine could not compute {failed} of {len(outputs)} answers; the first error was: "
                          f"{next(o.error for o in outputs if o.error is not None)}")  # fmt: skip
    return 0


def read_prompts(prompts: Sequence[str], file: str | None) -> list[str]:
    """From the command line, from a file (one a line; .jsonl: JSON strings or objects), or else all of stdin."""
    if prompts and file:
        raise RequestError("prompts are given both on the command line and with --file: give one of them", "prompt")
    if prompts:
        return list(prompts)
    if file:
        return _from_file(file)
    if sys.stdin.isatty():
        raise RequestError("there is no prompt: give one as an argument, name a --file, or pipe text in", "prompt")
    text = sys.stdin.read()
    if not text.strip():
        raise RequestError("prompt is empty: nothing came from standard input", "prompt")
    return [text]


def _from_file(file: str) -> list[str]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"the prompts in {file} can't be read: {error.strerror}", "prompt") from None
    except UnicodeDecodeError:
        raise RequestError(f"{file} is no text in UTF-8", "prompt") from None
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise RequestError(f"{file} holds no prompt: one is expected on each line", "prompt")
    if not file.endswith(".jsonl"):
        return [line for _, line in lines]
    return [_from_json(f"{file} line {i}", line) for i, line in lines]


def _from_json(where: str, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}", "prompt") from None
    found = value.get("prompt") if isinstance(value, Mapping) else value
    if not isinstance(found, str):
        raise RequestError(f'{where} must be a JSON string, or an object with a text called "prompt"', "prompt")
    return found


def _encode(llm: LLM, text: str, system: str | None, template: bool | None) -> list[int]:
    parts = llm.parts
    if template is None:
        template = parts.template.source is not None
    if not template:
        if system is not None:
            raise RequestError("--system needs a chat template, which this model has not, or --no-template forbids",
                               "system")  # fmt: skip
        tokens = parts.tokenizer.encode(text)
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        tokens = parts.tokenizer.encode(
            parts.template.render([*messages, {"role": "user", "content": text}]), add_special=False
        )
    if not tokens:
        raise RequestError("prompt is empty: the text has no tokens", "prompt")
    return tokens


def _stream_one(llm: LLM, tokens: list[int], params: SamplingParams) -> int:
    from octavo.cli.streaming import stream

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    answer = stream(llm, llm.parts.intake.request(tokens, params), write)
    write("\n")
    if answer.interrupted:
        raise KeyboardInterrupt
    return 0


def _shown(prompt: str, output: RequestOutput) -> str:
    first = f"> {prompt.strip()}"
    if len(output.outputs) == 1:
        return f"{first}\n{output.outputs[0].text.strip()}\n"
    return "\n".join([first, *(f"[{o.index}] {o.text.strip()}" for o in output.outputs), ""])


def record(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """A result as JSON: one object a prompt."""
    result: dict[str, Any] = {
        "prompt": prompt,
        "outputs": [
            {
                "text": o.text,
                "finish_reason": o.finish_reason,
                "stop_reason": o.stop_reason,
                "tokens": len(o.token_ids),
                "token_ids": o.token_ids,
                **({"logprobs": [_logprobs(e) for e in o.logprobs]} if o.logprobs is not None else {}),
            }
            for o in output.outputs
        ],
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "seed": output.seed,
        "error": output.error,
    }
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if e is None else _logprobs(e) for e in output.prompt_logprobs]
    return result


def _logprobs(entry: Mapping[int, Logprob]) -> dict[str, dict[str, float]]:
    return {str(token): {"logprob": value.logprob, "rank": value.rank} for token, value in entry.items()}


def summary(llm: LLM, outputs: Sequence[RequestOutput], elapsed: float) -> str:
    """Throughput and how the KV blocks were used, in two lines."""
    stats = llm.stats()
    generated = sum(len(o.token_ids) for output in outputs for o in output.outputs)
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    c = stats.counters
    drafts = f", {c.accepted_tokens:,} of {c.drafted_tokens:,} drafts right" if c.drafted_tokens else ""
    return (
        f"{len(outputs)} prompts ({prompt:,} tokens) answered with {generated:,} tokens in {elapsed:.1f} s: "
        f"{generated / elapsed:,.0f} tokens a second, {c.steps} steps of {stats.mean_running:.1f} sequences\n"
        f"KV blocks: {stats.blocks_peak} of {stats.blocks} used at the peak, {100 * stats.waste:.1f} % of their slots "
        f"empty, {c.cached_tokens:,} prompt tokens from the prefix cache, {c.preemptions} preemptions{drafts}"
    )
