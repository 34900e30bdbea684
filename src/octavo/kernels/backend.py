"""The operators that a backend offers, as protocols: the contract between the decoder and the kernels.

A model is written once against :class:`Ops`.  ``Backend.program`` hands an ``Ops`` to the decoder; the reference
backend replays the decoder with NumPy on every step, the CPU backend records it once and replays the record in one
native call.  Values that flow between operators are opaque to the decoder.

Each output row of each operator depends on that row's inputs alone: not on the number of rows, on their order, on
neighbours, or on threads (docs/determinism.md says how).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.core.layout import KVLayout
from octavo.core.plan import LargestStep

Value = Any  # a backend's activation, [rows, width]; opaque to the decoder
Weight = Any  # a packed matrix
Vector = Any  # a packed float32 parameter vector
Blocks = Any  # a tier's blocks, uint8 [count, block_bytes], where the backend keeps them; has a length
Logits = Any  # float32 [R, V], where the backend keeps them; has a shape and can be sliced by rows


@dataclass
class Batch:
    """One step's inputs as arrays; a *row* is a run of consecutive tokens of one sequence.

    M tokens in S rows; R logits rows are wanted.

    - ``tokens``    int32 [M]: token ids; to a backend that ``recalls``, -(1 + k) is what draw k of its latest call of
      ``draw`` or ``sample`` gave, or 0 where that gave -1
    - ``positions`` int32 [M]: absolute position of each token in its sequence
    - ``starts``    int32 [S+1]: row s is tokens ``starts[s] : starts[s+1]``; positions in a row are consecutive
    - ``tables``    per layer group, (ids int32 [T_g], offsets int32 [S+1]): logical block b of row s is
      ``ids[offsets[s] + b]``; freed head blocks of a windowed group hold -1 and are never read
    - ``logits_at`` int32 [R]: indices into the M tokens, ascending
    """

    tokens: np.ndarray
    positions: np.ndarray
    starts: np.ndarray
    tables: list[tuple[np.ndarray, np.ndarray]]
    logits_at: np.ndarray


class Ops(Protocol):
    """Operators as the decoder calls them.  M, R as in :class:`Batch`.

    Activations are float32, but for what a backend rounds where only a product with 16-bit weights reads it.
    """

    def embed(self, table: Weight, scale: float = 1.0) -> Value:
        """[M, D]: rows ``tokens`` of the (possibly quantised) table, dequantised to float32, times ``scale``."""

    def norm(self, x: Value, weight: Vector, eps: float, residual: Value | None = None) -> Value:
        """RMS norm: x / sqrt(mean(x^2) + eps) * weight (+ residual), per row."""

    def linear(
        self, x: Value, weights: Sequence[Weight], bias: Vector | None = None, residual: Value | None = None
    ) -> Value:
        """[M, sum N_i]: x . concat(W_i)^T (+ bias) (+ residual)."""

    def rope_write(
        self,
        qkv: Value,
        layer: int,
        inv_freq: Vector,
        scale: float,
        q_norm: Vector | None = None,
        k_norm: Vector | None = None,
        eps: float = 0.0,
    ) -> Value:
        """[M, heads*head_dim]: queries, normed per head if asked and rotated.

        ``qkv`` is [M, (heads + 2 kv_heads) * head_dim].  Keys get the same norm and rotation and are written, with
        the values, as ``layer``'s K and V at each token's slot, rounded to the KV dtype (round to nearest even).
        For int8 the largest magnitude of each head's values, and of every 32 dimensions of its keys, over 127 is
        rounded to bfloat16 and is then the unit; one that is not finite makes the unit NaN.
        """

    def attend(self, q: Value, layer: int, scale: float, window: int | None, softcap: float = 0.0) -> Value:
        """[M, heads*head_dim]: causal attention of each token over its own sequence's slots 0..position.

        With a window W only positions > position - W take part.  ``softcap`` c: scores become c*tanh(score/c).
        """

    def gate(self, gate_up: Value, activation: str) -> Value:
        """[M, F] from [M, 2F]: act(first half) * second half; ``activation`` is "silu" or "gelu_tanh"."""

    def pick(self, x: Value) -> Value:
        """[R, D]: rows ``logits_at`` of x."""

    def output(self, logits: Value, softcap: float = 0.0) -> None:
        """Declares the program's result, [R, V] float32, with an optional soft cap."""


class Program(Protocol):
    def run(self, batch: Batch, blocks: Blocks) -> Logits:
        """Runs one step over the blocks of the device tier, those of the backend's own ``store``.

        The result may be a view of a buffer that the next run overwrites.
        """

    def reserve(self, most: LargestStep) -> None:
        """Take the memory that the largest step needs now, if it is not taken as steps come."""

    def prepare(self, blocks: Blocks, most: LargestStep, progress: Callable[[int, int], None] | None = None) -> None:
        """Whatever makes steps over these blocks faster, those above all in which each sequence has one token;
        ``progress`` hears (done, of)."""


@dataclass
class SampleBatch:
    """S samples drawn from R logits rows (forked branches draw several from one row).

    Per sample: ``row`` int32 (logits row), ``temperature`` float32 (under 1e-5: greedy), ``top_k`` int32 (0: all),
    ``top_p`` and ``min_p`` float32, ``repetition``/``presence``/``frequency`` float32, ``seed`` uint64, ``branch``
    and ``position`` int32, ``logprobs`` int32 (-1: none; k: the sampled token's and the k best).

    Ragged, as (offsets int32 [S+1], ids int32, values):
    - ``bias``: float32 added to logits; -inf bans a token
    - ``history``: int32 count of the token in the output so far; 0 for a token that is only in the prompt

    Masks, where there are any: ``mask`` int32 [S] says which row of ``masks`` uint32 [K, W] holds for a sample, -1 for
    none; token t may be drawn only if bit t % 32 of word t // 32 is set.  W * 32 is at least the vocabulary.

    Order: raw log-probabilities; mask; bias; repetition (tokens in the history: divided if positive, else multiplied),
    then frequency * count and presence * (count > 0) subtracted; temperature; top-k; top-p; min-p; draw.

    Ties keep the lower id, top-k keeps exactly k, and top-p keeps the shortest run of the best whose probability
    (after top-k) reaches it.  The draw: u = (first 64 bits of Philox4x32-10, key = seed, low word first, counter =
    (position, branch, 0, 0), first output word high) >> 11, times 2^-53; the token is the first in order of id whose
    running sum of kept weights exp((l - max) / temperature), in float64, exceeds u times their total.
    """

    row: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    repetition: np.ndarray
    presence: np.ndarray
    frequency: np.ndarray
    seed: np.ndarray
    branch: np.ndarray
    position: np.ndarray
    logprobs: np.ndarray
    bias: tuple[np.ndarray, np.ndarray, np.ndarray]
    history: tuple[np.ndarray, np.ndarray, np.ndarray]
    mask: np.ndarray | None = None
    masks: np.ndarray | None = None


@dataclass
class Sampled:
    """Results of a sample or score call; arrays over samples.

    ``token`` int32 (-1: the row's logits hold a NaN or +inf, or everything is banned); ``logprob`` float32 and
    ``rank`` int32 (1 = most likely, ties by lower id) of that token under the raw logits, filled where asked;
    ``top_ids`` int32 [S, k] and ``top_logprobs`` float32 [S, k] of the k best (k = the largest asked; ties by lower
    id).  Where nothing was asked, or the token is -1: logprob 0, rank 0, ids -1, log-probabilities -inf.
    """

    token: np.ndarray
    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


Later = Callable[[], "Sampled"]


class Backend(Protocol):
    """A set of kernels.  Owns nothing but its threads and workspace; the same inputs give the same bytes.

    ``asynchronous``: calls only launch kernels, which run in order beside the CPU.  ``recalls``: the tokens drawn last
    stay where the kernels find them, see :class:`Batch`.
    """

    name: str
    asynchronous: bool
    recalls: bool

    @property
    def build(self) -> str:
        """A hash of what computes: two backends of one build and name give the same bytes."""

    def matrix(
        self, type: str, data: np.ndarray, rows: int, cols: int, read: Callable[[int], None] | None = None
    ) -> Weight:
        """Packs a (rows, cols) weight of a GGUF/safetensors type (see loading.tensor.TYPES) from its raw bytes.

        ``read`` may be told now and then how many of the bytes, from the first on, are needed no more.
        """

    def vector(self, data: np.ndarray) -> Vector:
        """Packs a 1-D float32 array."""

    def program(self, build: Callable[[Ops], None], layout: KVLayout, heads: int) -> Program: ...

    def store(self, count: int, nbytes: int, tier: int) -> Blocks:
        """Room for ``count`` blocks of ``nbytes`` bytes in a tier (``core.plan.DEVICE`` or ``HOST``), empty yet."""

    def block(self, blocks: Blocks, slot: int) -> np.ndarray:
        """One block, uint8 [nbytes]: of a host store its very memory, of a device store it may be a copy, to be read.

        All moves so far that touch it have ended when it returns.
        """

    def move(self, source: Blocks, target: Blocks, pairs: np.ndarray) -> None:
        """Copies blocks, in order: target[pairs[i,1]] = source[pairs[i,0]], before what runs next."""

    def sample(self, logits: Logits, batch: SampleBatch) -> Sampled: ...

    def draw(self, logits: Logits, batch: SampleBatch) -> Later:
        """The same without waiting: what is returned waits, and gives the results; ``logits`` may change meanwhile."""

    def lost(self) -> str | None:
        """To be asked after an error: why the device will compute nothing any more; None if it will."""

    def score(self, logits: Logits, targets: np.ndarray, top: int) -> Sampled:
        """Log-probability and rank of ``targets`` int32 [R] under ``logits`` [R, V], and the ``top`` best."""


class Synchronous:
    """For a backend whose calls have ended when they return."""

    asynchronous = recalls = False

    def draw(self: Backend, logits: Logits, batch: SampleBatch) -> Later:
        sampled = self.sample(logits, batch)
        return lambda: sampled

    def lost(self) -> str | None:
        return None
