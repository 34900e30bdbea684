"""The NumPy backend against gguf, torch and plain formulas: it is what other backends are measured by."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from drive import Drive
from octavo.core.layout import KVLayout, LayerGroup
from octavo.errors import ModelError
from octavo.kernels import dequant
from octavo.kernels.backend import Batch, Ops, SampleBatch
from octavo.kernels.dequant import bfloat16_to_float32
from octavo.kernels.reference import ReferenceBackend, ReferenceOps, quantise
from octavo.kernels.reference_sample import log_softmax, philox4x32, uniform
from octavo.loading.tensor import TYPES

RNG = np.random.default_rng


# ---- weight types -----------------------------------------------------------------------------------------------


def test_types_are_those_of_the_loader() -> None:
    assert {t: (dequant.block_weights(t), b.itemsize) for t, b in dequant.BLOCKS.items()} == TYPES


@pytest.mark.parametrize("type", TYPES)
def test_dequantize_any_bytes_as_gguf_does_bit_for_bit(type: str) -> None:
    per, size = TYPES[type]
    raw = RNG(1).integers(0, 256, (64, 512 // per * size), dtype=np.uint8)
    ours = dequant.dequantize(type, raw.reshape(-1), 64, 512)
    with np.errstate(all="ignore"):
        theirs = np.ascontiguousarray(gguf.quants.dequantize(raw, GGMLQuantizationType[type]), dtype=np.float32)
    assert ours.dtype == np.float32
    assert np.array_equal(ours.view(np.uint32), theirs.reshape(64, 512).view(np.uint32))


@pytest.mark.parametrize("type", [t for t in TYPES if not t.endswith("_K")])
def test_dequantize_undoes_gguf_quantize(type: str) -> None:
    values = RNG(2).normal(size=(16, 96)).astype(np.float32)
    raw = gguf.quants.quantize(values, GGMLQuantizationType[type]).view(np.uint8)
    bits = {"F32": 24, "F16": 11, "BF16": 8, "Q8_0": 8}.get(type, int(type[1]) if type[0] == "Q" else 0)
    error = np.abs(dequant.dequantize(type, raw, 16, 96) - values).max()
    assert error <= np.abs(values).max() * 2.0 ** (1 - bits)


def test_dequantize_refuses_what_does_not_fit() -> None:
    with pytest.raises(ModelError, match="Q2_K"):
        dequant.dequantize("Q2_K", np.zeros(84, np.uint8), 1, 256)
    with pytest.raises(ModelError, match="Q8_0 weight of 2 x 32"):
        dequant.dequantize("Q8_0", np.zeros(34, np.uint8), 2, 32)
    with pytest.raises(ModelError, match="Q8_0 weight of 1 x 33"):
        dequant.dequantize("Q8_0", np.zeros(34, np.uint8), 1, 33)


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = RNG(3).integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
    ties = (np.arange(2_000, dtype=np.uint32) + 0x3F80) << 16 | 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)
    ours = dequant.bfloat16_to_float32(dequant.float32_to_bfloat16(values))
    theirs = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert np.isnan(values).any()


# ---- operators ----------------------------------------------------------------------------------------------------

LAYOUT = KVLayout(4, 2, 8, "float32", (LayerGroup(None, (0, 2)), LayerGroup(6, (1,))))


def ops_for(dtype: str = "float64", layout: KVLayout = LAYOUT, rows: int = 3, heads: int = 4) -> ReferenceOps:
    """Operators over one sequence of ``rows`` tokens from position 0 on, in blocks 1, 2, ..."""
    ids = np.arange(1, 1 + -(-rows // layout.block_size), dtype=np.int32)
    offsets = np.array([0, len(ids)], dtype=np.int32)
    batch = Batch(
        tokens=np.arange(rows, dtype=np.int32),
        positions=np.arange(rows, dtype=np.int32),
        starts=np.array([0, rows], dtype=np.int32),
        tables=[(ids, offsets) for _ in layout.groups],
        logits_at=np.array([0, rows - 1], dtype=np.int32),
    )
    blocks = np.full((len(ids) + 1, layout.block_bytes), 0xFF, dtype=np.uint8)
    return ReferenceOps(layout, heads, np.dtype(dtype), batch, blocks)


def test_operators_are_their_formulas() -> None:
    rng, ops = RNG(4), ops_for()
    x, residual = rng.normal(size=(3, 64)), rng.normal(size=(3, 64))
    weight = rng.normal(size=64)
    t = torch.from_numpy
    norm = torch.nn.functional.rms_norm(t(x), (64,), t(weight), 1e-3)
    assert np.allclose(ops.norm(x, weight, 1e-3), norm, atol=1e-14)
    assert np.allclose(ops.norm(x, weight, 1e-3, residual), norm + t(residual), atol=1e-14)
    a, b = rng.normal(size=(24, 64)), rng.normal(size=(40, 64))
    bias = rng.normal(size=64)
    product = x @ np.concatenate([a, b]).T
    assert np.allclose(ops.linear(x, [a, b]), product, atol=1e-13)
    assert np.allclose(ops.linear(x, [a, b], bias, residual), product + bias + residual, atol=1e-13)
    gate, up = t(x[:, :32]), t(x[:, 32:])
    assert np.allclose(ops.gate(x, "silu"), torch.nn.functional.silu(gate) * up, atol=1e-14)
    assert np.allclose(ops.gate(x, "gelu_tanh"), torch.nn.functional.gelu(gate, approximate="tanh") * up, atol=1e-7)
    assert np.array_equal(ops.embed(a, 3.0), a[:3] * 3)
    assert np.array_equal(ops.pick(x), x[[0, 2]])
    ops.output(x, 2.0)
    assert np.allclose(ops.result, 2 * np.tanh(x / 2), atol=1e-6) and ops.result.dtype == np.float32


@pytest.mark.parametrize("rotary", [8, 4])
def test_rotary_turns_pairs_and_leaves_the_rest(rotary: int) -> None:
    rng, ops = RNG(5), ops_for(rows=5)
    qkv = rng.normal(size=(5, (4 + 2 * 2) * 8))
    inv_freq = np.array([1.0, 0.3, 0.1, 0.01][: rotary // 2])
    q = ops.rope_write(qkv, 0, inv_freq, 1.5).reshape(5, 4, 8)
    before = qkv[:, :32].reshape(5, 4, 8)
    half = rotary // 2
    turn = 1.5 * np.exp(1j * np.arange(5)[:, None, None] * np.float32(inv_freq))
    pairs = (before[..., :half] + 1j * before[..., half:rotary]) * turn
    assert np.allclose(q[..., :half] + 1j * q[..., half:rotary], pairs, atol=1e-6)
    assert np.array_equal(q[..., rotary:], before[..., rotary:])


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_keys_and_values_lie_where_the_layout_says(storage: str) -> None:
    layout = KVLayout(4, 2, 8, storage, LAYOUT.groups)
    rng, ops = RNG(6), ops_for("float32", layout, rows=6)
    qkv = rng.normal(size=(6, 64)).astype(np.float32)
    ops.rope_write(qkv, 2, np.zeros(4), 1.0)  # layer 2 is the second of group 0; frequency 0 turns nothing
    torch_type = getattr(torch, storage)
    blocks = torch.from_numpy(np.array(ops.planes).view(np.uint8).reshape(3, -1)).view(torch_type).float().numpy()
    rounded = torch.from_numpy(qkv).to(torch_type).float().numpy()
    k, v = rounded[:, 32:48].reshape(6, 2, 8), rounded[:, 48:].reshape(6, 2, 8)
    per_layer = 2 * layout.plane_items
    assert np.isnan(blocks[:, :per_layer]).all() and np.isnan(blocks[0]).all()  # nothing else was written
    for position in range(6):
        block, slot = 1 + position // 4, position % 4
        keys = blocks[block, per_layer : per_layer + layout.plane_items].reshape(2, 8, 4)
        values = blocks[block, per_layer + layout.plane_items :].reshape(2, 4, 8)
        assert np.array_equal(keys[:, :, slot], k[position])
        assert np.array_equal(values[:, slot], v[position])
    assert np.isnan(blocks[2, per_layer:]).sum() == layout.plane_items  # slots 6 and 7, K and V


def test_values_too_large_for_float16_become_infinite() -> None:
    layout = KVLayout(4, 2, 8, "float16", LAYOUT.groups)
    ops = ops_for("float32", layout, rows=1)
    with np.errstate(over="ignore"):
        ops.rope_write(np.full((1, 64), 1e6, np.float32), 0, np.zeros(4), 1.0)
    assert np.isinf(ops.planes[1, 0, 0, 0])


def test_int8_keys_and_values_lie_where_the_layout_says() -> None:
    """A unit for V and for every 32 dimensions of K, rounded to bfloat16 before it is divided by."""
    layout = KVLayout(4, 2, 40, "int8", LAYOUT.groups)
    rng, ops = RNG(6), ops_for("float32", layout, rows=6)
    qkv = rng.normal(size=(6, 8 * 40)).astype(np.float32)
    ops.rope_write(qkv, 2, np.zeros(20), 1.0)
    blocks = np.concatenate(
        [ops.planes.view(np.uint8).reshape(3, 2, -1), ops.scales.view(np.uint8).reshape(3, 2, -1)], 2
    )
    assert blocks.shape == (3, 2, layout.layer_bytes) and layout.block_bytes == 2 * layout.layer_bytes
    assert (blocks[:, 0] == 0xFF).all() and (blocks[0] == 0xFF).all()  # nothing else was written

    def parts(x: np.ndarray) -> tuple[np.ndarray, float]:
        unit = float(torch.tensor(np.abs(x).max() / np.float32(127)).to(torch.bfloat16))
        return np.clip(np.rint(x / np.float32(unit)), -127, 127), unit

    k, v = qkv[:, 160:240].reshape(6, 2, 40), qkv[:, 240:].reshape(6, 2, 40)
    for position in range(6):
        block, slot = blocks[1 + position // 4, 1], position % 4
        keys = block[:320].view(np.int8).reshape(2, 20, 4, 2)[:, :, slot].reshape(2, 40)
        values = block[320:640].view(np.int8).reshape(2, 4, 40)[:, slot]
        scales = torch.from_numpy(block[640:].copy()).view(torch.bfloat16).float().numpy().reshape(2, 3, 4)[:, :, slot]
        for h in range(2):
            for found, scale, right in (
                (keys[h, :32], scales[h, 0], parts(k[position, h, :32])),
                (keys[h, 32:], scales[h, 1], parts(k[position, h, 32:])),
                (values[h], scales[h, 2], parts(v[position, h])),
            ):
                assert np.array_equal(found, right[0]) and scale == right[1] and np.abs(found).max() == 127


def test_int8_keeps_what_is_not_finite_and_what_is_zero() -> None:
    x = np.array([[0, 0, 0, 0], [1, np.inf, 2, 3], [1, np.nan, 2, 3], [1e-30, -2e-30, 0, 0]], np.float32)
    quants, scales = quantise(x, 2)
    values = quants.reshape(4, 2, 2) * bfloat16_to_float32(scales)[..., None]
    assert np.array_equal(np.isnan(values[:, :, 0]), [[False, False], [True, False], [True, False], [False, False]])
    assert (values[0] == 0).all() and np.allclose(values[3, 0], [1e-30, -2e-30], rtol=1e-2)


@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_is_softmax_over_the_positions_it_may_see(window: int | None, softcap: float, heads: int) -> None:
    n, layer = 23, 0 if window is None else 1
    layout = KVLayout(4, 2, 8, "float32", (LayerGroup(None, (0,)), LayerGroup(window or 1, (1,))))
    rng, ops = RNG(7), ops_for("float64", layout, rows=n, heads=heads)
    qkv = rng.normal(size=(n, (heads + 4) * 8)).astype(np.float32).astype(np.float64) * 2
    q = ops.rope_write(qkv, layer, np.zeros(4), 1.0)
    ours = ops.attend(q, layer, 0.5, window, softcap).reshape(n, heads, 8)
    k, v = (qkv[:, heads * 8 :].reshape(n, 2, 2, 8)[:, i].repeat(heads // 2, axis=1) for i in (0, 1))
    scores = np.einsum("mhd,thd->hmt", q.reshape(n, heads, 8), k) * 0.5
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    m, t = np.arange(n)[:, None], np.arange(n)[None]
    seen = (t <= m) & (t > m - (window or n + 1))
    weights = np.where(seen, np.exp(scores), 0)
    weights /= weights.sum(axis=-1, keepdims=True)
    assert np.allclose(ours, np.einsum("hmt,thd->mhd", weights, v), atol=1e-12)


def layered(backend: ReferenceBackend) -> Callable[[Ops], None]:
    """A small decoder with every operator, on random weights."""
    rng = RNG(8)

    def matrix(n: int, k: int) -> np.ndarray:
        return backend.matrix("F32", (rng.normal(size=(n, k)) * 2 / k**0.5).astype(np.float32).view(np.uint8), n, k)

    embed, head, ones = matrix(50, 48), matrix(50, 48), backend.vector(np.ones(48, np.float32))
    inv_freq = backend.vector(np.array([1, 0.5, 0.2, 0.1], np.float32))
    shapes = ((32, 48), (32, 48), (48, 32), (64, 48), (48, 32))
    layers = [[matrix(n, k) for n, k in shapes] for _ in range(3)]

    def build(ops: Ops) -> None:
        x = ops.embed(embed, 7.0)
        for i, (a, b, o, gate_up, down) in enumerate(layers):
            y = ops.rope_write(ops.linear(ops.norm(x, ones, 1e-5), [a, b]), i, inv_freq, 1.0)
            x = ops.linear(ops.attend(y, i, 0.3, 6 if i == 1 else None), [o], residual=x)
            y = ops.gate(ops.linear(ops.norm(x, ones, 1e-5), [gate_up]), "silu")
            x = ops.linear(y, [down], residual=x)
        ops.output(ops.linear(ops.norm(ops.pick(x), ones, 1e-5), [head]))

    return build


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_row_depends_on_its_own_tokens_alone_to_the_bit(dtype: str, storage: str, block_size: int) -> None:
    layout = KVLayout(block_size, 2, 8, storage, LAYOUT.groups)
    backend = ReferenceBackend(dtype)
    drive = Drive(backend.program(layered(backend), layout, 4), layout, 256)
    texts = [RNG(i).integers(0, 50, n).tolist() for i, n in enumerate((40, 7, 23))]
    alone = [drive.logits(t) for t in texts]
    assert all(np.isfinite(a).all() for a in alone)
    assert np.array_equal(drive.logits(texts[0], [1, 6, 13, 1, 1]), alone[0])
    rows = [drive.sequence() for _ in texts]
    together = [drive.step([(rows[2], texts[2][:9]), (rows[0], texts[0][:17])])]
    together.append(drive.step([(rows[0], texts[0][17:]), (rows[1], texts[1]), (rows[2], texts[2][9:])]))
    assert np.array_equal(np.concatenate([together[0][1], together[1][0]]), alone[0])
    assert np.array_equal(together[1][1], alone[1])
    assert np.array_equal(np.concatenate([together[0][0], together[1][2]]), alone[2])
    other = drive.logits([(texts[0][0] + 1) % 50, *texts[0][1:]])
    assert not np.array_equal(other[-1], alone[0][-1])  # and it does depend on the first of them


def test_move_copies_in_order() -> None:
    source = np.arange(12, dtype=np.uint8).reshape(4, 3)
    target = source.copy()
    ReferenceBackend().move(target, target, np.array([[0, 1], [1, 2]], dtype=np.int32))
    assert target.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [9, 10, 11]]


# ---- sampling -------------------------------------------------------------------------------------------------------


def sampling(samples: int = 1, **fields: object) -> SampleBatch:
    """``samples`` samples from row 0 that filter nothing; ``fields`` are a value for all, or one each."""
    kinds = dict.fromkeys(("row", "top_k", "branch", "position"), np.int32) | {"logprobs": np.int32, "seed": np.uint64}
    values: dict[str, object] = dict.fromkeys(("row", "top_k", "branch", "position", "min_p"), 0)
    values |= {"temperature": 1.0, "top_p": 1.0, "repetition": 1.0, "presence": 0.0, "frequency": 0.0}
    values |= {"seed": 7, "logprobs": -1, **fields}
    ragged = {name: values.pop(name, None) for name in ("bias", "history")}
    arrays = {k: np.broadcast_to(np.asarray(v, kinds.get(k, np.float32)), (samples,)) for k, v in values.items()}
    for name, kind in (("bias", np.float32), ("history", np.int32)):
        pairs = ragged[name] or {}
        assert isinstance(pairs, dict)
        offsets = np.arange(samples + 1, dtype=np.int32) * len(pairs)
        ids = np.array([*pairs] * samples, dtype=np.int32)
        arrays[name] = (offsets, ids, np.array([*pairs.values()] * samples, dtype=kind))
    return SampleBatch(**arrays)


def draws(logits: list[float], samples: int = 4000, **fields: object) -> np.ndarray:
    """How often each token is drawn, as a share."""
    batch = sampling(samples, position=np.arange(samples), **fields)
    tokens = ReferenceBackend().sample(np.array([logits], dtype=np.float32), batch).token
    return np.bincount(tokens, minlength=len(logits)) / samples


def test_philox_gives_the_published_vectors() -> None:
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = philox4x32((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_depends_on_seed_branch_and_position() -> None:
    keys = [(0, 0, 0), (1, 0, 0), (1 << 32, 0, 0), (0, 1, 0), (0, 0, 1)]
    values = [uniform(*k) for k in keys]
    assert len(set(values)) == len(values) and all(0 <= v < 1 for v in values)
    assert uniform(0, 0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53


def test_shares_follow_the_softmax() -> None:
    logits = [0.0, 1.0, 2.0, -1.0, 0.5]
    expected = np.exp(log_softmax(np.array(logits) / 0.7))
    assert np.abs(draws(logits, temperature=0.7) - expected).max() < 0.03
    assert np.abs(draws(logits, seed=8, branch=3, temperature=0.7) - expected).max() < 0.03


def test_temperature_zero_and_tiny_are_greedy_with_ties_to_the_lower_id() -> None:
    logits = [0.0, 3.0, 2.999, 3.0, -1.0]
    for temperature in (0.0, 1e-30, 1e-8):
        assert draws(logits, 10, temperature=temperature)[1] == 1
    assert draws([0.0, 2.0, 2.5, 1.0], 50, temperature=2e-5)[2] == 1


def kept(logits: list[float], **fields: object) -> set[int]:
    """The tokens that are ever drawn."""
    return set(np.flatnonzero(draws(logits, 300, **fields)).tolist())


def test_filters() -> None:
    logits = np.log([0.4, 0.3, 0.1, 0.15, 0.05]).tolist()
    assert kept(logits, top_k=3) == {0, 1, 3}
    assert kept(logits, top_p=0.6) == {0, 1}
    assert kept(logits, top_p=0.75) == {0, 1, 3}
    assert kept(logits, top_p=1e-9) == {0}
    assert kept(logits, min_p=0.3) == {0, 1, 3}
    assert kept(logits, min_p=1.0) == {0}
    # top-p counts what top-k left: 0.4 / 0.85 and 0.3 / 0.85
    assert kept(logits, top_k=3, top_p=0.8) == {0, 1}
    assert kept([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}
    assert kept(logits, top_k=99) == {0, 1, 2, 3, 4}
    assert np.abs(draws(logits, top_k=2) - [4 / 7, 3 / 7, 0, 0, 0]).max() < 0.03


def test_filters_come_after_temperature() -> None:
    logits = np.log([0.5, 0.3, 0.2]).tolist()  # at temperature 0.25 the shares are 0.87, 0.11, 0.02
    assert kept(logits, top_p=0.85, temperature=0.25) == {0}
    assert kept(logits, top_p=0.75, temperature=1.0) == {0, 1}


def test_bias_bans_and_favours_also_when_greedy() -> None:
    logits = [5.0, 4.0, 3.0]
    assert draws(logits, 1, temperature=0.0, bias={0: -np.inf})[1] == 1
    assert draws(logits, 1, temperature=0.0, bias={2: 100.0})[2] == 1
    assert draws(logits, 200, bias={0: -np.inf, 1: -np.inf})[2] == 1


def test_penalties() -> None:
    def greedy(logits: list[float], **fields: object) -> int:
        return int(np.argmax(draws(logits, 1, temperature=0.0, **fields)))

    assert greedy([2.0, 1.9], repetition=1.1, history={0: 0}) == 1  # positive is divided, and the prompt counts
    assert greedy([-1.0, -1.05], repetition=1.1, history={0: 1}) == 1  # negative is multiplied
    assert greedy([2.0, 1.9], presence=0.2, frequency=0.2, history={0: 0}) == 0  # those count the output only
    assert greedy([2.0, 1.9], presence=0.2, history={0: 5}) == 1
    assert greedy([2.0, 1.6], presence=0.3, history={0: 5}) == 0  # once, however often it was there
    assert greedy([2.0, 1.6], frequency=0.1, history={0: 5}) == 1
    assert greedy([2.0, 1.9], repetition=1.1, bias={0: 1.0}, history={0: 1}) == 0  # 3 / 1.1: bias comes first


def test_nothing_to_draw_is_minus_one_and_neighbours_are_not_disturbed() -> None:
    bad = [np.nan, 1.0], [np.inf, 1.0], [-np.inf, -np.inf]
    logits = np.array([[0.0, 1.0], *bad, [0.0, 1.0]], dtype=np.float32)
    out = ReferenceBackend().sample(logits, sampling(5, row=np.arange(5), temperature=[0, 1, 0, 1, 0], logprobs=2))
    assert out.token.tolist() == [1, -1, -1, -1, 1]
    assert out.rank.tolist() == [1, 0, 0, 0, 1] and out.top_ids[1].tolist() == [-1, -1]
    banned = ReferenceBackend().sample(logits[:1], sampling(1, bias={0: -np.inf, 1: -np.inf}))
    assert banned.token.tolist() == [-1]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = RNG(9).normal(size=(2, 20)).astype(np.float32)
    logits[0, 5] = logits[0, 3] = logits[0].max() + 1
    batch = sampling(3, row=[0, 1, 0], temperature=0.0, logprobs=[4, 0, -1], bias={5: 50.0}, repetition=1.5)
    out = ReferenceBackend().sample(logits, batch)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    assert out.token.tolist() == [5, 5, 5]
    assert np.allclose(out.logprob[:2], expected[[0, 1], [5, 5]], atol=1e-6)
    assert out.rank[0] == 2  # token 3 has the same logit and a lower id
    assert out.rank[1] == 1 + (logits[1] > logits[1, 5]).sum()
    assert out.top_ids.shape == (3, 4) and out.top_ids[0].tolist()[:2] == [3, 5]
    assert np.allclose(out.top_logprobs[0], np.sort(expected[0])[::-1][:4], atol=1e-6)
    assert out.logprob[2] == 0 and out.rank[2] == 0 and out.top_ids[2].tolist() == [-1] * 4


def test_score() -> None:
    logits = RNG(10).normal(size=(3, 20)).astype(np.float32)
    logits[1, 4] = np.nan
    out = ReferenceBackend().score(logits, np.array([3, 4, 19], dtype=np.int32), 2)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    assert out.token.tolist() == [3, -1, 19]
    assert np.allclose(out.logprob[[0, 2]], [expected[0, 3], expected[2, 19]], atol=1e-6)
    assert out.rank[0] == 1 + (logits[0] > logits[0, 3]).sum()
    assert out.top_ids[0].tolist() == np.argsort(-logits[0])[:2].tolist()
    assert ReferenceBackend().score(logits, np.array([3, 4, 19], dtype=np.int32), 0).top_ids.shape == (3, 0)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        ReferenceBackend("float16")
