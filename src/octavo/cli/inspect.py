"""``octavo inspect``: what a model is and what fits, without loading its weights."""

from __future__ import annotations

from collections import Counter
from typing import Any

from octavo.cli.console import counted, rows
from octavo.config import EngineConfig, format_size
from octavo.core.layout import KVLayout
from octavo.engine.gpu_memory import GpuMemory, plan_gpu_memory
from octavo.engine.load import context_of, layout_of
from octavo.engine.memory import MemoryPlan, plan_memory
from octavo.kernels.triton.device import choose_device, usable_gpus
from octavo.loading import Checkpoint, open_model
from octavo.loading.gguf import open_splits
from octavo.loading.safetensors import open_shards
from octavo.models.spec import ModelSpec


def stored_types(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Type of the tensors in the model's files -> (how many, bytes)."""
    files: Any = open_splits(checkpoint.path) if checkpoint.format == "gguf" else open_shards(checkpoint.path)
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for entry in (entry for file in files for entry in file.tensors.values()):
        count[entry.type] += 1
        size[entry.type] += entry.nbytes
    return {kind: (count[kind], size[kind]) for kind, _ in size.most_common()}


def run(model: str, length: int | None, engine: dict[str, Any]) -> int:
    config = EngineConfig.of(**engine)
    checkpoint = open_model(model, config.max_context)
    context = context_of(checkpoint, config)
    layout = layout_of(checkpoint, config)
    plan = _plan(config, layout, context, checkpoint.nbytes)
    rows(_model(checkpoint))
    print()
    rows(_memory(plan, checkpoint, config))
    print()
    rows(_fitting(plan, length))
    return 0


def _plan(config: EngineConfig, layout: KVLayout, context: int, weights: int) -> MemoryPlan:
    """On a GPU without what a step takes, which only running one tells."""
    if choose_device(config.device, config.backend) == "cpu":
        return plan_memory(config, layout, context, weights)
    gpu = usable_gpus()[0]
    name = f"GPU {gpu.name}, before a step's working memory"
    others = gpu.total - (gpu.total if gpu.free is None else gpu.free)
    return plan_gpu_memory(config, layout, context, GpuMemory(name, gpu.total, others, weights))


def _model(checkpoint: Checkpoint) -> list[tuple[str, object]]:
    spec = checkpoint.spec
    types = [
        f"{kind}: {counted(count, 'tensor')}, {format_size(size)}"
        for kind, (count, size) in stored_types(checkpoint).items()
    ]
    return [
        ("model", checkpoint.name or checkpoint.path.name),
        ("file", checkpoint.path),
        ("format", checkpoint.format),
        ("licence", checkpoint.license or "not stated"),
        ("family", spec.family),
        ("layers", _layers(spec)),
        ("hidden", f"{spec.hidden:,}, inside the MLP {spec.intermediate:,}"),
        ("heads", f"{spec.heads} query, {spec.kv_heads} key-value, {spec.head_dim} wide"),
        ("vocabulary", f"{spec.vocab:,}" + (", head tied to the embedding" if spec.tied else "")),
        ("context", counted(spec.max_context, "token")),
        ("weights", "\n".join([format_size(checkpoint.nbytes), *types])),
    ]


def _layers(spec: ModelSpec) -> str:
    windows = Counter(layer.window for layer in spec.layers)
    if set(windows) == {None}:
        return f"{len(spec.layers)}, full attention"
    kinds = [f"{n} with {'full attention' if w is None else f'a window of {w:,} tokens'}" for w, n in windows.items()]
    return f"{len(spec.layers)}: {', '.join(kinds)}"


def _memory(plan: MemoryPlan, checkpoint: Checkpoint, config: EngineConfig) -> list[tuple[str, object]]:
    layout = plan.layout
    return [
        ("KV cache", f"{format_size(plan.nbytes)}, set by {plan.why}" if _set(config) else _chosen(plan)),
        ("KV type", layout.dtype),
        ("blocks", f"{plan.blocks:,} of {layout.block_size} tokens, {format_size(layout.block_bytes)} each"),
        ("layer groups", _groups(layout)),
        ("bytes a token", f"{layout.bytes_per_token:,.0f} ({format_size(layout.bytes_per_token)})"),
        ("tokens that fit", f"{plan.blocks * layout.block_size // len(layout.groups):,}{_slid(layout)}"),
        ("weights + KV", format_size(checkpoint.nbytes + plan.nbytes)),
    ]


def _slid(layout: KVLayout) -> str:
    return ", and more once windows have slid" if any(w is not None for w in layout.windows) else ""


def _set(config: EngineConfig) -> bool:
    return config.kv_blocks is not None or config.kv_memory is not None


def _chosen(plan: MemoryPlan) -> str:
    return f"{format_size(plan.nbytes)}, chosen: {plan.why}"


def _groups(layout: KVLayout) -> str:
    parts = [
        f"{len(group.layers)} layers, {'full' if group.window is None else f'window {group.window:,}'}"
        for group in layout.groups
    ]
    same = Counter(parts)
    return "; ".join(f"{n} of {part}" for part, n in same.items())


def _fitting(plan: MemoryPlan, length: int | None) -> list[tuple[str, object]]:
    bound = "the model's context" if plan.context <= plan.longest else "what the KV cache holds"
    found: list[tuple[str, object]] = [("longest request", f"{counted(plan.limit, 'token')} ({bound})")]
    lengths = [length] if length is not None else [n for n in (512, 2048, 8192) if n <= plan.limit]
    for tokens in lengths:
        fits = counted(plan.fitting(tokens), "request") if tokens <= plan.limit else "none: beyond the longest request"
        found.append((f"of {tokens:,} tokens", f"{fits} at a time" if tokens <= plan.limit else fits))
    return found
