"""Octavo: paged attention as a complete engine.

>>> from octavo import LLM, SamplingParams                                      # doctest: +SKIP
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from octavo.core.guide import Guide
from octavo.core.params import SamplingParams
from octavo.errors import ConfigError, DownloadError, EngineError, ModelError, OctavoError, RequestError

if TYPE_CHECKING:
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.engine.service import AsyncLLM

__version__ = "0.1.0"

# A library is silent unless its user asks: without a handler, Python would print warnings on stderr by itself.
logging.getLogger("octavo").addHandler(logging.NullHandler())

_LAZY = {
    "LLM": "octavo.engine.llm",
    "AsyncLLM": "octavo.engine.service",
    "RequestOutput": "octavo.engine.outputs",
    "CompletionOutput": "octavo.engine.outputs",
    "Logprob": "octavo.engine.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "DownloadError",
    "EngineError",
    "Guide",
    "Logprob",
    "ModelError",
    "OctavoError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    """Engine classes on first use, so that ``import octavo`` is quick and ``octavo --help`` loads no kernels."""
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
