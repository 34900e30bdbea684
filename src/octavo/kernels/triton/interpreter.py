"""Triton's interpreter, put right for what the kernels need of it; nothing here touches compiled kernels.

Up to Triton 3.7 it multiplies the bits of bfloat16 matrices as integers, cuts float32 off where it should round it to
bfloat16, and replaces the whole language anew at each call of a function from a kernel, which takes most of its time.
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
        _old["patch"], _old["launch"] = interpreter._patch_lang, interpreter.GridExecutor.__call__
        builder.cast_impl, builder.create_dot = _cast, _dot
        interpreter.InterpretedFunction.__call__ = _call
        interpreter.GridExecutor.__call__ = _launch


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


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A function that a kernel calls: its language is replaced once a launch."""
    if self.fn not in _patched:
        _patched.add(self.fn)
        _old["patch"](self.fn)
    return self.rewrite()(*args, **kwargs)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    return _old["launch"](self, *args, **kwargs)
