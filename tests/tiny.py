"""Tiny random models of every family: as transformers models, as safetensors folders and as GGUF files.

The weights have a large spread, so that each next token depends on the whole context; a model that falls into
repeating one token would hide almost every fault.
"""

from __future__ import annotations

import copy
import json
import math
import pydoc_data.topics
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from octavo.loading.tensor import TYPES, Tensor
from octavo.models.spec import LayerSpec, ModelSpec, RopeSpec

VOCAB = 512
CONTEXT = 1024
BOS, EOS = "<|begin|>", "<|end|>"
K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
MIXED = "mixed"  # a different type for each matrix, as the files of real models have it

TEXT = "\n".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}

# name -> (transformers class prefix, GGUF architecture, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama-untied": ("Llama", "llama", {"tie_word_embeddings": False}),
    "llama3-rope": ("Llama", "llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-bias": ("Llama", "llama", {"attention_bias": True}),
    "llama-linear": (
        "Llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-yarn": ("Llama", "llama", {"rope_parameters": YARN_ROPE}),
    "llama-yarn-factor": ("Llama", "llama", {"rope_parameters": {**YARN_ROPE, "attention_factor": 1.3}}),
    "mistral": ("Mistral", "llama", {"sliding_window": 16, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma3": (
        "Gemma3",
        "gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 6,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3-softcap": ("Gemma3", "gemma3", {"final_logit_softcapping": 8.0}),
}
FAMILIES["gemma3-softcap"][2].update({**FAMILIES["gemma3"][2], **FAMILIES["gemma3-softcap"][2]})


@dataclass
class Tiny:
    """A tiny model: ``model`` holds, in float32, exactly the values that the stored weights stand for."""

    family: str
    type: str
    model: PreTrainedModel
    stored: dict[str, tuple[str, np.ndarray]]  # transformers name of a matrix -> (type, raw bytes [rows, row bytes])
    arch: str = field(init=False)

    def __post_init__(self) -> None:
        self.arch = FAMILIES[self.family][1]

    def save(self, path: Path) -> Path:
        """A Hugging Face folder; only for F32, F16 and BF16."""
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[self.type]
        # A copy: the rotary frequencies would be rounded too, though no file has them.
        copy.deepcopy(self.model).to(dtype).save_pretrained(path)
        fast_tokenizer().save_pretrained(path)
        return path

    def write_gguf(self, path: Path) -> Path:
        _write_gguf(self, path)
        return path


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE of 512 tokens, trained on Python's help texts; bos is 0 and eos is 1."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator([TEXT[:200_000]], trainer)
    return tok


def fast_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer(), bos_token=BOS, eos_token=EOS)


def prompt(length: int, skip: int = 0) -> list[int]:
    """``length`` token ids of real text, from character ``skip`` on."""
    ids: list[int] = tokenizer().encode(TEXT[skip : skip + 8 * length]).ids
    return ids[:length]


def make(family: str, type: str = "F32", seed: int = 0, **settings: Any) -> Tiny:
    """A tiny model whose matrices are stored as ``type`` (or MIXED); ``settings`` override the family's."""
    model = build(family, wide=type in K_TYPES or type == MIXED, seed=seed, **settings)
    rng = np.random.default_rng(seed)
    stored = {}
    kinds = [*TYPES]
    for i, (name, p) in enumerate(model.named_parameters()):
        if p.ndim == 1 and type in ("F16", "BF16"):  # a folder has all of its tensors in one type
            p.data = p.data.to(torch.float16 if type == "F16" else torch.bfloat16).to(torch.float32)
        if p.ndim == 2:
            kind = kinds[i % len(kinds)] if type == MIXED else type
            raw = encode(kind, p.data.numpy(), rng)
            stored[name] = (kind, raw)
            p.data = torch.from_numpy(decode(kind, raw))
    return Tiny(family, type, model, stored)


def build(family: str, wide: bool, seed: int, **settings: Any) -> PreTrainedModel:
    """The transformers model in float32; ``wide``: all widths divisible by 256."""
    prefix, _, own = FAMILIES[family]
    config_name = prefix + ("TextConfig" if prefix == "Gemma3" else "Config")
    config = getattr(transformers, config_name)(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 256 if wide else 64,
            "intermediate_size": 256 if wide else 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64 if wide else 16,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "attn_implementation": "eager",
            **own,
            **({"head_dim": 64} if wide else {}),
            **settings,
        }
    )
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
    scatter(model, seed)
    return model


def scatter(model: PreTrainedModel, seed: int) -> None:
    """Random weights with a large spread, large enough for attention to choose and for logits to differ."""
    rng = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type == "gemma3_text"
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=rng)
        if name.endswith("bias"):
            p.data = 0.5 * noise
        elif p.ndim == 1:
            p.data = 0.25 * noise + (0.0 if gemma else 1.0)
            if "q_norm" in name or "k_norm" in name:
                p.data += 0.25
            elif gemma and ("post_" in name or name == "model.norm.weight"):
                p.data += 2  # a tied head would repeat the last token if its embedding stood out
        elif "embed_tokens" in name:
            p.data = noise * (0.8 if gemma else 3.2) / p.shape[1] ** 0.5
        elif "lm_head" in name:
            p.data = noise * 3 / p.shape[1] ** 0.5
        else:
            choosy = "q_proj" in name or "k_proj" in name
            p.data = noise * (1.4 if choosy else 1.7) / p.shape[1] ** 0.5


def encode(type: str, values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Raw bytes uint8 [rows, row bytes]; K types can't be quantised by gguf and get valid random blocks instead."""
    if type in K_TYPES:
        return random_blocks(type, values.shape, float(values.std()), rng)
    raw = gguf.quants.quantize(np.ascontiguousarray(values, dtype=np.float32), GGMLQuantizationType[type])
    return raw.view(np.uint8).reshape(len(values), -1)


def decode(type: str, raw: np.ndarray) -> np.ndarray:
    """What the bytes stand for, in gguf's opinion: float32 [rows, cols]."""
    return np.array(gguf.quants.dequantize(raw, GGMLQuantizationType[type]), dtype=np.float32).reshape(len(raw), -1)


def random_blocks(type: str, shape: tuple[int, ...], spread: float, rng: np.random.Generator) -> np.ndarray:
    """Blocks of a K type with all integers at random and scales that give about the spread asked for."""
    per, size = TYPES[type]
    raw = rng.integers(0, 256, (shape[0], shape[1] // per, size), dtype=np.uint8)

    def half(values: np.ndarray) -> np.ndarray:
        return values.astype(np.float16).view(np.uint8).reshape(*values.shape, 2)

    if type == "Q6_K":
        raw[..., -2:] = half(spread / 1370 * rng.uniform(0.7, 1.3, raw.shape[:2]))
    else:
        # Minimums near the middle of each 32 weights' range, as a quantiser has them: without that all weights of 32
        # would share an offset, in embeddings as in matrices, and their products would be huge.
        near = rng.integers(0, 8, (*raw.shape[:2], 8), dtype=np.uint8)
        raw[..., 8:12] = raw[..., 4:8] ^ near[..., :4]
        raw[..., 12:16] = (raw[..., 12:16] & 0x0F) * 17 ^ near[..., 4:] << 4
        levels, middle = (168, 7.5) if type == "Q4_K" else (337, 15.5)
        scale = spread / levels * rng.uniform(0.7, 1.3, raw.shape[:2])
        raw[..., 0:2], raw[..., 2:4] = half(scale), half(scale * middle)
    return raw.reshape(shape[0], -1)


# ---- the checkpoint as octavo's loaders would bring it, made from the transformers model itself ------------------


class Tensors(dict[str, Tensor]):
    def release(self, name: str, nbytes: int | None = None) -> None:
        """They lie in no file."""


@dataclass(frozen=True)
class Assembled:
    spec: ModelSpec
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())


SHORT = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
}
GEMMA_NORMS = {
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def assemble(tiny: Tiny) -> Assembled:
    """Spec and canonical tensors, independent of octavo's loaders."""
    gemma = tiny.arch == "gemma3"
    tensors = {}
    for name, p in tiny.model.named_parameters():
        short = canonical(name, gemma)
        if p.ndim == 2:
            kind, raw = tiny.stored[name]
            tensors[short] = Tensor(short, kind, tuple(p.shape), raw.reshape(-1))
        else:
            values = p.data.numpy() + np.float32(gemma)  # Gemma's norms multiply by 1 + weight
            tensors[short] = Tensor(short, "F32", tuple(p.shape), values.view(np.uint8))
    return Assembled(spec_of(tiny.model), Tensors(tensors))


def canonical(name: str, gemma: bool) -> str:
    """octavo's name of a transformers parameter."""
    top = {"model.embed_tokens.weight": "embed", "model.norm.weight": "final_norm", "lm_head.weight": "head"}
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    short = (GEMMA_NORMS if gemma and part in GEMMA_NORMS else SHORT)[part]
    return f"layers.{layer}.{short}" + ("_bias" if kind == "bias" else "")


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """The spec, with the rotary frequencies read out of the transformers model."""
    c = model.config
    gemma, rotary = c.model_type == "gemma3_text", model.model.rotary_emb
    kinds = ("full_attention", "sliding_attention") if gemma else ("",)
    ropes = tuple(
        RopeSpec(
            tuple(getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq").to(torch.float32).tolist()),
            float(getattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling")),
        )
        for kind in kinds
    )
    if gemma:
        slides = [kind == "sliding_attention" for kind in c.layer_types]
        layers = tuple(LayerSpec(c.sliding_window if s else None, int(s)) for s in slides)
    else:
        window = c.sliding_window if c.model_type == "mistral" else None
        layers = tuple(LayerSpec(window) for _ in range(c.num_hidden_layers))
    bias = bool(getattr(c, "attention_bias", False))
    return ModelSpec(
        family=c.model_type,
        hidden=c.hidden_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim if hasattr(c, "head_dim") else c.hidden_size // c.num_attention_heads,
        intermediate=c.intermediate_size,
        vocab=c.vocab_size,
        layers=layers,
        ropes=ropes,
        max_context=c.max_position_embeddings,
        norm_eps=c.rms_norm_eps,
        activation="gelu_tanh" if gemma else "silu",
        embed_scale=c.hidden_size**0.5 if gemma else 1.0,
        attention_scale=c.query_pre_attn_scalar**-0.5 if gemma else 0.0,
        logit_softcap=(c.final_logit_softcapping or 0.0) if gemma else 0.0,
        qkv_bias=c.model_type == "qwen2" or bias,
        o_bias=bias,
        qk_norm=c.model_type in ("qwen3", "gemma3_text"),
        post_norms=gemma,
        tied=c.tie_word_embeddings,
    )


# ---- GGUF, as the public converter writes it -----------------------------------------------------------------------

GGUF_NAMES = {
    "embed": "token_embd",
    "final_norm": "output_norm",
    "head": "output",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "attn_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "attn_post_norm": "post_attention_norm",
    "mlp_post_norm": "post_ffw_norm",
}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K in the order of Llama-type GGUF files, where rotary pairs are neighbours."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(tiny: Tiny, path: Path) -> None:
    writer = gguf.GGUFWriter(path, tiny.arch)
    _write_settings(writer, tiny)
    _write_tokenizer(writer)
    c = tiny.model.config
    for name, p in tiny.model.named_parameters():
        short = canonical(name, tiny.arch == "gemma3")
        layer, part = short.rsplit(".", 1) if "." in short else ("", short)
        base, suffix = part.removesuffix("_bias"), ".bias" if part.endswith("_bias") else ".weight"
        target = (layer.replace("layers", "blk") + "." if layer else "") + GGUF_NAMES[base] + suffix
        if p.ndim == 2:
            kind, rows = tiny.stored[name]
        else:
            kind, rows = "F32", (p.data.numpy() + np.float32(tiny.arch == "gemma3"))[:, None]
        if tiny.arch == "llama" and base in ("q", "k"):
            rows = interleaved(rows, c.num_attention_heads if base == "q" else c.num_key_value_heads)
        if p.ndim == 1:
            writer.add_tensor(target, rows[:, 0].copy())
        elif kind in ("F32", "F16"):
            writer.add_tensor(target, rows.view(np.float32 if kind == "F32" else np.float16))
        else:
            writer.add_tensor(target, rows, raw_dtype=GGMLQuantizationType[kind])
    if c.model_type == "llama" and c.rope_parameters["rope_type"] == "llama3":
        plain = 1.0 / (c.rope_parameters["rope_theta"] ** (np.arange(0, c.head_dim, 2, dtype=np.float32) / c.head_dim))
        factors = plain / tiny.model.model.rotary_emb.inv_freq.to(torch.float32).numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    c = tiny.model.config
    writer.add_name(f"tiny {tiny.family}")
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    rope = c.rope_parameters["full_attention"] if tiny.arch == "gemma3" else c.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "attention_factor" in rope:  # here it multiplies the paper's, in transformers it replaces it
        writer.add_rope_scaling_attn_factors(rope["attention_factor"] / (0.1 * math.log(rope["factor"]) + 1))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if tiny.arch == "gemma3":
        writer.add_attention_scale(c.query_pre_attn_scalar**-0.5)
        if c.final_logit_softcapping:
            writer.add_final_logit_softcapping(c.final_logit_softcapping)
    if tiny.arch == "gemma3" or c.model_type == "mistral":
        writer.add_sliding_window(c.sliding_window)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    tok = tokenizer()
    vocab = tok.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in (BOS, EOS) else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(_merges(tok))
    writer.add_bos_token_id(vocab[BOS])
    writer.add_eos_token_id(vocab[EOS])
    writer.add_add_bos_token(False)


def _merges(tok: Tokenizer) -> list[str]:
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in json.loads(tok.to_str())["model"]["merges"]]
