"""The same load through transformers: one request at a time, its best static batch, its own continuous batching."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from common import Length
from gpu_engine import load_of
from gpu_shapes import SHAPES, Sizes

Report = dict[str, Any]


def model_of(device: torch.device, name: str) -> Any:
    """A Llama of the shape with random weights, made on the device."""
    spec = SHAPES[name]
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        max_position_embeddings=spec.max_context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return transformers.LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def prompts(lengths: Sequence[Length], vocab: int) -> list[list[int]]:
    """The engine's own prompts."""
    out = []
    for seed, length in enumerate(lengths):
        rng = random.Random(seed)
        out.append([rng.randrange(vocab) for _ in range(length.prompt)])
    return out


def compare(device: torch.device, name: str, sizes: Sizes) -> Report:
    """Each way's generated tokens a second; one that fails is told with its error, and the others go on."""
    model, lengths = model_of(device, name), load_of(sizes)
    ids = prompts(lengths, SHAPES[name].vocab)
    found: Report = {}
    found["one at a time"] = _tried(lambda: _static(model, ids[: sizes.alone], lengths[: sizes.alone], 1))
    static = {}
    for batch in sizes.static:
        count = min(len(ids), 2 * batch)
        static[batch] = _tried(lambda n=count, b=batch: _static(model, ids[:n], lengths[:n], b))
    found["static"] = static
    rates = {batch: r["rate"] for batch, r in static.items() if "rate" in r}
    found["best static"] = {"batch": max(rates, key=rates.__getitem__), "rate": max(rates.values())} if rates else {}
    small = {"page_size": 16, "num_blocks": 64, "max_batch_tokens": 64} if device.type == "cpu" else {}
    found["continuous batching"] = _tried(lambda: _continuous(model, ids, lengths, small))
    return found


def _tried(work: Any) -> Report:
    try:
        report: Report = work()
        return report
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


@torch.no_grad()
def _static(model: Any, ids: Sequence[list[int]], lengths: Sequence[Length], batch: int) -> Report:
    """Batches in the order of arrival, padded to their longest prompt; each runs to its longest answer."""
    tokens, began = 0, time.perf_counter()
    for first in range(0, len(ids), batch):
        some, wanted = ids[first : first + batch], lengths[first : first + batch]
        width, most = max(map(len, some)), max(length.output for length in wanted)
        padded = torch.tensor([[0] * (width - len(p)) + p for p in some], device=model.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in some], device=model.device)
        model.generate(
            padded, attention_mask=mask, max_new_tokens=most, min_new_tokens=most, do_sample=False, use_cache=True
        )
        tokens += sum(length.output for length in wanted)
    took = time.perf_counter() - began
    return {"requests": len(ids), "tokens": tokens, "seconds": took, "rate": tokens / took}


def _continuous(model: Any, ids: Sequence[list[int]], lengths: Sequence[Length], small: dict[str, int]) -> Report:
    """transformers' own paged attention with continuous batching, each request to its own length."""
    settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=4096)
    options = {"continuous_batching_config": transformers.ContinuousBatchingConfig(**small)} if small else {}
    with model.continuous_batching_context_manager(
        generation_config=settings, block=True, timeout=5, warmup=not small, **options
    ) as manager:
        began = time.perf_counter()
        for prompt, length in zip(ids, lengths, strict=True):
            manager.add_request(prompt, max_new_tokens=length.output, eos_token_id=-1)
        done = tokens = 0
        while done < len(ids):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError("continuous batching ended before its requests")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                done += 1
                tokens += len(result.generated_tokens)
        took = time.perf_counter() - began
    return {"requests": len(ids), "tokens": tokens, "seconds": took, "rate": tokens / took}
