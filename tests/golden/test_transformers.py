"""Next-token log-probabilities of tiny models of every family and storage type, against transformers in float64.

Each model reads 300 tokens of text; the distribution after each of them is the answer to a prompt of that length.
It must be within 1e-4, or twice transformers' own float32 error, of the truth, and the same to the bit however the
tokens are cut into steps.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

import backends
import oracle
import tiny
from conftest import TinyModels
from drive import Drive, load
from octavo.kernels.reference import ReferenceBackend
from octavo.loading import Checkpoint, open_model
from octavo.loading.tensor import TYPES

FOLDERS = ("F32", "F16", "BF16")
STORED = [("gguf", type) for type in (*TYPES, tiny.MIXED)] + [("folder", type) for type in FOLDERS]
MAIN = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
VARIANTS = [(f, *stored) for f in tiny.FAMILIES if f not in MAIN for stored in (("gguf", "F32"), ("folder", "F32"))]
ALL = [(family, *stored) for family in MAIN for stored in STORED] + VARIANTS
FEW = [(family, "gguf", "F32") for family in tiny.FAMILIES] + [("llama", *stored) for stored in STORED[1:]]


def opened(models: TinyModels, family: str, form: str, type: str) -> Checkpoint:
    return open_model(models.gguf(family, type) if form == "gguf" else models.folder(family, type))


def truth_of(models: TinyModels, family: str, type: str, checkpoint: Checkpoint) -> oracle.Truth:
    """About the rotary frequencies that the file stands for, where their last bits aren't transformers'."""
    model, inv_freq = models.get(family, type).model, checkpoint.spec.ropes[0].inv_freq
    if inv_freq == tiny.spec_of(model).ropes[0].inv_freq:
        return models.truth(family, type)
    return oracle.truth(oracle.with_frequencies(model, inv_freq), tiny.prompt(300))


def chunks(seed: int) -> list[int]:
    """Random chunk sizes: many of one token, some of up to 60."""
    rng = random.Random(seed)
    return [rng.choice((1, 1, 1, 2, 3, 4, 7, 15, 16, 17, 60)) for _ in range(300)]


def check(drive: Drive, truth: oracle.Truth, count: int | None = None) -> np.ndarray:
    """Logits of the text (or its first ``count`` tokens) in one step, after comparing them with the truth."""
    logits = drive.logits(truth.tokens[:count])
    error = np.abs(oracle.log_softmax(logits) - truth.logprobs[:count]).max()
    assert error <= truth.bound, f"{error:.2e} from transformers in float64, where {truth.bound:.2e} is allowed"
    return logits


@pytest.mark.parametrize(("family", "form", "type"), FEW)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_reference(dtype: str, family: str, form: str, type: str, tiny_models: TinyModels) -> None:
    checkpoint = opened(tiny_models, family, form, type)
    truth = truth_of(tiny_models, family, type, checkpoint)
    whole = check(load(ReferenceBackend(dtype), checkpoint, 16), truth)
    small = load(ReferenceBackend(dtype), checkpoint, 4)
    assert np.array_equal(small.logits(truth.tokens[:100], chunks(1)), whole[:100])


@pytest.mark.parametrize(("family", "form", "type"), ALL)
@pytest.mark.parametrize("name", backends.NATIVE)
def test_native(name: str, family: str, form: str, type: str, tiny_models: TinyModels) -> None:
    checkpoint = opened(tiny_models, family, form, type)
    truth = truth_of(tiny_models, family, type, checkpoint)
    backend = backends.exact(name)
    large, small = load(backend, checkpoint, 16), load(backend, checkpoint, 4)
    # The scalar build is slow, and the models for K types are wide.
    count = 90 if name == "scalar" and type in (*tiny.K_TYPES, tiny.MIXED) else 300
    whole = check(large, truth, count)
    assert np.array_equal(large.logits(truth.tokens[:count], [count - 9] + [1] * 9), whole)
    assert np.array_equal(small.logits(truth.tokens[:60], chunks(1)), whole[:60])


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("name", backends.NATIVE)
def test_prompts_of_every_length_and_every_step(name: str, family: str, tiny_models: TinyModels) -> None:
    checkpoint, tokens = open_model(tiny_models.gguf(family)), tiny.prompt(300)
    backend = backends.exact(name)
    for block_size in (4, 16):
        drive = load(backend, checkpoint, block_size)
        whole = drive.logits(tokens)
        assert np.array_equal(drive.logits(tokens, [1] * 300), whole)
        for length in (1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 255, 299):
            row = drive.sequence()
            assert np.array_equal(drive.step([(row, tokens[:length])], every=False)[0][0], whole[length - 1])
            drive.release(row)


@pytest.mark.parametrize("name", backends.NATIVE)
def test_neighbours_in_the_batch_change_nothing(name: str, tiny_models: TinyModels) -> None:
    for family in MAIN:
        drive = load(backends.exact(name), open_model(tiny_models.gguf(family)), 4)
        texts = [tiny.prompt(n, skip) for n, skip in ((90, 0), (17, 3000), (64, 9000), (1, 200))]
        alone = [drive.logits(t) for t in texts]
        rows, parts = [drive.sequence() for _ in texts], [[] for _ in texts]
        rng = random.Random(3)
        while any(row.length < len(t) for row, t in zip(rows, texts, strict=True)):
            open_rows = [i for i, (row, t) in enumerate(zip(rows, texts, strict=True)) if row.length < len(t)]
            step = [(i, rng.randint(1, 20)) for i in rng.sample(open_rows, min(3, len(open_rows)))]
            got = drive.step([(rows[i], texts[i][rows[i].length : rows[i].length + n]) for i, n in step])
            for (i, _), logits in zip(step, got, strict=True):
                parts[i].append(logits)
        assert all(np.array_equal(np.concatenate(p), a) for p, a in zip(parts, alone, strict=True))


@pytest.mark.parametrize("name", ["reference", *backends.NATIVE])
def test_dynamic_rope_at_the_served_context(name: str, tiny_models: TinyModels) -> None:
    """transformers' base moves with the text; Octavo's is that of a text as long as the context that is served."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    folder = tiny_models.root / "dynamic"
    for context in (64, 256):
        made = tiny.make("llama", rope_parameters=rope, max_position_embeddings=64)
        if not folder.exists():
            made.save(folder)
        checkpoint, tokens = open_model(folder, context=context), tiny.prompt(context)
        moving = oracle.truth(made.model, tokens)  # and the model keeps the frequencies of this length
        truth = oracle.truth(oracle.with_frequencies(made.model, checkpoint.spec.ropes[0].inv_freq), tokens)
        assert np.abs(truth.logprobs - moving.logprobs).max() < 1e-3
        check(load(backends.exact(name), checkpoint), truth)


@pytest.mark.parametrize(("family", "bound"), [("llama", 1e-2), ("qwen3", 1e-2), ("gemma3", 4e-2)])
@pytest.mark.parametrize("type", [*(t for t in TYPES if t not in FOLDERS), tiny.MIXED])
@pytest.mark.parametrize("name", backends.NATIVE)
def test_fast_path_is_close_and_as_repeatable(
    name: str, type: str, family: str, bound: float, tiny_models: TinyModels
) -> None:
    checkpoint, tokens = open_model(tiny_models.gguf(family, type)), tiny.prompt(40 if name == "scalar" else 120)
    fast = load(backends.fast(name), checkpoint, 16)
    logits = fast.logits(tokens)
    p = oracle.log_softmax(load(backends.exact(name), checkpoint, 16).logits(tokens))
    divergence = float((np.exp(p) * (p - oracle.log_softmax(logits))).sum(axis=1).mean())
    assert 1e-6 < divergence < bound, "nats a token; nothing at all would mean that this isn't the fast path"
    assert np.array_equal(load(backends.fast(name), checkpoint, 4).logits(tokens, chunks(2)), logits)


@pytest.mark.parametrize("type", FOLDERS)
@pytest.mark.parametrize("name", backends.NATIVE)
def test_float_weights_have_one_path(name: str, type: str, tiny_models: TinyModels) -> None:
    checkpoint, tokens = open_model(tiny_models.gguf("llama", type)), tiny.prompt(60)
    logits = [load(make(name), checkpoint).logits(tokens) for make in (backends.exact, backends.fast)]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["reference", *backends.NATIVE])
def test_int8_keys_and_values_are_close_and_as_repeatable(name: str, family: str, tiny_models: TinyModels) -> None:
    checkpoint, tokens = opened(tiny_models, family, "gguf", "F32"), tiny.prompt(60 if name == "scalar" else 200)
    small = load(backends.exact(name), checkpoint, 16, "int8")
    logits = small.logits(tokens)
    p = oracle.log_softmax(load(backends.exact(name), checkpoint, 16, "float16").logits(tokens))
    divergence = float((np.exp(p) * (p - oracle.log_softmax(logits))).sum(axis=1).mean())
    assert 1e-9 < divergence < 5e-3, "nats a token; nothing at all would mean that this isn't int8"
    assert np.array_equal(load(backends.exact(name), checkpoint, 4, "int8").logits(tokens, chunks(3)), logits)
