"""A reader of safetensors files (format: huggingface/safetensors), sharded or not, that trusts nothing in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ModelError
from octavo.loading.gguf import product
from octavo.loading.mapped import Entry, MappedFile
from octavo.loading.tensor import TYPES

MAX_HEADER = 100_000_000  # bytes, the format's own limit
MAX_TENSORS = 1 << 17
MAX_DIMS = 8
DTYPES = ("F32", "F16", "BF16")
INDEX = "model.safetensors.index.json"


class SafetensorsFile(MappedFile):
    """One safetensors file.

    Owns: the memory map.  Promises: every entry's bytes lie inside the file, apart from each other, and their count
    agrees with type and shape; tensors of other types are listed with ``nbytes`` -1.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.tensors: dict[str, Entry] = {}
        size = len(self.data)
        length = int.from_bytes(self.data[:8].tobytes(), "little")
        if size < 8 or length > size - 8:
            raise self._fail(f"is cut off or not a safetensors file: its header of {length} bytes isn't there")
        if length > MAX_HEADER:
            raise self._fail(f"has a header of {length} bytes, more than {MAX_HEADER}")
        header = parse_json(self.data[8 : 8 + length].tobytes(), str(path))
        header.pop("__metadata__", None)
        if len(header) > MAX_TENSORS:
            raise self._fail(f"claims {len(header)} tensors, more than {MAX_TENSORS}")
        for name, info in header.items():
            self.tensors[name] = self._entry(name, info, 8 + length, size)
        self._check_apart()

    def _entry(self, name: str, info: Any, base: int, size: int) -> Entry:
        what = f"tensor {name:.80}"
        if not isinstance(info, dict) or not {"dtype", "shape", "data_offsets"} <= info.keys():
            raise self._fail(f"describes {what} without dtype, shape and data_offsets")
        dtype, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
        if not isinstance(dtype, str) or not _counts(shape, MAX_DIMS) or not _counts(offsets, 2) or len(offsets) != 2:
            raise self._fail(f"describes {what} by values of the wrong kind")
        begin, end = offsets
        if begin > end or base + end > size:
            raise self._fail(f"is cut off or lies: {what} ends beyond its {size} bytes")
        if dtype not in DTYPES:
            return Entry(name, dtype, tuple(shape), base + begin, -1)
        nbytes = product(tuple(shape)) * TYPES[dtype][1]
        if nbytes != end - begin:
            raise self._fail(f"gives {what} {end - begin} bytes, but {dtype} of shape {tuple(shape)} needs {nbytes}")
        return Entry(name, dtype, tuple(shape), base + begin, nbytes)

    def _check_apart(self) -> None:
        end, last = 0, ""
        for entry in sorted(self.tensors.values(), key=lambda e: (e.start, e.nbytes)):
            if entry.nbytes > 0:
                if entry.start < end:
                    raise self._fail(f"has tensors {last:.80} and {entry.name:.80} in the same bytes")
                end, last = entry.start + entry.nbytes, entry.name

    def _fail(self, why: str) -> ModelError:
        return ModelError(f"{self.path} {why}")


def open_shards(folder: Path) -> list[SafetensorsFile]:
    """All weight files of a Hugging Face folder, the index's when there is one."""
    index = folder / INDEX
    if index.exists():
        return list(_indexed(folder, index))
    single = folder / "model.safetensors"
    if single.exists():
        return [SafetensorsFile(single)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        others = sorted(p.name for p in folder.glob("*.bin"))
        hint = f" ({others[0]} is a pickle, which Octavo doesn't load: save it as safetensors)" if others else ""
        raise ModelError(f"{folder} has no .safetensors file{hint}")
    if len(found) > 1:
        raise ModelError(f"{folder} has {len(found)} .safetensors files but no {INDEX} that says how they join")
    return [SafetensorsFile(found[0])]


def _indexed(folder: Path, index: Path) -> Iterator[SafetensorsFile]:
    where = read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ModelError(f"{index} has no weight_map")
    names: dict[str, set[str]] = {}
    for tensor, name in where.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelError(f"{index} puts tensor {tensor:.80} into {name!r:.80}, which is not a file beside it")
        names.setdefault(name, set()).add(tensor)
    seen: set[str] = set()
    for name in sorted(names):
        if not (folder / name).exists():
            raise ModelError(f"{folder / name} doesn't exist, but {INDEX} names it")
        file = SafetensorsFile(folder / name)
        lost = names[name] - file.tensors.keys()
        if lost:
            raise ModelError(f"{file.path} lacks tensor {min(lost):.80}, which {INDEX} puts there")
        twice = seen & file.tensors.keys()
        if twice:
            raise ModelError(f"{file.path} has tensor {min(twice):.80}, which an earlier shard has too")
        seen |= file.tensors.keys()
        yield file


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as e:
        raise ModelError(f"{path} can't be read: {e.strerror}") from None


def parse_json(raw: bytes, source: str) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{source} holds no valid JSON: {e!s:.120}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source} holds JSON that is not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [k for k, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1):.80} is there twice")
    return found


def _counts(value: Any, most: int) -> bool:
    """Whether a value from JSON is a list of at most ``most`` integers from 0."""
    return isinstance(value, list) and len(value) <= most and all(type(v) is int and 0 <= v < 1 << 62 for v in value)
