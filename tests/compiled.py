"""Compiles Triton kernels for GPUs that need not be there; run as a script, since the interpreter excludes it.

Reads JSON [[module, kernel, {argument: type or constant}, {option: value}], ...] and an architecture; writes, as JSON,
for each its registers, bytes of stack and of shared memory, and the matrix instructions that it uses.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Kernel = tuple[str, str, dict[str, Any], dict[str, Any]]


def compiled(kernels: list[Kernel], architecture: int) -> list[dict[str, Any]]:
    """Of each kernel: registers, bytes of stack and of shared memory, shapes of matrix instructions, and how many
    asynchronous copies of 16 bytes; compiled in a process of its own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, __file__, str(architecture)],
        input=json.dumps(kernels),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def _compile(module: str, name: str, arguments: dict[str, Any], options: dict[str, Any], target: Any) -> dict[str, Any]:
    import triton
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(module), name)
    names = kernel.arg_names
    even = [n for n, v in arguments.items() if str(v).endswith(":16")]
    arguments = {n: v.removesuffix(":16") if isinstance(v, str) else v for n, v in arguments.items()}
    source = ASTSource(
        fn=kernel,
        signature={n: arguments[n] if isinstance(arguments.get(n), str) else "constexpr" for n in names},
        constexprs={(names.index(n),): v for n, v in arguments.items() if n in names and not isinstance(v, str)},
        # As torch's memory is aligned, and the numbers that :16 says so of.
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if str(arguments.get(n))[:1] == "*" or n in even
        },
    )
    built = triton.compile(source, target=target, options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    counts = {k.lower(): int(v) for k, v in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = built.asm["ptx"]
    mma = sorted(set(re.findall(r"(?:wg)?mma\.(?:mma_async\.)?sync\.aligned\.(m\d+n\d+k\d+)", ptx)))
    mma += ["tcgen05"] if "tcgen05.mma" in ptx else []
    reduced = (piece.split("tt.reduce.return")[0] for piece in built.asm["ttgir"].split('"tt.reduce"')[1:])
    sums = sum("arith.addf" in body for body in reduced)
    copies = ptx.count("cp.async.cg")
    return {**counts, "shared": built.metadata.shared, "mma": mma, "async": copies, "sums": sums}


def main(architecture: int) -> None:
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", architecture, 32)
    print(json.dumps([_compile(*kernel, target) for kernel in json.load(sys.stdin)]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
