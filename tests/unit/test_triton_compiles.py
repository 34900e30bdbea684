"""Every kernel compiles for Ampere and Hopper, and those that matter most for Blackwell, with no GPU there: what the
interpreter runs is what a GPU can run.

Products must keep one matrix instruction for every tile, or a row's bits would depend on the number of rows.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from compiled import compiled  # noqa: E402
from octavo.kernels.triton import attention, gemm, norm, rope_write  # noqa: E402
from octavo.kernels.triton.weights import FORMS, block_weights  # noqa: E402

if shutil.which("c++") is None and shutil.which("gcc") is None:
    pytest.skip("Triton compiles with a C compiler at hand only", allow_module_level=True)

MODULE = "octavo.kernels.triton."
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ARCHITECTURES = (80, 90, 100, 120)
NEWER = (100, 120)  # for which a part is compiled, as each takes half a minute for all
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")

Case = tuple[str, str, dict[str, Any], dict[str, Any]]


def case(module: str, name: str, given: dict[str, Any]) -> Case:
    """A kernel with its arguments; those that are options of the compiler are told apart."""
    options = {k: v for k, v in given.items() if k in OPTIONS}
    return MODULE + module, name, {k: v for k, v in given.items() if k not in OPTIONS}, options


def pointers(names: str, type: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), type)


def dense(type: str, m: int, parts: int = 1, added: bool = True) -> Case:
    given = {
        **pointers("x w0 w1 w2", f"*{type}"),
        **pointers("bias residual out", "*fp32"),
        **pointers("n0 n1 n2 column stride", "i32:16"),
        "m": "i32",
        "K": 4096 if m % 2 else 2880,
        "PARTS": parts,
        "HAS_BIAS": added,
        "HAS_RESIDUAL": added,
        **gemm.tile(m, TYPES[type]),
    }
    return case("gemm", "dense", given)


def grouped(type: str, m: int) -> Case:
    form = FORMS[type]
    given = {
        **pointers("x", "*bf16"),
        **pointers("data", "*u8"),
        **pointers("scale shift", "*fp16"),
        **pointers("part part_shift", "*i8"),
        **pointers("bias residual out", "*fp32"),
        **pointers("n column stride", "i32:16"),
        "m": "i32",
        **dict(K=4096, BITS=form.bits, GROUP=form.group, SPAN=block_weights(type), OFFSET=form.offset),
        **dict(HAS_PART=form.parts is not None, HAS_SHIFT=form.shift is not None, HAS_BIAS=False, HAS_RESIDUAL=True),
        **gemm.grouped_tile(m),
    }
    return case("gemm", "grouped", given)


def attend(kv: str, dim: int, heads: int, window: int = 0, softcap: bool = False, size: int = 16) -> Case:
    stored, fp8 = ("u8", True) if kv == "fp8" else (kv, False)
    given = {
        "queries": "*fp16" if fp8 else f"*{kv}",
        "cache": f"*{stored}",
        **pointers("ids items", "*i32"),
        "out": "*bf16",
        **pointers("part part_sums", "*fp32"),
        **pointers("block_stride layer", "i32:16"),
        **pointers("scale softcap", "fp32"),
        **dict(KV_HEADS=8, GROUP=heads, DIM=dim, SIZE=size, WINDOW=window, HAS_SOFTCAP=softcap, FP8=fp8),
        **attention.shape(dim, 1 if fp8 else TYPES[kv].itemsize),
    }
    return case("attention", "attend_tile", given)


def others() -> list[Case]:
    integers = dict(GROUP=32, SPAN=256, OFFSET=0, HAS_PART=True, HAS_SHIFT=True)
    table = {
        **pointers("data", "*u8"),
        **pointers("scale shift", "*fp16"),
        **pointers("part part_shift", "*i8"),
        **{"ids": "*i32", "out": "*fp32", "factor": "fp32", "n": "i32", "items": "i32"},
    }
    rope = {
        **pointers("qkv inv_freq q_norm k_norm", "*fp32"),
        **pointers("positions blocks", "*i32"),
        **pointers("block_stride layer", "i32:16"),
        "m": "i32",
        **pointers("scale eps", "fp32"),
        **dict(HEADS=32, KV_HEADS=8, SIZE=16, num_warps=4, ROWS=rope_write.ROWS),
    }
    plain = dict(DIM=128, HALF=64, BLOCK=128, HAS_Q_NORM=False, HAS_K_NORM=False, FP8=False)
    normed = dict(DIM=80, HALF=40, BLOCK=128, HAS_Q_NORM=True, HAS_K_NORM=True, FP8=True)
    join = {
        **pointers("joins", "*i32"),
        **pointers("part part_sums", "*fp32"),
        **dict(out="*bf16", KV_HEADS=8, GROUP=4, DIM=128, ROWS=16, BLOCK=128, num_warps=4, enable_fp_fusion=False),
    }
    rms = {**pointers("x weight residual", "*fp32"), "m": "i32", "eps": "fp32"}
    gated = {"x": "*fp32", "items": "i32", "WIDTH": 14336, "BLOCK": 1024}
    return [
        case(
            "embed",
            "rows_of",
            dict(table="*bf16", ids="*i32", out="*fp32", scale="fp32", items="i32", WIDTH=4096, BLOCK=1024),
        ),
        case("embed", "recalled", dict(tokens="*i32", drawn="*i32", stride="i32", items="i32", BLOCK=1024)),
        case("embed", "rows_of_grouped", {**table, **integers, "BITS": 4, "WIDTH": 4096, "BLOCK": 1024}),
        case("norm", "rms_norm", {**rms, "out": "*bf16", "WIDTH": 4096, "HAS_RESIDUAL": False, **norm.shape(4096)}),
        case("norm", "rms_norm", {**rms, "out": "*fp32", "WIDTH": 640, "HAS_RESIDUAL": True, **norm.shape(640)}),
        case("gate", "gated", {**gated, "out": "*bf16", "GELU": False}),
        case("gate", "gated", {**gated, "out": "*fp16", "GELU": True}),
        case("gate", "capped", {"x": "*fp32", "cap": "fp32", "items": "i32", "BLOCK": 1024}),
        case("rope_write", "rotate_and_write", {**rope, **plain, "queries": "*bf16", "cache": "*bf16"}),
        case("rope_write", "rotate_and_write", {**rope, **plain, "queries": "*fp32", "cache": "*fp32"}),
        case("rope_write", "rotate_and_write", {**rope, **normed, "queries": "*fp16", "cache": "*u8"}),
        case("attention", "join_pieces", join),
        case(
            "move",
            "copy_blocks",
            {
                **pointers("source target", "*i64"),
                "pairs": "*i32",
                **pointers("source_stride target_stride words", "i32"),
                "BLOCK": 1024,
            },
        ),
    ]


DENSE = [
    *(dense("bf16", m, parts) for m, parts in ((1, 3), (20, 1), (64, 2), (201, 1), (999, 3))),
    *(dense(type, m) for type in ("fp16", "fp32") for m in (1, 999)),
]
GROUPED = [
    *(grouped(type, 1) for type in ("Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q6_K")),  # all forms there are
    *(grouped(type, m) for type in ("Q8_0", "Q4_K") for m in (20, 64, 999)),
]
ATTENTION = [
    *(attend(kv, dim, 4) for kv in ("bf16", "fp16", "fp8") for dim in (64, 128)),
    attend("bf16", 256, 4, window=512, softcap=True),
    attend("fp16", 80, 1, window=4096),
    attend("fp16", 96, 7, size=7),
    *(attend("fp32", dim, 4) for dim in (64, 128, 256)),
    attend("fp8", 256, 4),
]  # fmt: skip


def products(architecture: int) -> list[Case]:
    if architecture in NEWER:
        return [*(dense("bf16", m) for m in (1, 20, 64, 201, 999)), *(grouped("Q4_K", m) for m in (1, 64, 999))]
    return [*DENSE, *GROUPED]


def attentions(architecture: int) -> list[Case]:
    if architecture in NEWER:
        return [attend("bf16", 128, 4), attend("fp16", 80, 1, window=4096), attend("fp8", 256, 4)]
    return ATTENTION


@cache
def built(architecture: int) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Arguments and what became of them: products first, then attention, then the others."""
    rest = [] if architecture in NEWER else others()
    cases = [*products(architecture), *attentions(architecture), *rest]
    return [(given, one) for (_, _, given, _), one in zip(cases, compiled(cases, architecture), strict=True)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_and_fits(architecture: int) -> None:
    """Within the 99 KiB of shared memory that the smallest of these GPUs have for a program, and with few bytes of
    stack: what is spilled there is spilled outside the loops.  (Large heads of float32 are for comparing, not for use.)
    """
    for given, found in built(architecture):
        assert found["shared"] <= 99 << 10, (given, found)
        assert found["stack"] <= 512 or (given.get("cache"), given.get("DIM")) == ("*fp32", 256), (given, found)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_have_one_matrix_instruction_for_every_number_of_rows(architecture: int) -> None:
    for given, one in built(architecture)[: len(products(architecture))]:
        assert one["mma"] == ([] if given["x"] == "*fp32" else ["m16n8k16"]), given
        assert not one["sums"], (given, "a sum across a tile has the order of the tile's layout")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_attention_runs_on_tensor_cores(architecture: int) -> None:
    """By the generation's instruction; there is one tile for all rows, so it need not be that of products."""
    instruction = {90: "m64", 100: "tcgen05"}.get(architecture, "m16n8")
    first = len(products(architecture))
    for given, one in built(architecture)[first : first + len(attentions(architecture))]:
        if given["cache"] in ("*bf16", "*fp16") and given["SIZE"] == 16:
            assert one["async"] >= 16, given  # keys and values come 16 bytes at a time, ahead of their use
        if given["cache"] != "*fp32":
            assert one["mma"] and all(m.startswith(instruction) for m in one["mma"]), (given, one)


def test_every_kernel_is_among_them() -> None:
    """A kernel is a function that asks which program it is."""
    import inspect

    from octavo.kernels.triton import embed, gate, move

    tested = {name for _, name, _, _ in [*DENSE, *GROUPED, *ATTENTION, *others()]}
    for module in (attention, embed, gate, gemm, move, norm, rope_write):
        for name, value in vars(module).items():
            if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                if "program_id" in inspect.getsource(value.fn):
                    assert name in tested, name
