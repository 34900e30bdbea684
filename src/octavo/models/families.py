"""Which architectures Octavo runs, and the description of a model as a :class:`ModelSpec`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from octavo.errors import ModelError
from octavo.models import gemma, llama, mistral, qwen
from octavo.models.base import Source
from octavo.models.fields import Fields
from octavo.models.spec import ModelSpec

Reader = Callable[[Source], ModelSpec]

# transformers' model_type -> (its architecture, reader)
CONFIG_READERS: dict[str, tuple[str, Reader]] = {
    "llama": ("LlamaForCausalLM", llama.from_config),
    "mistral": ("MistralForCausalLM", mistral.from_config),
    "qwen2": ("Qwen2ForCausalLM", qwen.qwen2_from_config),
    "qwen3": ("Qwen3ForCausalLM", qwen.qwen3_from_config),
    "gemma3_text": ("Gemma3ForCausalLM", gemma.from_config),
    "gemma3": ("Gemma3ForConditionalGeneration", gemma.from_config),
}

GGUF_READERS: dict[str, Reader] = {
    "llama": llama.from_gguf,
    "qwen2": qwen.qwen2_from_gguf,
    "qwen3": qwen.qwen3_from_gguf,
    "gemma3": gemma.from_gguf,
}

INTERLEAVED = frozenset({"llama"})  # GGUF architectures whose query and key rows are in interleaved rotary order
NORM_LESS_ONE = frozenset({"gemma3"})  # families whose norm weights transformers stores less one


def spec_from_config(
    source: str, config: dict[str, Any], tensors: Collection[str], context: int | None = None
) -> ModelSpec:
    """The spec that a transformers ``config.json`` describes.

    ``context`` is the context length to serve, in tokens; ``None`` is the model's own.
    """
    fields = Fields(source, config)
    kind = fields.text("model_type")
    if kind not in CONFIG_READERS:
        raise _unknown(source, f"model_type {kind!r}", CONFIG_READERS)
    expected, read = CONFIG_READERS[kind]
    architectures = fields.items("architectures")
    if architectures and expected not in architectures:
        raise _unknown(source, f"architecture {architectures[0]!r:.80}", [a for a, _ in CONFIG_READERS.values()])
    if fields.has("text_config"):  # a multimodal model: its language part alone
        inner = dict(fields.inner("text_config").values)
        if config.get("tie_word_embeddings") is not None:
            inner["tie_word_embeddings"] = config["tie_word_embeddings"]
        fields = Fields(f"{source}: text_config", inner)
    return read(Source(fields, tensors, context))


def spec_from_gguf(source: str, meta: Any, tensors: Collection[str], context: int | None = None) -> ModelSpec:
    """The spec that GGUF metadata describes; its ``vocab`` is 0, for the embedding's rows decide that."""
    arch = Fields(source, meta).text("general.architecture")
    if arch not in GGUF_READERS:
        raise _unknown(source, f"architecture {arch!r:.80}", GGUF_READERS)
    return GGUF_READERS[arch](Source(Fields(source, meta, f"{arch}."), tensors, context))


def _unknown(source: str, what: str, known: Collection[str]) -> ModelError:
    return ModelError(f"{source}: {what} is not one that Octavo runs ({', '.join(known)})")
