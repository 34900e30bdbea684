"""The prefix cache's index: chains of full blocks, found by hash and confirmed by tokens.

Each full block of a sequence has a key, H(key of the block before, its tokens), that starts from the salt; so a key
stands for a whole prefix at one depth.  A key leads to a :class:`Node`, and the node is believed only if its parent is
the very node that the block before led to and its tokens are equal: a collision is a miss, never a wrong hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import blake2b

Hash = Callable[[bytes, bytes], bytes]

REMEMBERED = 65536  # keys of given-up blocks


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """128-bit BLAKE2b over the parent's key and the block's tokens (int32, native order)."""
    return blake2b(tokens, digest_size=16, key=parent).digest()


class Node:
    """One full block of some prefix: where its K and V lie, for each layer group that still has them.

    A root stands for the empty prefix of a salt, which it holds as its ``tokens``.
    """

    __slots__ = ("key", "parent", "tokens", "blocks", "hosts", "children", "pins")

    def __init__(self, key: bytes, parent: Node | None, tokens: bytes, groups: int) -> None:
        self.key = key
        self.parent = parent
        self.tokens = tokens
        self.blocks: list[int] = [-1] * groups
        self.hosts: list[int] = [-1] * groups  # slots of the host tier
        self.children = 0
        self.pins = 0  # live sequences whose next block would hang on this one

    def needed(self) -> bool:
        return bool(self.children or self.pins or max(self.blocks) >= 0 or max(self.hosts) >= 0)


class PrefixIndex:
    """Owns: content key to block.

    Promises: a node, the root of a salt included, lives while a block, a child or a live sequence needs it; each block
    is named by one node at most and knows it (``pool.content``).
    """

    def __init__(self, groups: int, hash: Hash = chain_hash) -> None:
        self.groups = groups
        self._hash = hash
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, Node] = {}
        self.gone: dict[bytes, None] = {}  # keys of nodes that were given up, the latest ones, to explain misses

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node: object) -> bool:
        if not isinstance(node, Node):
            return False
        known = self._nodes.get(node.key) if node.parent is not None else self._roots.get(node.tokens)
        return known is node

    def holds(self, key: bytes) -> bool:
        return key in self._nodes

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def roots(self) -> list[Node]:
        return list(self._roots.values())

    @staticmethod
    def root_key(salt: bytes) -> bytes:
        """Where the keys of a salt start; the prefix keeps it from being another kind of key with the same text."""
        return blake2b(b"salt:" + salt, digest_size=16).digest()

    def root(self, salt: bytes) -> Node:
        """The start of every chain under a salt, to be pinned.  Salts are kept apart by the object, not by hash."""
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = Node(self.root_key(salt), None, salt, self.groups)
        return node

    def known_root(self, salt: bytes) -> Node | None:
        """The same if anything was ever published under the salt and is still needed."""
        return self._roots.get(salt)

    def key(self, parent: bytes, tokens: array[int]) -> bytes:
        return self._hash(parent, tokens.tobytes())

    def find(self, parent: Node, key: bytes, tokens: array[int]) -> Node | None:
        node = self._nodes.get(key)
        if node is None or node.parent is not parent or node.tokens != tokens.tobytes():
            return None
        return node

    def add(self, parent: Node, key: bytes, tokens: array[int]) -> Node | None:
        """The node of this block, new or found; None if another prefix has the same key."""
        return self.add_bytes(parent, key, tokens.tobytes())

    def add_bytes(self, parent: Node, key: bytes, tokens: bytes) -> Node | None:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, tokens, self.groups)
            parent.children += 1
            self.gone.pop(key, None)
            return node
        return node if node.parent is parent and node.tokens == tokens else None

    def prune(self, node: Node | None) -> None:
        """Remove a node that nothing needs any more, and its ancestors if it was the last to need them."""
        while node is not None and not node.needed():
            parent = node.parent
            if parent is None:
                del self._roots[node.tokens]
            else:
                del self._nodes[node.key]
                self._note_gone(node.key)
                parent.children -= 1
            node = parent

    def _note_gone(self, key: bytes) -> None:
        self.gone[key] = None
        if len(self.gone) > REMEMBERED:
            del self.gone[next(iter(self.gone))]
