"""From what a user calls a model (a path, a pulled name) to an opened checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

from octavo.errors import ModelError
from octavo.loading import pull
from octavo.loading.checkpoint import Checkpoint, open_folder, open_gguf
from octavo.loading.gguf import SPLIT_NAME


def open_model(name_or_path: str | os.PathLike[str], context: int | None = None) -> Checkpoint:
    """Opens a model without reading its weights: headers are checked, tensors are mapped.

    ``name_or_path`` is a ``.gguf`` file (any part of a split one), a Hugging Face folder, or the name of a pulled model
    (``smollm2-135m``, ``hf:ORG/NAME``).  ``context`` is the context length to serve, in tokens; ``None`` is the model's
    own.  Raises ModelError for files that are missing, damaged or of a kind that Octavo doesn't run, and ConfigError
    for a context longer than the model's.
    """
    return _open_path(find(name_or_path), context)


def find(name_or_path: str | os.PathLike[str]) -> Path:
    """The file or folder that a name or path means."""
    name = os.fspath(name_or_path)
    path = Path(name).expanduser()
    if isinstance(name, str) and not isinstance(name_or_path, Path):
        pulled = pull.path_of(name)
        if pulled is not None:
            return pulled
    if path.exists():
        return path
    if name.startswith("hf:") or name in pull.SHIPPED:
        raise ModelError(f"{name} is not pulled yet: run `octavo pull {name}` first")
    if isinstance(name_or_path, Path) or "/" in name or "\\" in name or name.endswith(".gguf"):
        raise ModelError(f"{name} doesn't exist; give a .gguf file, a Hugging Face folder or a pulled model's name")
    pulled_names = ", ".join(m.name for m in pull.list_models()) or "none"
    raise ModelError(
        f"there is no model {name!r:.200}: pulled are {pulled_names}; `octavo pull` knows "
        f"{', '.join(pull.SHIPPED)} and hf:ORG/NAME"
    )


def _open_path(path: Path, context: int | None) -> Checkpoint:
    if not path.is_dir():
        return open_gguf(path, context)
    if (path / "config.json").is_file():
        return open_folder(path, context)
    found = sorted(path.glob("*.gguf"))
    parts = [SPLIT_NAME.fullmatch(p.name) for p in found]
    first = [p for p, part in zip(found, parts, strict=True) if part is None or int(part[2]) == 1]
    if len(first) == 1:
        return open_gguf(first[0], context)
    if not found:
        raise ModelError(f"{path} has neither config.json nor a .gguf file")
    raise ModelError(f"{path} has several models; name one: {', '.join(p.name for p in first[:8])}")
