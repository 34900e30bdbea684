"""Triton's interpreter, put right for what the kernels need of it; nothing here touches compiled kernels.

Up to Triton 3.7 it multiplies the bits of bfloat16 matrices as integers, cuts float32 off where it should round it to
bfloat16, and puts its own language in place of the compiler's anew at each launch and at each call of a function from a
kernel, which takes most of its time: here it is done once for each function, and left so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
import triton.language as tl

from octavo.kernels.dequant import bfloat16_to_float32, float32_to_bfloat16


def repair() -> None:
    """Once is enough, and more does no harm."""
    if not triton.knobs.runtime.interpret:
        return
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    if builder.create_dot is not _dot:
        _old["cast"], _old["dot"] = builder.cast_impl, builder.create_dot
        _old["patch"] = interpreter._patch_lang
        builder.cast_impl, builder.create_dot = _cast, _dot
        interpreter._patch_lang = _patch


_old: dict[str, Any] = {}
_patched: set[Any] = set()


def _cast(self: Any, source: Any, target: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return TensorHandle(float32_to_bfloat16(source.data).reshape(np.shape(source.data)), tl.bfloat16)
    return _old["cast"](self, source, target)


def _dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    from triton.runtime.interpreter import TensorHandle

    if a.dtype.scalar == tl.bfloat16:
        a, b = (TensorHandle(bfloat16_to_float32(x.data), tl.float32) for x in (a, b))
    return _old["dot"](self, a, b, d, *options)


class _Kept:
    """What would put the compiler's language back."""

    def restore(self) -> None:
        pass


def _patch(function: Any) -> _Kept:
    if function not in _patched:
        _patched.add(function)
        _old["patch"](function)
    return _Kept()
