"""Runs kernel tests with modules built by `cmake -DOCTAVO_SANITIZE=ON` in place of the installed ones.

    python tests/run_sanitized.py BUILD_FOLDER [pytest arguments]

It starts itself again with the sanitizer's library loaded first, and the C++ library too, whose exceptions
AddressSanitizer wants to see.  Leaks are not looked for, since the interpreter itself leaks on purpose.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

ISAS = ("scalar", "v3", "avxvnni", "avx512", "neon")


def take_modules(folder: Path) -> list[str]:
    """Puts the folder's kernel modules in sys.modules; the others count as not built."""
    import octavo.kernels  # the package that they belong to

    assert octavo.kernels
    found = []
    for isa in ISAS:
        name = f"octavo.kernels._cpu_{isa}"
        files = sorted(folder.glob(f"_cpu_{isa}.*so"))
        if not files:
            sys.modules[name] = None  # type: ignore[assignment]
            continue
        spec = importlib.util.spec_from_file_location(name, files[0])
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        found.append(isa)
    return found


def environment() -> dict[str, str]:
    def library(name: str) -> str:
        command = [os.environ.get("CXX", "c++"), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    preload = " ".join(library(name) for name in ("libasan.so", "libstdc++.so"))
    return {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}


def main() -> int:
    if "libstdc++" not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment())
    import pytest

    folder, *arguments = sys.argv[1:]
    isas = take_modules(Path(folder))
    if "scalar" not in isas:
        print(f"no kernel modules in {folder}", file=sys.stderr)
        return 2
    print("sanitized modules:", ", ".join(isas))
    unit = Path(__file__).parent / "unit"
    tests = sorted(str(p) for p in [unit / "test_gemm.py", *unit.glob("test_kernels_*.py")])
    return int(pytest.main(arguments or ["-q", "-s", "-p", "no:cacheprovider", *tests]))


if __name__ == "__main__":
    sys.exit(main())
