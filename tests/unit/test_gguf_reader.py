"""The GGUF reader against the gguf package, and against files that lie (R53's neighbours: a bad file is one error)."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

from octavo.errors import ModelError
from octavo.loading.gguf import TYPE_NAMES, GGUFFile, open_splits
from octavo.loading.tensor import TYPES

KEYS = 24  # where the first metadata entry begins


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str) -> bytes:
    return u64(len(value.encode())) + value.encode()


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + u32(len(dims)) + b"".join(map(u64, dims)) + u32(kind) + u64(offset)


def image(
    entries: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    data: bytes = b"",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file from its pieces; ``counts`` (tensors, keys) may lie."""
    entries, infos = entries or [], infos or []
    tensors, keys = counts or (len(infos), len(entries))
    head = b"GGUF" + u32(version) + u64(tensors) + u64(keys) + b"".join(entries) + b"".join(infos)
    return head + bytes(-len(head) % 32) + data


@pytest.fixture
def read(tmp_path: Path) -> Callable[[bytes], GGUFFile]:
    def open_bytes(raw: bytes) -> GGUFFile:
        path = tmp_path / "model.gguf"
        path.unlink(missing_ok=True)  # never write into a file that is mapped
        path.write_bytes(raw)
        return GGUFFile(path)

    return open_bytes


Read = Callable[[bytes], GGUFFile]


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a value of every type and a tensor of every type that gguf can write."""
    path = tmp_path_factory.mktemp("gguf") / "sample.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -100)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -30000)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -2_000_000_000)
    writer.add_uint64("u64", 1 << 63)
    writer.add_int64("i64", -(1 << 62))
    writer.add_float32("f32", 0.1)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "naïve 日本 👍🏽")
    writer.add_string("empty", "")
    writer.add_array("strings", ["a", "", "é" * 300, "\x00"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.5])
    writer.add_array("flags", [True, False])
    rng = np.random.default_rng(0)
    for kind in TYPES:
        if kind in ("Q4_K", "Q5_K", "Q6_K"):
            raw = rng.integers(0, 256, (3, 2 * TYPES[kind][1]), dtype=np.uint8)
        else:
            values = rng.standard_normal((3, 64)).astype(np.float32)
            raw = gguf.quants.quantize(values, GGMLQuantizationType[kind])
        if kind in ("F32", "F16"):
            writer.add_tensor(f"t.{kind}", raw)
        else:
            writer.add_tensor(f"t.{kind}", raw.view(np.uint8), raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("cube", rng.standard_normal((2, 3, 4, 5)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_reads_what_the_gguf_package_reads(sample: Path) -> None:
    ours, theirs = GGUFFile(sample), GGUFReader(sample)
    expected: dict[str, Any] = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert set(ours) == set(expected) and len(ours) == len(expected)
    for key, value in expected.items():
        found = ours[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, key
    assert ours.length("strings") == 4 and ours.length("numbers") == 3 and ours.length("text") == 0
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for t in theirs.tensors:
        entry = ours.tensors[t.name]
        assert entry.type == t.tensor_type.name and entry.shape == tuple(int(n) for n in t.shape[::-1])
        assert ours.bytes_of(entry).tobytes() == t.data.tobytes()


def test_tensor_bytes_are_views_of_the_file(sample: Path) -> None:
    file = GGUFFile(sample)
    part = file.bytes_of(file.tensors["t.Q4_K"])
    assert np.shares_memory(part, file.data) and not part.flags.writeable


def test_type_numbers_are_those_of_gguf() -> None:
    for kind in GGMLQuantizationType:
        assert TYPE_NAMES[int(kind)] == kind.name
    for name, (per, size) in TYPES.items():
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (per, size)


def test_arrays_in_arrays_and_long_strings(read: Read) -> None:
    inner = u32(int(GGUFValueType.STRING)) + u64(2) + text("x") + text("yy")
    nested = text("deep") + u32(9) + u32(9) + u64(2) + inner + u32(4) + u64(1) + u32(7)
    long = text("long") + u32(8) + text("z" * 100_000)
    file = read(image([nested, long]))
    assert file["deep"][0] == ["x", "yy"] and file["deep"][1].tolist() == [7]
    assert len(file["long"]) == 100_000


def test_version_2_reads_like_3(read: Read) -> None:
    assert read(image([text("a") + u32(7) + b"\x01"], version=2))["a"] is True


HUGE = (1 << 64) - 1
LIES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "magic": (b"GGML" + bytes(60), "not a GGUF"),
    "short": (b"GGUF", "ends? inside version|cut off"),
    "version 1": (image(version=1), "version 1"),
    "version 4": (image(version=4), "version 4"),
    "big endian": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    "tensor count": (image(counts=(HUGE, 0)), r"claims \d+ tensors"),
    "tensors that aren't there": (image(counts=(1, 0), data=bytes(64)), "dimensions|cut off"),
    "key count": (image(counts=(0, HUGE)), r"claims \d+ metadata"),
    "key length": (image([u64(HUGE) + b"a"]), "metadata key of"),
    "key beyond the end": (image([u64(60_000) + b"a"]), "cut off"),
    "key is not UTF-8": (image([u64(1) + b"\xff" + u32(7) + b"\x01"]), "not UTF-8"),
    "value type": (image([text("k") + u32(13)]), "unknown type 13.*metadata k"),
    "string length": (image([text("k") + u32(8) + u64(1 << 62) + b"a"]), "metadata k"),
    "array type": (image([text("k") + u32(9) + u32(77) + u64(1)]), "metadata k"),
    "array count": (image([text("k") + u32(9) + u32(0) + u64(1 << 40)]), "values in metadata k"),
    "array count overflows": (image([text("k") + u32(9) + u32(12) + u64(HUGE)]), "values in metadata k"),
    "string array count": (image([text("k") + u32(9) + u32(8) + u64(1 << 60)]), "values in metadata k"),
    "string in an array": (image([text("k") + u32(9) + u32(8) + u64(2) + u64(HUGE) + bytes(20)]), "metadata k"),
    "deep arrays": (image([text("k") + u32(9) + (u32(9) + u64(1)) * 9 + u32(0) + u64(0)]), "nested too deeply"),
    "key twice": (image([text("k") + u32(7) + b"\x01"] * 2), "'k' twice"),
    "alignment 0": (image([text("general.alignment") + u32(4) + u32(0)]), "general.alignment 0"),
    "alignment 3": (image([text("general.alignment") + u32(4) + u32(3)]), "general.alignment 3"),
    "alignment 2^31": (image([text("general.alignment") + u32(4) + u32(1 << 31)]), "general.alignment"),
    "alignment is text": (image([text("general.alignment") + u32(8) + text("32")]), "general.alignment '32'"),
    "no dimensions": (image(infos=[info("t", [])], data=bytes(64)), "tensor t has 0 dimensions"),
    "5 dimensions": (image(infos=[info("t", [1] * 5)], data=bytes(64)), "tensor t has 5 dimensions"),
    "zero dimension": (image(infos=[info("t", [4, 0])], data=bytes(64)), "tensor t has an empty shape"),
    "shape overflows": (image(infos=[info("t", [1 << 33, 1 << 31, 1 << 2])], data=bytes(64)), "tensor t ends beyond"),
    "rows not in blocks": (image(infos=[info("t", [33, 2], 8)], data=bytes(256)), "needs a multiple of 32"),
    "offset beyond": (image(infos=[info("t", [4], 0, 1 << 50)], data=bytes(64)), "tensor t ends beyond"),
    "offset unaligned": (image(infos=[info("t", [4], 0, 8)], data=bytes(64)), "multiple of the alignment"),
    "data cut": (image(infos=[info("t", [32])], data=bytes(127)), "tensor t ends beyond"),
    "tensor twice": (image(infos=[info("t", [4]), info("t", [4], 0, 32)], data=bytes(64)), "tensor t twice"),
    "overlap": (image(infos=[info("a", [16]), info("b", [4], 0, 32)], data=bytes(128)), "a and b in the same"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_that_names_file_and_thing(name: str, read: Read) -> None:
    raw, why = LIES[name]
    with pytest.raises(ModelError, match=why) as error:
        read(raw)
    assert "model.gguf" in str(error.value)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf doesn't exist"):
        GGUFFile(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="can't be read"):
        GGUFFile(tmp_path)


def test_a_bad_string_in_an_array_is_found_when_it_is_read(read: Read) -> None:
    file = read(image([text("k") + u32(9) + u32(8) + u64(1) + u64(2) + b"\xff\xfe"]))
    with pytest.raises(ModelError, match="metadata k that is not UTF-8"):
        file["k"]


def test_truncated_anywhere_is_an_error(sample: Path, read: Read) -> None:
    whole = sample.read_bytes()
    ends = {*range(0, 1024, 7), *range(1024, len(whole) - 32, 211)}
    for end in sorted(ends):
        with pytest.raises(ModelError):
            read(whole[:end])


def test_flipped_bytes_never_crash_hang_or_allocate(sample: Path, read: Read) -> None:
    """Any byte of the header may say anything: the answer is a file or a ModelError, at a small price."""
    whole = sample.read_bytes()
    header = GGUFReader(sample).data_offset
    rng = random.Random(7)
    tracemalloc.start()
    for trial in range(3000):
        raw = bytearray(whole)
        for _ in range(rng.choice((1, 1, 2, 8))):
            raw[rng.randrange(header)] = rng.choice((0, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            file = read(bytes(raw))
            for key in file:
                file[key]
            for entry in file.tensors.values():
                if entry.nbytes >= 0:
                    assert len(file.bytes_of(entry)) == entry.nbytes, trial
        except ModelError:
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 * len(whole)


def write_part(path: Path, number: int, count: int, total: int, names: list[str]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)
    writer.add_int32("split.tensors.count", total)
    for name in names:
        writer.add_tensor(name, np.full(4, len(name), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def split(folder: Path, count: int = 3) -> list[Path]:
    paths = [folder / f"m-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
    for i, path in enumerate(paths):
        write_part(path, i, count, count, [f"t{i}"])
    return paths


def test_a_split_model_opens_by_any_part(tmp_path: Path) -> None:
    for path in split(tmp_path):
        files = open_splits(path)
        assert [f.path.name for f in files] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
        assert [list(f.tensors) for f in files] == [["t0"], ["t1"], ["t2"]]


def test_split_models_that_lie(tmp_path: Path) -> None:
    paths = split(tmp_path)
    paths[1].rename(tmp_path / "away")
    with pytest.raises(ModelError, match=r"missing beside it: m-00002-of-00003\.gguf"):
        open_splits(paths[0])
    write_part(paths[1], 2, 3, 3, ["t1"])
    with pytest.raises(ModelError, match=r"part 2 \(from 0\), not 1 of 3"):
        open_splits(paths[0])
    paths[1].unlink()
    write_part(paths[1], 1, 3, 3, ["t0"])
    with pytest.raises(ModelError, match="tensor t0, which an earlier part has"):
        open_splits(paths[0])
    paths[1].unlink()
    write_part(paths[1], 1, 3, 3, ["t1", "t9"])
    with pytest.raises(ModelError, match="says 3 tensors for all 3 parts, but they have 4"):
        open_splits(paths[0])
    paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="one of 3 parts, but is not named like"):
        open_splits(tmp_path / "model.gguf")
