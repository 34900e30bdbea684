"""One command for a machine with an NVIDIA GPU: all kernel tests on it, then what it measures, as a table and plots.

    python bench/gpu_check.py [--quick] [--only tests kernels engine peers] [--write docs/gpu-results.md]

On random weights of Llama-3.1-8B and Llama-2-13B shapes, made on the device: decode attention against a device copy,
prefill attention and products against a large matrix product; the engine's decode at batches of 1 to 512 and its share
of what memory and products allow; and one load of chats, through the engine and through transformers one at a time, in
its best static batch, and with its own continuous batching.  Each part runs in a process of its own, and one that fails
is told and left out.  ``--dry`` runs every part on the CPU, in Triton's interpreter, with tiny shapes: its figures mean
nothing, it shows that the command works.  Exits with 1 if a test fails or a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "kernels", "engine", "peers")

Report = dict[str, Any]

GOALS = {
    "decode attention, of copy": 0.85,
    "engine decode at batch 64, of roofline": 0.80,
    "prefill attention, of matmul": 0.60,
    "engine, times transformers one at a time": 24.0,
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.part is not None:
        Path(options.result).write_text(json.dumps(part(options.part, options)), encoding="utf-8")
        return 0
    if not options.dry:
        problem = no_gpu()
        if problem:
            print(f"error: gpu_check needs an NVIDIA GPU: {problem}; --dry tries every part without", file=sys.stderr)
            return 2
    report: Report = {"date": time.strftime("%Y-%m-%d"), "dry": options.dry, "about": about(options.dry)}
    for name in options.only:
        print(f"== {name}", flush=True)
        report[name] = isolated(name, options)
        if "error" in report[name]:
            print(f"{name} failed: {report[name]['error']}", file=sys.stderr)
    return told(report, options)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, fewer sizes")
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny: figures mean nothing")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    parser.add_argument("--write", metavar="FILE", help="write the results as Markdown there")
    parser.add_argument("--plots", metavar="DIR", default=str(ROOT / "bench/out"), help="where plots go")
    parser.add_argument("--gemm", choices=("fixed", "cublas"), default="fixed", help="the engine's products")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def no_gpu() -> str:
    """What is amiss, in words; "" if a GPU can be computed on."""
    from octavo.kernels.triton.device import Unusable, usable_gpus

    try:
        usable_gpus(own=None)  # this process must take none of the memory that the parts are to have
    except Unusable as problem:
        return str(problem)
    return ""


def about(dry: bool) -> Report:
    """What ran: versions and device."""
    from importlib.metadata import PackageNotFoundError, version

    found: Report = {"machine": platform.platform(), "python": platform.python_version()}
    for name in ("octavo", "torch", "triton", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    if dry:
        found["device"] = "none: a dry run on the CPU"
    else:
        from octavo.kernels.triton.device import driver_version, usable_gpus

        found["device"], found["driver"] = str(usable_gpus(own=None)[0]), driver_version()
    return found


def isolated(name: str, options: argparse.Namespace) -> Report:
    """Runs a part in a process of its own: it gets the whole GPU, and its end cannot take others along."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(Path(__file__)), "--part", name, "--result", str(result), "--gemm", options.gemm]
        command += ["--dry"] * options.dry + ["--quick"] * options.quick
        code = subprocess.run(command, env=environment(options.dry), check=False).returncode
        if code:
            return {"error": f"exit code {code}"}
        report: Report = json.loads(result.read_text(encoding="utf-8"))
        return report


def environment(dry: bool) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if dry:
        own.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    return own


# ---- the parts -------------------------------------------------------------------------------------------------------


def part(name: str, options: argparse.Namespace) -> Report:
    import torch
    from gpu_shapes import DRY, QUICK, REAL

    sizes = DRY if options.dry else QUICK if options.quick else REAL
    device = torch.device("cpu" if options.dry else "cuda:0")
    if name == "tests":
        return kernel_tests(sizes.kernel_tests)
    run = {"kernels": kernels, "engine": engine, "peers": peers}[name]
    return run(device, sizes, options.gemm)


def kernel_tests(selected: Sequence[str]) -> Report:
    """pytest on the device: the tests that CI runs in the interpreter."""
    command = [sys.executable, "-m", "pytest", *selected, "-p", "no:cacheprovider"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines() or [run.stderr.strip()]
    return {"passed": run.returncode == 0, "summary": lines[-1], "log": lines[-40:] if run.returncode else []}


def kernels(device: Any, sizes: Any, gemm: str) -> Report:
    import gpu_kernels as alone

    found: Report = {"limits": alone.limits(device, sizes), "decode": [], "prefill": [], "products": []}
    for name in sizes.models:
        found["decode"] += alone.decode_attention(device, sizes, name)
        found["prefill"].append(alone.prefill_attention(device, sizes, name))
        found["products"] += alone.products(device, sizes, name)
    return found


def engine(device: Any, sizes: Any, gemm: str) -> Report:
    import gpu_engine
    import gpu_kernels

    from octavo.errors import ConfigError

    limits = gpu_kernels.limits(device, sizes)
    found: Report = {"limits": limits, "gemm": gemm, "models": {}}
    for name in sizes.models:
        settings = {"kv_blocks": 64, "max_batched_tokens": 32} if device.type == "cpu" else {}
        try:
            made = gpu_engine.RandomEngine(device, name, "fixed" if device.type == "cpu" else gemm, **settings)
        except ConfigError as error:  # there is no room for it on this GPU
            found["models"][name] = {"error": str(error)}
            continue
        found["models"][name] = {
            "memory": made.memory.describe(),
            "decode": gpu_engine.decode_rates(made, sizes, limits),
            "load": gpu_engine.load_rate(made, sizes),
        }
        made.close()
        del made  # its weights go before the next model's come
    return found


def peers(device: Any, sizes: Any, gemm: str) -> Report:
    import gpu_peers
    import torch

    found: Report = {}
    for name in sizes.models:
        try:
            found[name] = gpu_peers.compare(device, name, sizes)
        except torch.cuda.OutOfMemoryError as error:
            found[name] = {"error": str(error).splitlines()[0]}
    return {"models": found}


# ---- what is told ----------------------------------------------------------------------------------------------------


def told(report: Report, options: argparse.Namespace) -> int:
    """Prints, saves, plots; whether all tests passed and all goals that were measured are met."""
    import common
    from gpu_report import drawn, goals, markdown

    reached = goals(report, GOALS)
    text = markdown(report, reached, drawn(report, Path(options.plots)))
    print(text)
    common.save("gpu-check", report)
    if options.write:
        Path(options.write).write_text(text, encoding="utf-8")
    failed = [name for name in options.only if "error" in report[name]]
    passed = report.get("tests", {}).get("passed", True)
    if options.dry:
        return int(bool(failed) or not passed)
    return int(bool(failed) or not passed or any(value < goal for _, value, goal in reached))


if __name__ == "__main__":
    sys.exit(main())
