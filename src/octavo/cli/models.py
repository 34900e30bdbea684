"""``octavo pull``, ``list`` and ``rm``: the models in the cache."""

from __future__ import annotations

import sys
from pathlib import Path

from octavo.config import format_size
from octavo.engine.progress import load_bar
from octavo.errors import ModelError, OctavoError, RequestError
from octavo.loading import pull as cache


def fetch(name: str) -> Path:
    """Pulls a model unless it is there, with a progress bar; says once under which licence it comes."""
    path = cache.path_of(name)
    if path is None:
        with load_bar(True) as told:
            path = cache.pull(name, told)
    notice = cache.license_notice(name)
    if notice:
        print(notice, file=sys.stderr)
    return path


def pull(names: list[str]) -> int:
    for name in names:
        print(f"{name}: {fetch(name)}")
    return 0


def listed() -> int:
    models = cache.list_models()
    if not models:
        print(f"no models yet; `octavo pull` knows {', '.join(cache.SHIPPED)} and hf:ORG/NAME")
        return 0
    table = [("NAME", "SIZE", "TYPE", "LICENCE")]
    table += [(m.name, format_size(m.nbytes), kind_of(m.path), m.license) for m in models]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    for row in table:
        print(f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}")
    return 0


def kind_of(path: Path) -> str:
    """The types of a model's weights, the largest share first, and the form of its files: ``Q4_1 Q8_0 gguf``."""
    from octavo.cli.inspect import stored_types
    from octavo.loading import open_model

    try:
        checkpoint = open_model(path)
        types = list(stored_types(checkpoint))
    except OctavoError:
        return "damaged"
    # Norms are F32 in quantised models too; they say nothing about the weights.
    return " ".join([*(t for t in types if t != "F32" or len(types) == 1), checkpoint.format])


def remove(name: str, yes: bool) -> int:
    model = next((m for m in cache.list_models() if m.name == name), None)
    if model is None:
        cache.remove(name)  # raises, naming what is pulled
        raise ModelError(f"{name} is not a pulled model")
    if not yes:
        if not sys.stdin.isatty():
            raise RequestError(f"removing {name} needs a yes: run `octavo rm --yes {name}`", "yes")
        answer = input(f"remove {name} ({format_size(model.nbytes)})? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            print("kept")
            return 1
    freed = cache.remove(name)
    print(f"removed {name}, {format_size(freed)} freed")
    return 0
