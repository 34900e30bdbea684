"""``octavo doctor``: what Octavo finds on this machine, and why it runs as it does."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import sys
from pathlib import Path

import octavo
from octavo.cli.console import rows
from octavo.config import format_size
from octavo.engine.memory import HEAD_ROOM, SHARE, memory_limit
from octavo.kernels.threads import choose_threads
from octavo.kernels.triton.device import described
from octavo.loading.pull import list_models, models_dir

PACKAGES = ("numpy", "tokenizers", "safetensors", "gguf", "jinja2", "huggingface_hub")


def run() -> int:
    """Prints it all; 1 if the kernels do not run."""
    kernels, sound = _kernels()
    threads = choose_threads()
    available, source = memory_limit()
    models = list_models()
    rows(
        [
            ("octavo", f"{octavo.__version__}, in {Path(octavo.__file__).parent}"),
            ("python", f"{platform.python_version()}, {sys.executable}"),
            ("machine", f"{platform.system()} {platform.machine()}, {_processor()}"),
            *kernels,
            ("GPU", described()),
            ("threads", f"{threads.count}: {threads.reason}"),
            ("memory", f"{format_size(available)}: {source}"),
            (
                "KV cache",
                f"{SHARE:.0%} of what the weights and {format_size(HEAD_ROOM)} of head room leave, unless set",
            ),
            ("models", f"{models_dir()}: {', '.join(m.name for m in models) or 'none pulled'}"),
            ("packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)),
            *_extras(),
        ]
    )
    return 0 if sound else 1


def _kernels() -> tuple[list[tuple[str, str]], bool]:
    """Which build runs and why; which others there are."""
    from octavo.kernels.select import load_kernels, runnable_isas, self_check

    try:
        runnable = runnable_isas()
    except ImportError as error:
        return [("kernels", f"missing: {error}")], False
    chosen = load_kernels().isa
    why = "the best that this machine runs" if chosen == runnable[0] else f"{runnable[0]} fails its self-check"
    oracle = load_kernels("scalar")
    lines = []
    for isa in built_isas():
        if isa not in runnable:
            lines.append(f"{isa}: built, not for this machine")
        elif isa == "scalar":
            lines.append("scalar: plain C++, what the others are checked against")
        else:
            lines.append(f"{isa}: {self_check(load_kernels(isa), oracle) or 'agrees with scalar'}")
    return [("instruction set", f"{chosen}, {why}"), ("kernel builds", "\n".join(lines))], True


def built_isas() -> list[str]:
    """Instruction sets that the installed package has kernels for."""
    import octavo.kernels

    names = {p.name.split(".")[0] for folder in _folders(octavo.kernels) for p in folder.glob("_cpu_*.so")}
    return sorted(name.removeprefix("_cpu_") for name in names)


def _folders(package: object) -> list[Path]:
    """Where a package's modules lie; an editable install has its compiled ones apart from its sources."""
    folders = [Path(p) for p in getattr(package, "__path__", [])]
    found = importlib.util.find_spec("octavo.kernels._cpu_scalar")
    if found is not None and found.origin is not None:
        folders.append(Path(found.origin).parent)
    return list(dict.fromkeys(folders))


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown processor"
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.processor() or "unknown processor"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _extras() -> list[tuple[str, str]]:
    """Each optional part and what it lacks; read from the installed package's own requirements."""
    try:
        required = importlib.metadata.requires("octavo") or []
    except importlib.metadata.PackageNotFoundError:
        return [("extras", "unknown: octavo runs from its source folder without being installed")]
    lacks: dict[str, list[str]] = {}
    for line in required:
        extra = re.search(r"extra\s*==\s*['\"](\w+)['\"]", line)
        package = re.match(r"[\w.-]+", line)
        if extra and package:
            lacks.setdefault(extra[1], [])
            if _version(package[0]) == "missing":
                lacks[extra[1]].append(package[0])
    lines = [f"{name}: {'lacks ' + ', '.join(missing) if missing else 'there'}" for name, missing in lacks.items()]
    return [("extras", "\n".join(lines))] if lines else []
