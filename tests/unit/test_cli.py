"""The command line as a stranger uses it: help, errors of one line, each command on a tiny model."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from conftest import TinyModels
from octavo import LLM, SamplingParams
from octavo.cli import main
from octavo.cli.options import ENGINE, SAMPLING
from octavo.config import EngineConfig

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
SMALL = ["--kv-blocks", "64", "--threads", "1"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder without models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "octavo" / "models"


@pytest.fixture
def model(tiny_models: TinyModels) -> str:
    return str(tiny_models.gguf("llama", "Q8_0"))


@pytest.fixture
def chatty(tiny_models: TinyModels, tmp_path: Path) -> str:
    """A Hugging Face folder with a chat template."""
    folder = tmp_path / "chatty"
    shutil.copytree(tiny_models.folder("llama"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


@pytest.fixture
def octavo(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command in this process; gives its exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def alone(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own."""
    command = [sys.executable, "-m", "octavo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


# ---- help and options ------------------------------------------------------------------------------------------------


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; from octavo.cli import main; main(['--help']); main(['generate', '--help'])\n"
        "heavy = {'numpy', 'tokenizers', 'jinja2', 'gguf', 'huggingface_hub', 'octavo.engine', 'octavo.kernels'}\n"
        "sys.exit(f'loaded: {sorted(heavy & set(sys.modules))}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout and "--top-k" in done.stdout


@pytest.mark.parametrize(("table", "settings"), [(ENGINE, EngineConfig), (SAMPLING, SamplingParams)])
def test_every_setting_is_an_option(table: Any, settings: Any) -> None:
    assert sorted(flag.field for flag in table) == sorted(f.name for f in fields(settings))


def test_only_what_is_given_is_set(monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    """Defaults stay where they are written: options that are not given do not reach the engine."""
    import octavo.cli.generate as command

    seen: dict[str, Any] = {}
    monkeypatch.setattr(command, "run", lambda model, prompts, **given: seen.update(given))
    octavo("generate", "m", "p")
    assert seen["engine"] == {} and seen["sampling"] == {}
    octavo(
        *(
            "generate",
            "m",
            "p",
            "--no-prefix-cache",
            "--kv-memory",
            "1GiB",
            "--top-k",
            "3",
            "--stop",
            "a",
            "--stop",
            "b",
        ),
        *("--logit-bias", "5=-100", "--logit-bias", "7=2.5", "--ignore-eos", "--no-skip-special-tokens", "-n", "2"),
    )
    assert seen["engine"] == {"prefix_cache": False, "kv_memory": "1GiB"}
    assert seen["sampling"] == {
        "top_k": 3,
        "stop": ["a", "b"],
        "logit_bias": {5: -100.0, 7: 2.5},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "n": 2,
    }
    EngineConfig.of(**seen["engine"])
    SamplingParams(**seen["sampling"])


def test_a_guide_on_the_command_line(monkeypatch: pytest.MonkeyPatch, octavo: Any, tmp_path: Path) -> None:
    import octavo.cli.generate as command
    from octavo.core.guide import Guide

    seen: dict[str, Any] = {}
    monkeypatch.setattr(command, "run", lambda model, prompts, **given: seen.update(given["sampling"]))
    (tmp_path / "schema.json").write_text('{"type": "array"}', encoding="utf-8")
    for text, guide in [
        ("json", Guide.json()),
        ('json={"type": "array"}', Guide.json({"type": "array"})),
        (f"json=@{tmp_path}/schema.json", Guide.json({"type": "array"})),
        ("regex=a=b", Guide.regex("a=b")),
        ("choice=yes|no", Guide.choice(["yes", "no"])),
        ('lark=start: "a"', Guide.lark('start: "a"')),
    ]:
        assert octavo("generate", "m", "p", "--guide", text)[0] == 0
        assert seen["guide"] == guide


def test_version(octavo: Any) -> None:
    import octavo as package

    assert octavo("--version")[:2] == (0, package.__version__ + "\n")


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("nonsense",), 2, "nonsense"),
        (("generate",), 2, "MODEL"),
        (("generate", "MODEL", "hi", "--no-such-option"), 2, "--no-such-option"),
        (("generate", "MODEL", "hi", "--top-k", "many"), 2, "--top-k"),
        (("generate", "MODEL", "hi", "--top-p", "7"), 2, "top_p"),
        (("generate", "MODEL", "hi", "--temperature", "nan"), 2, "temperature"),
        (("generate", "MODEL", "hi", "--logit-bias", "x"), 2, "logit_bias"),
        (("generate", "MODEL", "hi", "--guide", "xml=x"), 2, "choice=A|B"),
        (("generate", "MODEL", "hi", "--guide", "json=@no/such/file"), 2, "no/such/file"),
        (("generate", "MODEL", "hi", "--guide", "regex=("), 2, "regex cannot be used"),
        (("generate", "MODEL", "hi", "--stop-token-ids", "1000000000000"), 2, "1000000000000"),
        (("generate", "MODEL", "hi", "--kv-blocks", "0"), 2, "kv_blocks"),
        (("generate", "MODEL", "hi", "--kv-memory", "-1GiB"), 2, "kv_memory"),
        (("generate", "MODEL", "hi", "--kv-memory", "900TiB"), 2, "beyond"),
        (("generate", "MODEL", "hi", "--kv-memory", "lots"), 2, "kv_memory"),
        (("generate", "MODEL", "hi", "--isa", "z80"), 2, "z80"),
        (("generate", "MODEL", "hi", "--threads", "0"), 2, "threads"),
        (("generate", "MODEL", "hi", "--max-context", "99999999"), 2, "99999999"),
        (("generate", "MODEL", "hi", "--kv-blocks", "4", "-m", "400"), 2, "400"),
        (("generate", "MODEL", ""), 2, "prompt is empty"),
        (("generate", "MODEL", "hi", "--file", "x"), 2, "--file"),
        (("generate", "MODEL", "--file", "no/such/file"), 2, "no/such/file"),
        (("generate", "no-such-model", "hi"), 2, "no-such-model"),
        (("generate", "no/such.gguf", "hi"), 2, "no/such.gguf"),
        (("generate", "smollm2-135m", "hi"), 2, "octavo pull smollm2-135m"),
        (("generate", "MODEL", "hi", "--template"), 2, "chat template"),
        (("generate", "MODEL", "hi", "--system", "x"), 2, "--system"),
        (("chat", "MODEL"), 2, "chat template"),
        (("inspect", "MODEL", "--length", "0"), 2, "--length"),
        (("replay", "no/such/file"), 2, "no/such/file"),
        (("replay",), 2, "FILE"),
        (("replay", "x", "--concurrency", "0"), 2, "--concurrency"),
        (("rm", "no-such-model"), 2, "no-such-model"),
        (("pull", "no-such-model"), 1, "no-such-model"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], code: int, words: str, model: str, octavo: Any) -> None:
    given = [model if a == "MODEL" else a for a in arguments]
    got, out, err = octavo(*given, *(SMALL[2:] if "--threads" not in given and given[0] == "generate" else []))
    assert (got, out) == (code, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err and "fault in Octavo" not in err


def test_damaged_models(tmp_path: Path, octavo: Any, model: str) -> None:
    whole = Path(model).read_bytes()
    for name, data in {"empty": b"", "text": b"hello", "cut": whole[: len(whole) // 2]}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        for command in ("generate", "inspect"):
            code, out, err = octavo(command, str(path), *(["hi"] if command == "generate" else []))
            assert (code, out, err.count("\n")) == (2, "", 1) and str(path) in err


def test_debug_shows_where(octavo: Any) -> None:
    code, _, err = octavo("inspect", "nothing", "--debug")
    assert code == 2 and "Traceback" in err and err.splitlines()[-1].startswith("error: ")


def test_a_reader_that_leaves(model: str) -> None:
    command = [sys.executable, "-m", "octavo", "generate", model, "hi", "-m", "40", "--ignore-eos", *SMALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        err = process.stderr.read().decode()
    assert process.returncode == 1 and "Traceback" not in err and "Exception" not in err


# ---- generate --------------------------------------------------------------------------------------------------------


def expected(model: str, prompts: list[str], **params: Any) -> list[str]:
    with LLM(model, kv_blocks=64, threads=1) as llm:
        return [o.outputs[0].text for o in llm.generate(prompts, SamplingParams(**params))]


def test_one_prompt_is_streamed(model: str, octavo: Any) -> None:
    (text,) = expected(model, ["Once upon"], temperature=0.0, max_tokens=20)
    assert octavo("generate", model, "Once upon", "-t", "0", "-m", "20", *SMALL) == (0, text + "\n", "")


def test_text_comes_as_it_is_made(model: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(sys.stdout, "write", pieces.append)
    octavo("generate", model, "Once upon", "-t", "0", "-m", "20", "--ignore-eos", *SMALL)
    assert len(pieces) > 5


def test_many_prompts_and_json(model: str, octavo: Any, tmp_path: Path) -> None:
    prompts = ["Once upon", "The second", "A third one"]
    texts = expected(model, prompts, seed=5, max_tokens=12)
    options = ["--seed", "5", "-m", "12", *SMALL]
    code, out, err = octavo("generate", model, *prompts, *options)
    assert (code, err) == (0, "") and out == "".join(
        f"> {p}\n{t.strip()}\n\n" for p, t in zip(prompts, texts, strict=True)
    )

    lines, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    lines.write_text("\n".join(prompts) + "\n\n", encoding="utf-8")
    objects.write_text("\n".join([json.dumps({"prompt": prompts[0]}), *map(json.dumps, prompts[1:])]), encoding="utf-8")
    for file in (lines, objects):
        code, out, err = octavo("generate", model, "--file", str(file), "--json", "--logprobs", "2", *options)
        records = [json.loads(line) for line in out.splitlines()]
        assert [(r["prompt"], r["outputs"][0]["text"], r["seed"]) for r in records] == [
            (p, t, 5) for p, t in zip(prompts, texts, strict=True)
        ]
        first = records[0]["outputs"][0]
        assert first["tokens"] == len(first["token_ids"]) == len(first["logprobs"]) == 12
        assert all(
            str(t) in entry and len(entry) >= 2 for t, entry in zip(first["token_ids"], first["logprobs"], strict=True)
        )


def test_standard_input_is_one_prompt(model: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    (text,) = expected(model, ["two\nlines\n"], temperature=0.0, max_tokens=8)
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert octavo("generate", model, "-t", "0", "-m", "8", *SMALL)[:2] == (0, text + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(" \n"))
    code, _, err = octavo("generate", model)
    assert code == 2 and "standard input" in err


def test_the_chat_template_is_used_if_there_is_one(chatty: str, octavo: Any) -> None:
    options = ["-t", "0", "-m", "8", *SMALL]
    (raw,) = expected(chatty, ["hello"], temperature=0.0, max_tokens=8)
    (templated,) = expected(chatty, ["[system] Be brief.\n[user] hello\n[assistant] "], temperature=0.0, max_tokens=8)
    assert octavo("generate", chatty, "hello", "--no-template", *options)[1] == raw + "\n"
    assert octavo("generate", chatty, "hello", "--system", "Be brief.", *options)[1] == templated + "\n"


def test_progress_ends_with_a_summary(model: str, octavo: Any) -> None:
    code, _, err = octavo("generate", model, "one", "two", "-p", "-m", "8", "--ignore-eos", *SMALL)
    assert (
        code == 0 and "answered with 16 tokens" in err and "tokens a second" in err and "of 64 used at the peak" in err
    )


def test_verbose_logs_and_silence(model: str, octavo: Any) -> None:
    loud = octavo("generate", model, "hi", "-m", "2", "-v", *SMALL)[2]
    assert "engine: " in loud and "KV cache" in loud
    assert octavo("generate", model, "hi", "-m", "2", *SMALL)[2] == ""
    code = f"import logging, octavo; octavo.LLM({model!r}, kv_blocks=9, threads=1)\n"
    code += "logging.getLogger('octavo.x').error('x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# ---- chat ------------------------------------------------------------------------------------------------------------


def chat(octavo: Any, monkeypatch: pytest.MonkeyPatch, model: str, *lines: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    result: tuple[int, str, str] = octavo("chat", model, "-t", "0", "-m", "16", "--ignore-eos", *SMALL)
    return result


def test_chat_keeps_the_conversation(chatty: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    code, out, err = chat(
        octavo, monkeypatch, chatty, "hello", "and again", "/stats", "/nope", "/help", "/quit", "never"
    )
    assert (code, err) == (0, "")
    head = "[user] hello\n[assistant] "
    (first,) = expected(chatty, [head], temperature=0.0, max_tokens=16, ignore_eos=True)
    (second,) = expected(
        chatty, [f"{head}{first}\n[user] and again\n[assistant] "], temperature=0.0, max_tokens=16, ignore_eos=True
    )
    assert out.startswith(f"{first}\n{second}\nlast answer: ")
    cached = int(out.split("prompt tokens, ")[1].split()[0])
    assert cached >= 16  # the first turn's blocks
    assert "no command /nope" in out and "/reset" in out


def test_chat_reset(chatty: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    out = chat(octavo, monkeypatch, chatty, "hello", "/reset", "hello")[1]
    answer, again = out.split("(a new conversation)\n")
    assert answer == again != ""


def test_chat_goes_on_after_a_refused_turn(chatty: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    code, out, err = chat(octavo, monkeypatch, chatty, "long " * 3000, "hello")
    (text,) = expected(chatty, ["[user] hello\n[assistant] "], temperature=0.0, max_tokens=16, ignore_eos=True)
    assert code == 0 and err.startswith("error: ") and "tokens exceed" in err and "/reset" in err and out == text + "\n"


def test_interrupt_stops_the_answer_not_the_chat(chatty: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    import octavo.cli.chat as command

    shown: list[str] = []

    def write(text: str) -> None:
        shown.append(text)
        if len(shown) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "_write", write)
    code, out, err = chat(octavo, monkeypatch, chatty, "hello", "/stats")
    assert (code, err) == (0, "[stopped]\n") and "blocks 0 used" in out
    assert len(shown) <= 5


# ---- models on disk --------------------------------------------------------------------------------------------------


def put(home: Path, name: str, model: str) -> Path:
    """A model in the cache, as a pull leaves it."""
    folder = home / name
    folder.mkdir(parents=True)
    shutil.copy(model, folder / "model.gguf")
    card = {"name": name, "license": "MIT", "nbytes": Path(model).stat().st_size, "file": "model.gguf"}
    (folder / "octavo.json").write_text(json.dumps(card), encoding="utf-8")
    return folder


def test_list_and_rm(home: Path, model: str, monkeypatch: pytest.MonkeyPatch, octavo: Any) -> None:
    code, out, _ = octavo("list")
    assert code == 0 and "octavo pull" in out
    folder = put(home, "smollm2-135m", model)
    name, _, _, kind, form, licence = octavo("list")[1].splitlines()[1].split()
    assert (name, kind, form, licence) == ("smollm2-135m", "Q8_0", "gguf", "MIT")
    assert octavo("pull", "smollm2-135m")[:2] == (0, f"smollm2-135m: {folder / 'model.gguf'}\n")
    assert octavo("generate", "smollm2-135m", "hi", "-m", "2", *SMALL)[0] == 0

    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    code, _, err = octavo("rm", "smollm2-135m")
    assert code == 2 and "--yes" in err and folder.exists()
    assert octavo("rm", "--yes", "smollm2-135m")[0] == 0 and not folder.exists()


def test_the_licence_is_said_once(home: Path, model: str, octavo: Any) -> None:
    put(home, "smollm2-135m", model)
    assert "licence: MIT" in octavo("pull", "smollm2-135m")[2]
    assert octavo("pull", "smollm2-135m")[2] == ""


def test_inspect_counts_without_loading(model: str, octavo: Any) -> None:
    from octavo.loading import open_model

    spec = open_model(model).spec
    code, out, err = octavo("inspect", model, "--kv-blocks", "10", "--length", "33")
    shown = {line[:16].strip(): line[17:].strip() for line in out.splitlines() if line and line[0] != " "}
    assert (code, err) == (0, "")
    each = len(spec.layers) * 2 * spec.kv_heads * spec.head_dim * 2
    assert shown["bytes a token"].startswith(f"{each:,} ")
    assert shown["tokens that fit"] == "160" and shown["longest request"].startswith("160 tokens")
    assert shown["of 33 tokens"] == "3 requests at a time"  # of three blocks each
    assert "Q8_0" in out and "set by kv_blocks" in out
    assert "chosen" in octavo("inspect", model)[1]


def test_doctor(octavo: Any) -> None:
    code, out, _ = octavo("doctor")
    assert code == 0
    for words in ("instruction set", "scalar", "threads", "memory", "models", "numpy"):
        assert words in out


def test_bench(model: str, octavo: Any) -> None:
    code, out, _ = octavo("bench", model, "--prompt", "20", "--output", "4", "--requests", "3", *SMALL)
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["prefill", "decode", "batch", "blocks"]


def test_in_a_process_of_its_own(model: str) -> None:
    """The installed command, no terminal, no standard input."""
    done = alone(
        "generate", model, "hi", "-m", "4", *SMALL, stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 0 and done.stdout.endswith("\n") and done.stderr == ""
    done = alone("generate", model, stdin=subprocess.DEVNULL)
    assert done.returncode == 2 and done.stderr.startswith("error: prompt is empty") and done.stderr.count("\n") == 1
