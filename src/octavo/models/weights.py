"""The tensors that a model needs: Octavo's names for them, their shapes, and what transformers and GGUF call them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octavo.models.spec import ModelSpec


@dataclass(frozen=True)
class Needed:
    """One tensor of a model: canonical name, row-major shape, and its name in either format.

    ``vector`` marks norms and biases, which come as float32; ``norm`` those that HF's Gemma stores less one;
    ``rotary`` heads whose rows GGUF's Llama has in interleaved rotary order (0: none).
    """

    name: str
    shape: tuple[int, ...]
    hf: str
    gguf: str
    norm: bool = False
    rotary: int = 0

    @property
    def vector(self) -> bool:
        return len(self.shape) == 1


def needed(spec: ModelSpec, embed_rows: int) -> Iterator[Needed]:
    """All tensors of a model, in the order of the forward pass; HF names are relative to the decoder's own prefix."""
    yield Needed("embed", (embed_rows, spec.hidden), "embed_tokens.weight", "token_embd.weight")
    for i in range(len(spec.layers)):
        yield from _attention(spec, f"layers.{i}.", f"layers.{i}.", f"blk.{i}.")
        yield from _mlp(spec, f"layers.{i}.", f"layers.{i}.", f"blk.{i}.")
    yield Needed("final_norm", (spec.hidden,), "norm.weight", "output_norm.weight", norm=True)
    if not spec.tied:
        yield Needed("head", (embed_rows, spec.hidden), "lm_head.weight", "output.weight")


def _attention(spec: ModelSpec, at: str, hf: str, gguf: str) -> Iterator[Needed]:
    width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    hidden = (spec.hidden,)
    yield Needed(f"{at}attn_norm", hidden, f"{hf}input_layernorm.weight", f"{gguf}attn_norm.weight", norm=True)
    for part, rows, rotary in (("q", width, spec.heads), ("k", kv_width, spec.kv_heads), ("v", kv_width, 0)):
        names = f"{hf}self_attn.{part}_proj.", f"{gguf}attn_{part}."
        yield Needed(f"{at}{part}", (rows, spec.hidden), names[0] + "weight", names[1] + "weight", rotary=rotary)
        if spec.qkv_bias:
            yield Needed(f"{at}{part}_bias", (rows,), names[0] + "bias", names[1] + "bias", rotary=rotary)
    if spec.qk_norm:
        for part in ("q", "k"):
            names = f"{hf}self_attn.{part}_norm.weight", f"{gguf}attn_{part}_norm.weight"
            yield Needed(f"{at}{part}_norm", (spec.head_dim,), *names, norm=True)
    names = f"{hf}self_attn.o_proj.", f"{gguf}attn_output."
    yield Needed(f"{at}o", (spec.hidden, width), names[0] + "weight", names[1] + "weight")
    if spec.o_bias:
        yield Needed(f"{at}o_bias", hidden, names[0] + "bias", names[1] + "bias")
    if spec.post_norms:
        names = f"{hf}post_attention_layernorm.weight", f"{gguf}post_attention_norm.weight"
        yield Needed(f"{at}attn_post_norm", hidden, *names, norm=True)


def _mlp(spec: ModelSpec, at: str, hf: str, gguf: str) -> Iterator[Needed]:
    hidden = (spec.hidden,)
    # Where there are post-norms, transformers' "post_attention" names the one before the residual sum.
    before = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    yield Needed(f"{at}mlp_norm", hidden, f"{hf}{before}.weight", f"{gguf}ffn_norm.weight", norm=True)
    for part in ("gate", "up"):
        names = f"{hf}mlp.{part}_proj.weight", f"{gguf}ffn_{part}.weight"
        yield Needed(f"{at}{part}", (spec.intermediate, spec.hidden), *names)
    names = f"{hf}mlp.down_proj.weight", f"{gguf}ffn_down.weight"
    yield Needed(f"{at}down", (spec.hidden, spec.intermediate), *names)
    if spec.post_norms:
        names = f"{hf}post_feedforward_layernorm.weight", f"{gguf}post_ffw_norm.weight"
        yield Needed(f"{at}mlp_post_norm", hidden, *names, norm=True)
