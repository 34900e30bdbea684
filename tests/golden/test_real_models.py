"""SmolLM2-135M and Gemma 3 270M: greedy answers against transformers on the dequantised weights.

Needs the two models (``octavo pull smollm2-135m``, ``octavo pull gemma3-270m``).  Without them the tests are skipped,
unless OCTAVO_REAL_MODELS is set, as it is in CI: then a missing model is a failure.
"""

from __future__ import annotations

import os
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

import backends
from drive import load
from octavo.errors import ModelError
from octavo.loading import Checkpoint, open_model
from octavo.text.tokenizer import Tokenizer
from tiny import GEMMA_NORMS, GGUF_NAMES, SHORT, interleaved

STEPS = 24
NEAR_TIE = 1e-4

# Eighteen short prompts of equal length, so that transformers can run them as one batch without padding, and two
# longer ones; the last reaches beyond Gemma's window of 512 tokens.
SHORT_PROMPT = 12
SENTENCES = """
The capital of France is Paris, and the capital of Italy is the city of Rome
Once upon a time there was a small dragon who was afraid of the dark
def fibonacci(n):  # returns the n-th number of the sequence, counted from zero
The three primary colours are red, yellow and blue; mixing two of them gives
To make a good cup of tea, first boil the water, then warm the pot
In 1969, for the first time in history, two people walked on the
Question: What is the boiling point of water at sea level? Answer: It is
SELECT name, price FROM products WHERE price > 100 ORDER BY
My grandmother used to say that a watched pot never boils, which means that
The quick brown fox jumps over the lazy dog, and then the dog
Dear Sir or Madam, I am writing to you in order to complain about the
If a train travels 60 miles in one hour, then in three hours it travels
Berlin ist die Hauptstadt von Deutschland und liegt an der Spree, einem Fluss
{"name": "Alice", "age": 30, "city": "London", "email":
The mitochondria is the powerhouse of the cell because it produces most of the
1, 1, 2, 3, 5, 8, 13, 21, 34
It was a bright cold day in April, and the clocks were striking, when
Photosynthesis is the process by which green plants use sunlight to make their own
""".strip().splitlines()

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-135m": (
        "Llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "gemma3-270m": (
        "Gemma3",
        {
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def opened(name: str) -> Checkpoint:
    try:
        return open_model(name)
    except ModelError as e:
        if "OCTAVO_REAL_MODELS" in os.environ:
            raise
        pytest.skip(f"{name} is not here ({e})")


def transformers_model(name: str, checkpoint: Checkpoint) -> PreTrainedModel:
    """The model with the weights that gguf says the file holds; names and row orders are undone here."""
    prefix, settings = CONFIGS[name]
    config_class = getattr(transformers, prefix + ("TextConfig" if prefix == "Gemma3" else "Config"))
    config = config_class(tie_word_embeddings=True, **settings)
    with torch.device("meta"):  # no time for random weights
        model: PreTrainedModel = getattr(transformers, prefix + "ForCausalLM")(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    weights = dict(model.named_parameters())
    file: Any = checkpoint.metadata
    for entry in file.tensors.values():
        values = gguf.quants.dequantize(
            file.bytes_of(entry).reshape(entry.shape[0], -1), GGMLQuantizationType[entry.type]
        ).reshape(entry.shape)
        target = hf_name(entry.name, prefix == "Gemma3")
        if prefix == "Llama" and ("q_proj" in target or "k_proj" in target):
            heads = config.num_attention_heads if "q_proj" in target else config.num_key_value_heads
            values = halves(values, heads)
        if prefix == "Gemma3" and values.ndim == 1:
            values = values - 1
        weights.pop(target).data.copy_(torch.from_numpy(np.array(values)))
    assert not weights, f"not in the file: {list(weights)}"
    # Buffers (rotary frequencies, Gemma's input scale) don't come from files: take them from a model of one layer.
    small = {**settings, "num_hidden_layers": 6 if prefix == "Gemma3" else 1, "vocab_size": 8, "intermediate_size": 8}
    fresh = getattr(transformers, prefix + "ForCausalLM")(config_class(tie_word_embeddings=True, **small))
    for buffer_name, buffer in fresh.named_buffers():
        model.get_buffer(buffer_name).copy_(buffer)
    return model.eval()


def hf_name(name: str, gemma: bool) -> str:
    """transformers' name of a GGUF tensor."""
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in top:
        return top[name]
    _, layer, part, suffix = name.split(".")
    canonical = {v: k for k, v in GGUF_NAMES.items()}[part]
    names = {v: k for k, v in SHORT.items()}
    if gemma:
        names |= {v: k for k, v in GEMMA_NORMS.items()}
    return f"model.layers.{layer}.{names[canonical]}.{suffix}"


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes tiny.interleaved."""
    order = interleaved(np.arange(len(rows))[:, None], heads)[:, 0]
    back = np.empty_like(rows)
    back[order] = rows
    return back


def prompts(checkpoint: Checkpoint) -> list[list[int]]:
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata or {})
    short = [tokenizer.encode(s)[:SHORT_PROMPT] for s in SENTENCES]
    assert {len(s) for s in short} == {SHORT_PROMPT}
    story = tokenizer.encode(" ".join(SENTENCES) + "\n" + "\n".join(reversed(SENTENCES)) + "\n".join(SENTENCES))
    return [*short, story[:100], story[:600]]


def theirs(model: PreTrainedModel, batch: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Greedy tokens [rows, STEPS], and the two best logits' distance at each step."""
    settings = transformers.GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        out: Any = model.generate(torch.tensor(batch), settings, output_logits=True, return_dict_in_generate=True)
    logits = torch.stack(out.logits, 1)
    best = torch.topk(logits, 2, dim=-1)
    return best.indices[..., 0].numpy(), (best.values[..., 0] - best.values[..., 1]).numpy()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_equal_transformers(name: str) -> None:
    checkpoint = opened(name)
    texts = prompts(checkpoint)
    model = transformers_model(name, checkpoint)
    groups = [texts[:18], texts[18:19], texts[19:]]
    expected = [theirs(model, group) for group in groups]
    tokens = np.concatenate([e[0] for e in expected])
    gaps = np.concatenate([e[1] for e in expected])
    del model

    drive = load(backends.exact(backends.NATIVE[0]), checkpoint, 16, "float32", blocks=2048)
    rows, ours = [drive.sequence() for _ in texts], [[] for _ in texts]
    feed = texts
    for _ in range(STEPS):
        for i, logits in enumerate(drive.step(list(zip(rows, feed, strict=True)), every=False)):
            ours[i].append(int(np.argmax(logits[0])))
        feed = [o[-1:] for o in ours]
    compared = 0
    for i, (mine, right, gap) in enumerate(zip(ours, tokens.tolist(), gaps, strict=True)):
        ties = np.flatnonzero(gap < NEAR_TIE)
        until = int(ties[0]) if len(ties) else STEPS
        compared += until
        assert mine[:until] == right[:until], f"prompt {i}: {mine} is not {right} (first near-tie at {until})"
    assert compared > 0.9 * STEPS * len(texts)  # near-ties are rare
