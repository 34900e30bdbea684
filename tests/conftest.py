"""Set before anything else is imported: no hub, and one thread, since tests share the machine."""

from __future__ import annotations

import logging
import os
import signal

# A job in the background starts with Ctrl-C ignored; tests of it need Python's own way.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator  # noqa: E402
from functools import cache  # noqa: E402
from pathlib import Path  # noqa: E402

from octavo.kernels.triton.device import driver_seen  # noqa: E402


def gpu_seen() -> bool:
    """Whether tests of Triton's kernels run on a GPU; torch is asked only where there is a driver."""
    if not driver_seen():
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


if not gpu_seen():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run in its interpreter, on the CPU

from typing import TYPE_CHECKING  # noqa: E402

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

# The same examples for the same test, so that a run judges the change and not its luck; FRESH=1 draws others.
settings.register_profile("steady", derandomize=True)
settings.register_profile("fresh", print_blob=True)
settings.load_profile("fresh" if os.environ.get("FRESH") else "steady")

if TYPE_CHECKING:
    import openai

    from octavo.loadgen.process import ServerProcess
    from oracle import Truth
    from tiny import Tiny


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A command that ran in this process has set up logging for itself alone."""
    logs = [logging.getLogger(name) for name in ("octavo", "octavo.access")]
    kept = [(log, log.handlers[:], log.level, log.propagate) for log in logs]
    yield
    for log, handlers, level, propagate in kept:
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


class TinyModels:
    """Owns the session's tiny models: each is made, judged by transformers and written when first asked for."""

    def __init__(self, root: Path) -> None:
        import torch

        import tiny

        torch.set_num_threads(1)
        self.root = root
        self._make = cache(tiny.make)
        self._truths: dict[tuple[str, str], Truth] = {}

    def get(self, family: str, type: str = "F32") -> Tiny:
        return self._make(family, type)

    def truth(self, family: str, type: str = "F32") -> Truth:
        """What transformers says to 300 tokens of text."""
        import oracle
        import tiny

        key = family, type
        if key not in self._truths:
            self._truths[key] = oracle.truth(self.get(*key).model, tiny.prompt(300))
        return self._truths[key]

    def folder(self, family: str, type: str = "F32") -> Path:
        """A Hugging Face folder: type F32, F16 or BF16."""
        path = self.root / f"{family}-{type}"
        return path if path.exists() else self.get(family, type).save(path)

    def gguf(self, family: str, type: str = "F32") -> Path:
        path = self.root / f"{family}-{type}.gguf"
        return path if path.exists() else self.get(family, type).write_gguf(path)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("tiny"))


SMALL = ("--kv-dtype", "float32", "--kv-blocks", "512", "--threads", "1", "--access-log", "off")
CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture(scope="session")
def tiny_server(tiny_models: TinyModels) -> Iterator[ServerProcess]:
    """A server process on a Llama of two layers with a chat template, exact and in float32."""
    from octavo.loadgen.process import ServerProcess

    folder = tiny_models.get("llama").save(tiny_models.root / "tiny-chat")
    (folder / "chat_template.jinja").write_text(CHAT, encoding="utf-8")
    with ServerProcess(folder, *SMALL, "--compute", "exact") as server:
        yield server


@pytest.fixture(scope="session")
def real_server() -> Iterator[ServerProcess]:
    """A server process on SmolLM2, which knows what it says."""
    if not os.environ.get("OCTAVO_REAL_MODELS"):
        pytest.skip("real models are not asked for (OCTAVO_REAL_MODELS)")
    from octavo.loadgen.process import ServerProcess

    with ServerProcess("smollm2-135m", "--kv-memory", "256MiB", "--access-log", "off") as server:
        yield server


@pytest.fixture
def client(tiny_server: ServerProcess) -> openai.OpenAI:
    """The official client, of the tiny server."""
    import openai

    return openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def model(tiny_server: ServerProcess) -> str:
    """What the tiny server calls its model."""
    return tiny_server.model
