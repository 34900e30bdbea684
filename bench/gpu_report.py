"""gpu_check's results as Markdown and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.loadgen import plots

Report = dict[str, Any]
Goal = tuple[str, float, float]  # what, the value, what it is to be at least

ATTENTION = ("float16", 8192, 64)
ENGINE_BATCH = 64


def goals(report: Report, wanted: Mapping[str, float]) -> list[Goal]:
    """The goals whose figures were measured; of several models the worst."""
    found: dict[str, list[float]] = {name: [] for name in wanted}
    attending, decoding, prefilling, times = wanted
    kernels = report.get("kernels", {})
    if "limits" in kernels:
        rows = [r for r in kernels["decode"] if (r["dtype"], r["context"], r["rows"]) == ATTENTION]
        found[attending] += [r["rate"] / kernels["limits"]["copy"] for r in rows]
        found[prefilling] += [r["rate"] / kernels["limits"]["matmul"] for r in kernels["prefill"]]
    for name, model in report.get("engine", {}).get("models", {}).items():
        found[decoding] += [r["share"] for r in model.get("decode", []) if r["batch"] == ENGINE_BATCH]
        alone = report.get("peers", {}).get("models", {}).get(name, {}).get("one at a time", {})
        if "rate" in alone and "load" in model:
            found[times].append(model["load"]["rate"] / alone["rate"])
    return [(name, min(values), wanted[name]) for name, values in found.items() if values]


def markdown(report: Report, reached: Sequence[Goal], drawings: Sequence[Path]) -> str:
    about = report["about"]
    lines = ["# What a GPU measures", ""]
    if report["dry"]:
        lines += [
            "**A dry run on the CPU, in Triton's interpreter, on tiny shapes: no figure here means a thing.**",
            "",
        ]
    lines += [f"{report['date']}, {about['device']}. Made by `bench/gpu_check.py`.", ""]
    lines += _table(("what", "version"), [(k, str(v)) for k, v in about.items() if k != "device"])
    if reached:
        lines += ["## Goals", ""]
        cells = [
            (what, f"{value:.3g}", f"{least:g}", "met" if value >= least else "missed")
            for what, value, least in reached
        ]
        lines += _table(("goal", "measured", "at least", ""), cells)
    if "tests" in report:
        tests = report["tests"]
        lines += ["## Kernel tests on the device", "", f"`{tests.get('summary', tests.get('error'))}`", ""]
    if "limits" in report.get("kernels", {}):
        lines += _kernels(report["kernels"])
    for name, model in report.get("engine", {}).get("models", {}).items():
        peers = report.get("peers", {}).get("models", {}).get(name, {})
        lines += _engine(name, report["engine"]["gemm"], model, peers)
    lines += [f"![{path.stem}]({path.name})" for path in drawings]
    return "\n".join(lines).rstrip() + "\n"


def _kernels(report: Report) -> list[str]:
    limits = report["limits"]
    lines = ["## Kernels", "", f"Copy {_giga(limits['copy'])}B/s, large product {_tera(limits['matmul'])}FLOP/s.", ""]
    cells = [
        (
            r["model"],
            r["dtype"],
            str(r["rows"]),
            str(r["context"]),
            _giga(r["rate"]) + "B/s",
            f"{r['rate'] / limits['copy']:.0%}",
        )
        for r in report["decode"]
    ]
    lines += _table(("decode attention", "KV", "sequences", "context", "rate", "of copy"), cells)
    cells = [
        (r["model"], str(r["tokens"]), _tera(r["rate"]) + "FLOP/s", _share(r, limits["matmul"]))
        for r in report["prefill"]
    ]
    lines += _table(("prefill attention", "tokens", "rate", "of product"), cells)
    cells = [
        (
            r["model"],
            str(r["rows"]),
            _micro(r["seconds"]),
            _micro(r["torch"]),
            f"{r['torch'] / r['seconds']:.2f}",
        )
        for r in report["products"]
    ]
    return lines + _table(("gate and up", "rows", "µs", "torch, µs", "times torch"), cells)


def _engine(name: str, gemm: str, model: Report, peers: Report) -> list[str]:
    lines = [f"## The engine, {name}", ""]
    if "error" in model:
        return [*lines, f"Not run: {model['error']}", ""]
    products = " Products by cuBLAS: bytes depend on the batch." if gemm == "cublas" else ""
    lines += [f"{model['memory']}.{products}", ""]
    cells = [
        (str(r["batch"]), *(f"{r[what]:,.0f}" for what in ("rate", "waiting", "roofline")), f"{r['share']:.0%}")
        for r in model["decode"]
    ]
    lines += _table(("batch", "tokens/s", "without a step ahead", "roofline", "share"), cells)
    own = model["load"]["rate"]
    ways = [("octavo", f"{own:,.0f}", "1")]
    for way in ("one at a time", "best static", "continuous batching"):
        peer = peers.get(way, {})
        told = f"transformers, {way}" + (f" (batch {peer['batch']})" if "batch" in peer else "")
        if "rate" in peer:
            ways.append((told, f"{peer['rate']:,.0f}", f"{own / peer['rate']:.2f}"))
        elif peers:
            ways.append((told, peer.get("error", "not run"), ""))
    load = model["load"]
    lines += [f"A load of {load['requests']} chats at once, {load['tokens']:,} tokens generated:", ""]
    return lines + _table(("way", "tokens/s", "octavo is so many times as fast"), ways)


def drawn(report: Report, folder: Path) -> list[Path]:
    """Plots of what was measured."""
    out = []
    for name, model in report.get("engine", {}).get("models", {}).items():
        if "decode" in model:
            series = {
                "octavo": [(r["batch"], r["rate"]) for r in model["decode"]],
                "roofline": [(r["batch"], r["roofline"]) for r in model["decode"]],
            }
            path = folder / f"gpu-decode-{name}.svg"
            out.append(plots.lines(path, f"Decode, {name}", "sequences", "tokens/s", series, log="xy"))
        peers = report.get("peers", {}).get("models", {}).get(name, {})
        ways = {way: peers[way]["rate"] for way in peers if way != "static" and "rate" in peers[way]}
        if ways and "load" in model:
            groups = {name: {"octavo": model["load"]["rate"], **ways}}
            out.append(plots.bars(folder / f"gpu-load-{name}.svg", "One load", "tokens/s", groups))
    kernels = report.get("kernels", {})
    if "limits" in kernels:
        series = {}
        for r in kernels["decode"]:
            series.setdefault(f"{r['model']}, {r['dtype']}, {r['rows']}", []).append((r["context"], r["rate"] / 1e9))
        title = "Decode attention"
        out.append(plots.lines(folder / "gpu-attention.svg", title, "context", "GB/s", series, log="x"))
    return out


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows), ""]


def _share(case: Report, limit: float) -> str:
    return f"{case['rate'] / limit:.0%}"


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def _giga(value: float) -> str:
    return f"{value / 1e9:,.3g} G"


def _tera(value: float) -> str:
    return f"{value / 1e12:,.3g} T"
