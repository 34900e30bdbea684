"""Single operators of the Triton backend against their definitions: every weight type, moves, fp8's bits."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

import tiny  # noqa: E402
from octavo.core.plan import DEVICE, HOST  # noqa: E402
from octavo.errors import ModelError  # noqa: E402
from octavo.kernels.dequant import dequantize  # noqa: E402
from octavo.kernels.triton import embed, gate, gemm, move, swap  # noqa: E402
from octavo.kernels.triton.backend import TritonBackend  # noqa: E402
from octavo.kernels.triton.rounding import from_fp8, to_fp8  # noqa: E402
from octavo.loading.tensor import TYPES  # noqa: E402

BACKEND = TritonBackend()
DEVICE_ = BACKEND.device


def weight(type: str, rows: int, cols: int, seed: int = 0) -> tuple[object, np.ndarray]:
    """Packed, and what it stands for."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    raw = tiny.encode(type, values, rng)
    read: list[int] = []
    packed = BACKEND.matrix(type, raw, rows, cols, read.append)
    assert read[-1] == raw.nbytes
    return packed, dequantize(type, raw, rows, cols)


def device(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(DEVICE_)


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.from_numpy(x).to(dtype).to(torch.float64).numpy()


@pytest.mark.parametrize("type", TYPES)
def test_products_with_every_weight_type(type: str) -> None:
    """Up to the rounding of activations to the type in which they are multiplied, the product is exact in float32."""
    cols = 512 if type.endswith("_K") else 96
    rng = np.random.default_rng(1)
    packed, values = weight(type, 45, cols)
    for m in (1, 20, 70):
        x = rng.standard_normal((m, cols)).astype(np.float32)
        bias, residual = rng.standard_normal(45, np.float32), rng.standard_normal((m, 45), np.float32)
        out = torch.full((m, 45), float("nan"), device=DEVICE_)
        gemm.linear(device(x), [packed], device(bias), device(residual), out)
        right = rounded(x, packed.input) @ values.astype(np.float64).T + bias + residual
        assert np.max(np.abs(out.cpu().numpy() - right)) < 2e-4 * np.sqrt(cols)


@pytest.mark.parametrize("types", [("F16", "F16", "F16"), ("Q4_K", "Q4_K", "Q6_K"), ("F32", "F32")])
def test_parts_of_one_product_lie_side_by_side(types: tuple[str, ...]) -> None:
    rng = np.random.default_rng(2)
    rows = (40, 17, 33)[: len(types)]
    x = rng.standard_normal((18, 256)).astype(np.float32)
    parts = [weight(type, n, 256, seed) for seed, (type, n) in enumerate(zip(types, rows, strict=True))]
    bias = rng.standard_normal(sum(rows)).astype(np.float32)
    out = torch.full((18, sum(rows)), float("nan"), device=DEVICE_)
    gemm.linear(device(x), [packed for packed, _ in parts], device(bias), None, out)
    right = rounded(x, parts[0][0].input) @ np.concatenate([v for _, v in parts]).astype(np.float64).T + bias
    assert np.max(np.abs(out.cpu().numpy() - right)) < 5e-3


@pytest.mark.parametrize("type", ["F16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q5_1"])
def test_a_rows_product_has_the_same_bits_in_every_batch(type: str) -> None:
    rng = np.random.default_rng(3)
    packed, _ = weight(type, 40, 256)
    x = device(rng.standard_normal((300, 256)).astype(np.float32))
    whole = torch.empty(300, 40, device=DEVICE_)
    gemm.linear(x, [packed], None, None, whole)
    for first, last in ((0, 1), (7, 8), (130, 140), (100, 131), (180, 240), (20, 170)):
        out = torch.empty(last - first, 40, device=DEVICE_)
        gemm.linear(x[first:last].contiguous(), [packed], None, None, out)
        assert torch.equal(out, whole[first:last])


@pytest.mark.parametrize("type", ["F16", "BF16", "F32", "Q8_0"])
def test_the_librarys_products_are_near_the_fixed_ones(type: str) -> None:
    rng = np.random.default_rng(4)
    parts = [weight(type, n, 96, n)[0] for n in (20, 33)]
    x, bias = device(rng.standard_normal((9, 96), np.float32)), device(rng.standard_normal(53, np.float32))
    residual = device(rng.standard_normal((9, 53), np.float32))
    fixed, library = torch.empty(9, 53, device=DEVICE_), torch.empty(9, 53, device=DEVICE_)
    gemm.linear(x, parts, bias, residual, fixed)
    gemm.linear(x, parts, bias, residual, library, library=True)
    bits = {"F16": 11, "BF16": 8}.get(type, 20)
    assert torch.max(torch.abs(fixed - library)) < 2.0**-bits * 64


@pytest.mark.parametrize("type", TYPES)
def test_embeddings_of_every_type(type: str) -> None:
    cols = 512 if type.endswith("_K") else 96
    packed, values = weight(type, 30, cols)
    ids = np.array([3, 29, 0, 3, 11], np.int32)
    out = torch.empty(5, cols, device=DEVICE_)
    embed.embed(packed, device(ids), 1.5, out)
    assert np.allclose(out.cpu().numpy(), values[ids] * np.float32(1.5), rtol=1e-6, atol=1e-7)


def test_float16_activations_stay_within_their_range() -> None:
    packed, values = weight("F16", 16, 32)
    x = np.zeros((3, 32), np.float32)
    x[0, 0], x[1, 0], x[2, 0] = 1e6, np.inf, np.nan
    out = torch.empty(3, 16, device=DEVICE_)
    gemm.linear(device(x), [packed], None, None, out)
    found = out.cpu().numpy()
    assert np.allclose(found[0], 65504 * values[:, 0]) and np.isnan(found[2]).all()
    assert not np.isfinite(found[1]).any()


def test_bad_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="can't have 10 bytes"):
        BACKEND.matrix("F16", np.zeros(10, np.uint8), 2, 3)
    with pytest.raises(ModelError, match=r"IQ2_XS isn't supported; supported are F32"):
        BACKEND.matrix("IQ2_XS", np.zeros(10, np.uint8), 2, 3)


def test_softcap_and_gates() -> None:
    x = np.linspace(-30, 30, 2002, dtype=np.float32).reshape(7, 286)
    capped = device(x.copy())
    gate.softcap(capped, 8.0)
    assert np.allclose(capped.cpu().numpy(), 8 * np.tanh(x.astype(np.float64) / 8), atol=2e-6)
    out = torch.empty(7, 143, dtype=torch.float16, device=DEVICE_)
    gate.gate(device(x), "gelu_tanh", out)
    a, b = x[:, :143].astype(np.float64), x[:, 143:].astype(np.float64)
    right = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3))) * b
    assert np.allclose(out.cpu().numpy(), right, rtol=1e-3, atol=1e-4)


# ---- moves -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8200, 12, 6, 3])
@pytest.mark.parametrize("tiers", [(DEVICE, DEVICE), (DEVICE, HOST), (HOST, DEVICE)])
def test_moves_happen_in_order(nbytes: int, tiers: tuple[int, int]) -> None:
    """Within a tier also those that read what an earlier one wrote, or overwrite what an earlier one reads."""
    rng = np.random.default_rng(nbytes)
    contents = rng.integers(0, 256, (9, nbytes), dtype=np.uint8)
    source = BACKEND.store(9, nbytes, tiers[0])
    source.copy_(torch.from_numpy(contents))
    target = source if tiers[0] == tiers[1] else BACKEND.store(9, nbytes, tiers[1])
    right = contents.copy() if target is source else np.zeros_like(contents)
    target.copy_(torch.from_numpy(right))
    pairs = rng.integers(0, 9, (20, 2)).astype(np.int32)
    for a, b in pairs.tolist():
        right[b] = right[a] if target is source else contents[a]
    BACKEND.move(source, target, pairs)
    found = np.stack([BACKEND.block(target, i) for i in range(9)])
    assert np.array_equal(found, right)
    BACKEND.move(source, target, pairs[:0])


def test_many_blocks_go_out_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two blocks aside, and a target that is written more than once."""
    monkeypatch.setattr(swap, "ASIDE", 40)
    rng = np.random.default_rng(0)
    contents = rng.integers(0, 256, (12, 16), dtype=np.uint8)
    blocks, host = BACKEND.store(12, 16, DEVICE), BACKEND.store(20, 16, HOST)
    blocks.copy_(torch.from_numpy(contents))
    pairs = np.stack([rng.permutation(12), rng.integers(0, 20, 12)], axis=1).astype(np.int32)
    one = swap.Swap(DEVICE_)
    one.out(blocks, host, pairs)
    blocks.zero_()  # taken anew at once
    one.finish()
    for slot in set(pairs[:, 1].tolist()):
        last = [a for a, b in pairs.tolist() if b == slot][-1]
        assert np.array_equal(BACKEND.block(host, slot), contents[last])
    one.into(host, blocks, np.array([[int(pairs[-1, 1]), 5]], np.int32))
    assert np.array_equal(BACKEND.block(blocks, 5), contents[pairs[-1, 0]])


def test_moves_that_do_not_touch_go_in_one_launch() -> None:
    pairs = np.array([[0, 5], [1, 6], [0, 7]], np.int32)
    assert [len(run) for run in move.independent(pairs, one=True)] == [3]
    chain = np.array([[0, 1], [1, 2], [3, 1]], np.int32)
    assert [len(run) for run in move.independent(chain, one=True)] == [1, 1, 1]
    assert [len(run) for run in move.independent(chain, one=False)] == [2, 1]


def test_a_host_block_is_memory_that_others_write() -> None:
    host, blocks = BACKEND.store(3, 64, HOST), BACKEND.store(2, 64, DEVICE)
    BACKEND.block(host, 1)[:] = 7
    BACKEND.move(host, blocks, np.array([[1, 0]], np.int32))
    assert (BACKEND.block(blocks, 0) == 7).all()


# ---- fp8 -------------------------------------------------------------------------------------------------------------


@triton.jit
def through_fp8(x, bits, back, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    stored = to_fp8(tl.load(x + at))
    tl.store(bits + at, stored)
    tl.store(back + at, from_fp8(stored, True).to(tl.float32))


def test_fp8_is_e4m3_rounded_to_nearest_even() -> None:
    """All numbers of the type, the ties between them, their neighbours, and what is beyond."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    numbers = np.sort(numbers[~np.isnan(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = np.concatenate([np.nextafter(middles, np.float32(1e9)), np.nextafter(middles, np.float32(-1e9))])
    edge = np.array([448, 449, 1e6, -1e30, np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    values = np.concatenate([numbers, middles, near, edge]).astype(np.float32)
    padded = np.zeros(triton.next_power_of_2(len(values)), np.float32)
    padded[: len(values)] = values
    x = device(padded)
    bits, back = torch.empty(len(x), dtype=torch.uint8, device=DEVICE_), torch.empty(len(x), device=DEVICE_)
    through_fp8[(1,)](x, bits, back, BLOCK=len(x))
    right = x.cpu().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(back.cpu().nan_to_num(999), right.float().nan_to_num(999))
    number = ~torch.isnan(x.cpu())
    assert torch.equal(bits.cpu()[number], right.view(torch.uint8)[number])
