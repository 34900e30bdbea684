"""What all routes of one server share."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import octavo
from octavo.engine.persist import compute_mode, fingerprint
from octavo.engine.service import AsyncLLM
from octavo.execute.executor import LocalExecutor
from octavo.server.admission import Admission
from octavo.server.errors import ApiError
from octavo.server.fingerprint import Fingerprint
from octavo.server.metrics import Metrics
from octavo.server.parsing import Tooling
from octavo.server.registry import Sessions
from octavo.server.settings import ServerSettings
from octavo.watch.recorder import Recorder

if TYPE_CHECKING:
    from octavo.server.generation import Generation


class State:
    """Owns: the model's names, the queue, the metrics, and which generations run.

    Promises: nothing here waits for the engine.
    """

    def __init__(self, llm: AsyncLLM, settings: ServerSettings, model: str = "model") -> None:
        self.llm = llm
        self.settings = settings
        self.model = settings.served_model_name or name_of(model)
        self.root = model
        self.created = int(time.time())
        self.fingerprint = str(system_fingerprint(llm))
        self.admission = Admission(
            llm.parts.config.max_running, settings.max_waiting, settings.max_waiting_tokens, self.now
        )
        self.metrics = Metrics(llm, self.admission, self.model)
        self.tooling = Tooling(llm.parts.template, settings.tool_format, settings.reasoning)
        self.sessions = Sessions(settings.max_sessions, settings.session_idle)
        self.generations: dict[Generation, None] = {}
        self.recorder: Recorder | None = None  # what the live map shows

    @staticmethod
    def now() -> float:
        return time.monotonic()

    def check_model(self, name: str | None) -> str:
        """The model's name as it is served; any of its names is good, none at all too.  Raises ApiError."""
        if name is None or name in (self.model, self.root):
            return self.model
        message = f"there is no model {name!r} here; this server has {self.model!r}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def drain(self) -> None:
        """Take nothing new."""
        self.admission.draining = True

    def stop(self) -> None:
        """End what still runs, with an error for those who wait for it."""
        for generation in list(self.generations):
            generation.fail(ApiError(503, "the server is shutting down", code="shutting_down"))


def name_of(model: str) -> str:
    """What a model is called when nobody says: a file's name without its end, a folder's name, or a pulled name."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name or model


def system_fingerprint(llm: AsyncLLM) -> Fingerprint:
    """What decides an answer's bytes besides the request."""
    parts = llm.parts
    executor = parts.engine.executor
    if not isinstance(executor, LocalExecutor):  # a scripted one: there are no weights
        return Fingerprint(octavo.__version__)
    backend = executor.backend
    build = hashlib.blake2b(backend.build.encode(), digest_size=4).hexdigest()
    weights = fingerprint(parts.checkpoint)[:8]
    config = parts.config
    compute = compute_mode(config, backend)
    name = backend.name.removesuffix(f"-{compute}")  # it is named by itself
    return Fingerprint(octavo.__version__, name, build, weights, config.kv_dtype, compute)
