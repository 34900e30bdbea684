"""How far a rounding takes the model on real text: mean KL divergence a token, in nats.

    python bench/kl.py [--tokens 2048] [--context 512] [MODEL ...]
    python bench/kl.py --kv int8 [...]

The text is CPython's own help (``pydoc_data.topics``), read in pieces of ``--context`` tokens that each begin as the
model's prompts do (with BOS where it has one).  The fast path is compared with the exact one; both keep K and V in
float32, so that only the rounding of activations differs.  With ``--kv``, K and V of that type are compared with
float16, both on the exact path.  Exits with 1 if a model is beyond the bound.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from collections.abc import Iterator

import numpy as np

from octavo.core.layout import KVLayout
from octavo.kernels.backend import Batch, Program
from octavo.kernels.cpu import CpuBackend
from octavo.kernels.reference import STORAGE
from octavo.loading import Checkpoint, open_model
from octavo.models import decoder
from octavo.text.tokenizer import Tokenizer

MODELS = ("smollm2-135m", "gemma3-270m")
BOUND = 3e-3
KV_BOUND = 1e-3
BLOCK = 16
PICKED = 64  # rows of logits that are held at a time


def pieces(checkpoint: Checkpoint, count: int, context: int) -> list[list[int]]:
    """The first ``count`` tokens of the help topics, in alphabetical order, in pieces of ``context``."""
    if checkpoint.metadata is not None:
        tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    else:
        tokenizer = Tokenizer.from_folder(checkpoint.path)
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer.encode(text[: 8 * count], add_special=False)[:count]
    begin = tokenizer.encode("") if tokenizer.add_bos else []
    inside = context - len(begin)
    return [begin + tokens[at : at + inside] for at in range(0, len(tokens), inside)]


def program(checkpoint: Checkpoint, compute: str, threads: int | None, layout: KVLayout) -> Program:
    backend = CpuBackend(threads=threads, compute=compute)
    weights = decoder.load_weights(backend, checkpoint)
    return decoder.compile_model(backend, checkpoint.spec, weights, layout)


def logprobs(run: Program, layout: KVLayout, tokens: list[int]) -> Iterator[np.ndarray]:
    """float64 log-probabilities [up to PICKED, V] after each token, a chunk at a time."""
    count = -(-len(tokens) // BLOCK)
    groups = len(layout.groups)
    blocks = np.zeros((groups * count, layout.block_bytes), dtype=np.uint8)
    tables = [np.arange(g * count, (g + 1) * count, dtype=np.int32) for g in range(groups)]
    offsets = np.array([0, count], dtype=np.int32)
    for at in range(0, len(tokens), PICKED):
        chunk = np.array(tokens[at : at + PICKED], dtype=np.int32)
        n = len(chunk)
        steps = np.arange(n, dtype=np.int32)
        starts = np.array([0, n], dtype=np.int32)
        batch = Batch(chunk, steps + np.int32(at), starts, [(ids, offsets) for ids in tables], steps)
        x = run.run(batch, blocks).astype(np.float64)
        x -= x.max(axis=1, keepdims=True)
        x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
        yield x


def divergences(checkpoint: Checkpoint, texts: list[list[int]], threads: int | None, kv: str) -> tuple[float, float]:
    """Mean KL(right || rounded) a token, and the share of tokens whose most likely successor is the same."""
    ways = [("exact", "float16"), ("exact", kv)] if kv else [("exact", "float32"), ("fast", "float32")]
    layouts = [decoder.kv_layout(checkpoint.spec, BLOCK, dtype) for _, dtype in ways]
    right, rounded = (
        program(checkpoint, compute, threads, layout) for (compute, _), layout in zip(ways, layouts, strict=True)
    )
    total, same, count = 0.0, 0, 0
    for text in texts:
        pairs = zip(logprobs(right, layouts[0], text), logprobs(rounded, layouts[1], text), strict=True)
        for p, q in pairs:
            total += float((np.exp(p) * (p - q)).sum())
            same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
            count += len(p)
    return total / count, same / count


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"names or paths (default: {' '.join(MODELS)})")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--kv", default="", choices=list(STORAGE), metavar="DTYPE", help="K and V, against float16")
    args = parser.parse_args()
    bound = KV_BOUND if args.kv else BOUND
    worst = 0.0
    for name in args.models or MODELS:
        checkpoint = open_model(name)
        texts = pieces(checkpoint, args.tokens, args.context)
        mean, same = divergences(checkpoint, texts, args.threads, args.kv)
        worst = max(worst, mean)
        print(f"{name}: {mean:.2e} nats a token (bound {bound:.0e}), same best token {same:.1%}, {args.tokens} tokens")
    return int(not worst <= bound)


if __name__ == "__main__":
    sys.exit(main())
