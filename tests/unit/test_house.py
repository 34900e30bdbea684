"""The house: imports point the way they should, and what the documents name is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "bench" / "NOTES.md"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """Lines of the README's shell blocks that run a program, as arguments; comments and pipes cut off."""
    found = []
    for line in "\n".join(blocks("sh")).splitlines():
        for part in line.split("|"):
            words = shlex.split(part, comments=True)
            if words and words[0] == program:
                found.append(words[1:])
    return found


def test_import_contracts() -> None:
    program = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_readme_names_commands_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every ``octavo`` line parses: the command is there, and so is each option."""
    import typer

    from octavo.cli.app import app

    command: Any = typer.main.get_command(app)
    seen = commands("octavo")
    assert len(seen) > 8
    for words in seen:
        name, *arguments = words
        command.commands[name].make_context(name, list(arguments))


def test_the_readme_names_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {words[0] for words in commands("make")}
    assert {"demo", "test"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_settings_that_the_readme_lists() -> None:
    """The table of settings has every field of EngineConfig with its default, and no other."""
    from dataclasses import fields

    from octavo.config import EngineConfig

    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", README, re.MULTILINE)
    assert dict(rows) == {f.name: repr(f.default).replace("'", '"') for f in fields(EngineConfig)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_what_exists(document: Path) -> None:
    """Files in backticks are there; `module.name` of octavo's can be found in that module's source."""
    text = document.read_text(encoding="utf-8")
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w./-]+\.(?:py|cpp|h|md|toml|txt))`", outside):
        places = (ROOT / name, ROOT / "src/octavo" / name, ROOT / "csrc" / name)
        assert any(p.exists() for p in places), f"{document.name} names {name}"
    for folder in re.findall(r"`((?:src|tests|docs|csrc|bench|examples)/[\w/]*)`", outside):
        assert (ROOT / folder).exists() or folder == "bench/out/", f"{document.name} names {folder}"
    for file, name in re.findall(r"`([\w/]+\.(?:py|cpp|h)):(\w+)`", outside):
        places = [p for p in (ROOT / file, ROOT / "src/octavo" / file, ROOT / "csrc" / file) if p.exists()]
        assert places, f"{document.name} names {file}"
        assert re.search(rf"\b{name}\b", places[0].read_text(encoding="utf-8")), (
            f"{document.name}: {file} has no {name}"
        )
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_examples_are_short() -> None:
    examples = sorted((ROOT / "examples").glob("*.py"))
    assert len(examples) >= 3
    for example in examples:
        assert len(example.read_text(encoding="utf-8").splitlines()) < 40, example


def test_files_fit_in_one_sitting() -> None:
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    long = [str(p) for p in sources if len(p.read_text(encoding="utf-8").splitlines()) > 600]
    assert not long
