"""``octavo serve``: a model behind OpenAI's interface."""

from __future__ import annotations

import importlib.util
import logging
import sys
from typing import Any

from octavo.cli.models import fetch
from octavo.errors import ConfigError
from octavo.loading.pull import SHIPPED
from octavo.server.settings import ServerSettings

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def run(model: str, server: dict[str, Any], engine: dict[str, Any]) -> int:
    check_extra()
    settings = ServerSettings(**server)
    if model in SHIPPED:
        fetch(model)
    show_access_log(settings)
    from octavo.server.run import serve

    return serve(model, settings, engine)


def check_extra() -> None:
    """Raises ConfigError, with what to do, if the server's packages aren't there."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the server needs {', '.join(missing)}: pip install 'octavo[server]'")


def show_access_log(settings: ServerSettings) -> None:
    """Lines as they are, on stderr, apart from the rest of the log."""
    log = logging.getLogger("octavo.access")
    log.propagate = False
    if settings.access_log != "off" and not log.handlers:
        log.addHandler(logging.StreamHandler(sys.stderr))
        log.setLevel(logging.INFO)
