"""Why no more of a prompt was found in the prefix cache."""

from __future__ import annotations

from octavo.core.sequence import Sequence
from octavo.paging.kv import KV

MOST = 4096  # nodes that are looked through for the first token that differs


def explain(kv: KV, sequence: Sequence, hit: int) -> str:
    """For a prompt of which ``hit`` tokens were found: "" if that is all that could be, else

    - "off": the cache is off, or the prompt's own log-probabilities are wanted, which cached tokens do not have
    - "evicted": the next block was cached, and given up since
    - "salt": the prompt's first block is cached under another salt
    - "differs at token N": what is cached goes another way from token N on, or ends there
    """
    size = kv.block_size
    depth = hit // size
    if (depth + 1) * size >= len(sequence.tokens):
        return ""
    if not kv.prefix_cache or sequence.scoring:
        return "off"
    keys = kv.keys(sequence, depth + 1)
    if keys[depth + 1] in kv.index.gone:
        return "evicted"
    tokens = sequence.tokens[depth * size : (depth + 1) * size]
    if depth == 0 and any(
        root.tokens != sequence.salt and kv.index.holds(kv.index.key(root.key, tokens)) for root in kv.index.roots()
    ):
        return "salt"
    return f"differs at token {hit + _common(kv, keys[depth], tokens.tobytes())}"


def _common(kv: KV, parent: bytes, tokens: bytes) -> int:
    """How many of the next block's tokens some cached block after the same prefix begins with."""
    best = 0
    for number, node in enumerate(kv.index.nodes()):
        if number >= MOST:
            break
        if node.parent is not None and node.parent.key == parent:
            same = next(
                (i for i in range(0, len(tokens), 4) if node.tokens[i : i + 4] != tokens[i : i + 4]), len(tokens)
            )
            best = max(best, same // 4)
    return best
