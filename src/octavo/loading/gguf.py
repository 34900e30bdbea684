"""A reader of GGUF files that trusts nothing in them (format: ggml's docs/gguf.md, versions 2 and 3, little-endian).

Counts, lengths and offsets are checked against the size of the file before they are used, so that a file that lies
costs an error, not memory or time.  Long arrays (a vocabulary) are stepped over at first and decoded when asked for.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from octavo.errors import ModelError
from octavo.loading.mapped import Entry, MappedFile
from octavo.loading.tensor import TYPES

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 17
MAX_NAME = 1 << 16  # bytes of a key or of a tensor's name
MAX_DEPTH = 4  # arrays in arrays
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20
MAX_SPLITS = 9999

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
STRING, ARRAY = 8, 9
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: U32,
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: U64,
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
DTYPES = {k: np.dtype("?" if k == 7 else s.format) for k, s in SCALARS.items()}

TYPE_NAMES = dict(
    enumerate(
        "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S "
        "IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 "
        "IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4 Q1_0".split()
    )
)


@dataclass(frozen=True)
class _Array:
    """An array in the file that nobody has asked for yet."""

    kind: int
    count: int
    start: int


class GGUFFile(MappedFile, Mapping[str, Any]):
    """One GGUF file: a mapping of its metadata.

    Owns: the memory map.  Promises: every entry's bytes lie inside the file, apart from each other; strings come as
    ``str``, arrays of strings as lists, arrays of numbers as read-only NumPy arrays.  Raises ModelError with the
    file's path for everything that isn't as the format says.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._buffer = memoryview(self.data.data)
        self._size = len(self._buffer)
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, Entry] = {}
        self._read()

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Array):
            value = self._values[key] = self._decode(value, f"metadata {key}")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def length(self, key: str) -> int:
        """How many values an array of the metadata has, without decoding it; 0 where there is no such array."""
        value = self._values.get(key)
        if isinstance(value, _Array):
            return value.count
        return len(value) if isinstance(value, (list, np.ndarray)) else 0

    # -- header ----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        if bytes(self._buffer[:4]) != b"GGUF":
            self._fail("is not a GGUF file (it doesn't begin with 'GGUF')")
        version = self._number(U32, 4, "version")
        if version & 0xFFFF == 0:
            self._fail("is a big-endian GGUF file; convert it to little-endian")
        if version not in (2, 3):
            self._fail(f"has GGUF version {version}; versions 2 and 3 can be read")
        tensors = self._number(U64, 8, "tensor count")
        keys = self._number(U64, 16, "metadata count")
        # 13 bytes are the shortest metadata entry, 32 the shortest description of a tensor.
        if keys > min(MAX_KEYS, self._size // 13):
            self._fail(f"claims {keys} metadata entries, more than it has room for")
        if tensors > min(MAX_TENSORS, self._size // 32):
            self._fail(f"claims {tensors} tensors, more than it has room for")
        at = 24
        for _ in range(keys):
            at = self._metadata(at)
        alignment = self._values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            self._fail(f"has general.alignment {alignment!r:.40}, not a power of two up to {MAX_ALIGNMENT}")
        infos = []
        for _ in range(tensors):
            info, at = self._info(at)
            infos.append(info)
        self._place(infos, -(-at // alignment) * alignment, alignment)

    def _metadata(self, at: int) -> int:
        key, at = self._string(at, "metadata key", MAX_NAME)
        if key in self._values:
            self._fail(f"has metadata {key!r:.80} twice")
        kind = self._number(U32, at, f"metadata {key}")
        value, at = self._value(kind, at + 4, f"metadata {key:.80}")
        self._values[key] = value
        return at

    def _value(self, kind: int, at: int, what: str) -> tuple[Any, int]:
        if kind == STRING:
            return self._string(at, what, self._size)
        if kind == ARRAY:
            inner, count = self._number(U32, at, what), self._number(U64, at + 4, what)
            return _Array(inner, count, at + 12), self._skip(inner, count, at + 12, what, 1)
        scalar = SCALARS.get(kind)
        if scalar is None:
            self._fail(f"has a value of unknown type {kind} at {what}")
        return self._number(scalar, at, what), at + scalar.size

    def _info(self, at: int) -> tuple[tuple[str, str, tuple[int, ...], int], int]:
        name, at = self._string(at, "tensor name", MAX_NAME)
        what = f"tensor {name:.80}"
        dims = self._number(U32, at, what)
        if not 1 <= dims <= MAX_DIMS:
            self._fail(f"{what} has {dims} dimensions, not 1 to {MAX_DIMS}")
        shape = tuple(self._number(U64, at + 4 + 8 * i, what) for i in range(dims))
        at += 4 + 8 * dims
        number = self._number(U32, at, what)
        return (name, TYPE_NAMES.get(number, f"number {number}"), shape[::-1], self._number(U64, at + 4, what)), at + 12

    def _place(self, infos: list[tuple[str, str, tuple[int, ...], int]], base: int, alignment: int) -> None:
        """Checks that each tensor's bytes are in the file and nobody else's."""
        for name, kind, shape, offset in infos:
            what = f"tensor {name:.80}"
            if name in self.tensors:
                self._fail(f"has {what} twice")
            if min(shape) < 1:
                self._fail(f"{what} has an empty shape {shape}")
            if offset % alignment:
                self._fail(f"{what} begins at {offset}, which is not a multiple of the alignment {alignment}")
            nbytes = -1
            if kind in TYPES:
                per, size = TYPES[kind]
                if shape[-1] % per:
                    self._fail(f"{what} has rows of {shape[-1]} weights, but {kind} needs a multiple of {per}")
                nbytes = product(shape) // per * size
            if base + offset + max(nbytes, 1) > self._size:
                self._fail(f"is cut off or lies: {what} ends beyond its {self._size} bytes")
            self.tensors[name] = Entry(name, kind, shape, base + offset, nbytes)
        end, last = base, ""
        for entry in sorted(self.tensors.values(), key=lambda e: e.start):
            if entry.start < end:
                self._fail(f"has tensors {last:.80} and {entry.name:.80} in the same bytes")
            end, last = entry.start + max(entry.nbytes, 1), entry.name

    # -- values ----------------------------------------------------------------------------------------------------

    def _number(self, form: struct.Struct, at: int, what: str) -> Any:
        try:
            return form.unpack_from(self._buffer, at)[0]
        except (struct.error, OverflowError):
            self._cut(what)

    def _string(self, at: int, what: str, limit: int) -> tuple[str, int]:
        length = self._number(U64, at, what)
        if length > limit:
            self._fail(f"has {what} of {length} bytes, more than {limit}")
        end = at + 8 + length
        if end > self._size:
            self._cut(what)
        return self._text(self._buffer[at + 8 : end], what), end

    def _text(self, raw: memoryview, what: str) -> str:
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            self._fail(f"has {what} that is not UTF-8")

    def _skip(self, kind: int, count: int, at: int, what: str, depth: int) -> int:
        """Where an array ends.  Its count is held against what is left of the file before anything is counted."""
        room = self._size - at
        if kind in SCALARS:
            size = SCALARS[kind].size * count
            if size > room:
                self._fail(f"claims {count} values in {what}, more than it has room for")
            return at + size
        least = 8 if kind == STRING else 12
        if kind not in (STRING, ARRAY) or depth > MAX_DEPTH:
            self._fail(f"has {what} as an array of unknown type {kind} or nested too deeply")
        if count * least > room:
            self._fail(f"claims {count} values in {what}, more than it has room for")
        if kind == STRING:
            at = self._skip_strings(count, at, what)
        else:
            for _ in range(count):
                inner, n = self._number(U32, at, what), self._number(U64, at + 4, what)
                at = self._skip(inner, n, at + 12, what, depth + 1)
        if at > self._size:
            self._cut(what)
        return at

    def _skip_strings(self, count: int, at: int, what: str) -> int:
        read, buffer = U64.unpack_from, self._buffer  # 300,000 times in a Gemma: no attribute look-ups in the loop
        try:
            for _ in range(count):
                at += read(buffer, at)[0] + 8
        except (struct.error, OverflowError):
            self._cut(what)
        return at

    def _decode(self, array: _Array, what: str) -> Any:
        if array.kind in SCALARS:
            values = np.frombuffer(self._buffer, DTYPES[array.kind], array.count, array.start) if array.count else None
            return np.empty(0, DTYPES[array.kind]) if values is None else values
        at = array.start
        if array.kind == STRING:
            return self._strings(bytes(self._buffer[at : self._skip_strings(array.count, at, what)]), what)
        out: list[Any] = []
        for _ in range(array.count):
            inner, n = self._number(U32, at, what), self._number(U64, at + 4, what)
            out.append(self._decode(_Array(inner, n, at + 12), what))
            at = self._skip(inner, n, at + 12, what, 1)
        return out

    def _strings(self, raw: bytes, what: str) -> list[str]:
        """The strings of an array that has been stepped over once, so that its lengths are known to be good."""
        read, at, out = U64.unpack_from, 0, []
        try:
            while at < len(raw):
                begin = at + 8
                at = begin + read(raw, at)[0]
                out.append(raw[begin:at].decode())
        except UnicodeDecodeError:
            self._fail(f"has a string in {what} that is not UTF-8")
        return out

    def _cut(self, what: str) -> NoReturn:
        self._fail(f"is cut off or lies about a length: its {self._size} bytes end inside {what:.120}")

    def _fail(self, why: str) -> NoReturn:
        raise ModelError(f"{self.path} {why}")


def product(shape: tuple[int, ...]) -> int:
    """Number of weights; Python's integers, so that no shape overflows."""
    n = 1
    for d in shape:
        n *= d
    return n


SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


def open_splits(path: Path) -> list[GGUFFile]:
    """The file, or all parts of the split model that it is a part of (``name-00001-of-00003.gguf``), in order."""
    first = GGUFFile(path)
    count = first.get("split.count", 0)
    if type(count) is not int or count <= 1:
        return [first]
    name = SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[3]) != count or count > MAX_SPLITS:
        raise ModelError(f"{path} is one of {count!r:.20} parts, but is not named like NAME-00001-of-{count:05}.gguf")
    paths = [path.with_name(f"{name[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise ModelError(f"{path} is one of {count} parts; missing beside it: {', '.join(missing[:5])}")
    files = [first if p == path else GGUFFile(p) for p in paths]
    names: set[str] = set()
    for i, file in enumerate(files):
        if file.get("split.no") != i or file.get("split.count") != count:
            raise ModelError(f"{file.path} says that it is part {file.get('split.no')} (from 0), not {i} of {count}")
        twice = names & file.tensors.keys()
        if twice:
            raise ModelError(f"{file.path} has tensor {min(twice)}, which an earlier part has too")
        names |= file.tensors.keys()
    total = files[0].get("split.tensors.count", len(names))
    if total != len(names):
        raise ModelError(f"{files[0].path} says {total} tensors for all {count} parts, but they have {len(names)}")
    return files
