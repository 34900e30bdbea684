"""The command ``octavo``: what a person sees first."""

from __future__ import annotations

import os
import sys
from typing import Any

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns its exit code: 0, 1 failed, 2 bad input, 130 stopped by Ctrl-C.

    Every error is one line on stderr; ``--debug`` shows the traceback as well.
    """
    given = sys.argv[1:] if arguments is None else arguments
    from octavo.cli.app import app

    try:
        code = app(given, prog_name="octavo", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, say) has gone; Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        if "--debug" in given:
            import traceback

            traceback.print_exc()
        message, code = _explain(error)
        print(message, file=sys.stderr)
        return code


def _explain(error: Exception) -> tuple[str, int]:
    from octavo.errors import ConfigError, ModelError, OctavoError, RequestError

    if isinstance(error, OctavoError):
        return f"error: {_one_line(error)}", BAD_INPUT if isinstance(
            error, (ConfigError, ModelError, RequestError)
        ) else FAILED
    told: Any = getattr(error, "format_message", None)
    if told is not None:  # a mistake in the command line itself, as the option parser words it
        context = getattr(error, "ctx", None)
        help = f" (see `{context.command_path} --help`)" if context is not None else ""
        return f"error: {_one_line(told()).rstrip('.')}{help}", BAD_INPUT
    if type(error).__name__ == "Abort":
        return "stopped", INTERRUPTED
    if isinstance(error, MemoryError):
        return "error: out of memory; --kv-memory sets how much the KV cache may take", FAILED
    if isinstance(error, (OSError, ImportError)):
        return f"error: {_one_line(error)}", FAILED
    return f"error: {type(error).__name__}: {_one_line(error)} (this is a fault in Octavo; --debug shows where)", FAILED


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
