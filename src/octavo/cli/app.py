"""The commands and their options.  Nothing heavy is imported before a command runs, so that --help is quick."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from octavo.cli.options import Command, command

app = typer.Typer(
    name="octavo",
    help="Runs large language models on paged attention.",
    epilog="Start with: octavo pull smollm2-135m, then octavo chat smollm2-135m",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="a pulled model's name, a .gguf file, or a Hugging Face folder")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="a system message ahead of the prompt")]


def _version(asked: bool) -> None:
    if asked:
        import octavo

        print(octavo.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="the version")] = False,
) -> None:
    pass


@app.command(cls=Command)
@command
def demo(
    engine: Any,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", metavar="N", help="most tokens of an answer")] = 64,
) -> int:
    """Let a small model answer 16 prompts in one batch.

    Fetches smollm2-135m if it is not there; prints tokens a second and how the KV blocks were used.
    """
    from octavo.cli.demo import run

    return run(max_tokens, engine)


@app.command(cls=Command)
@command
def pull(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="smollm2-135m, gemma3-270m, or hf:ORG/NAME")],
) -> int:
    """Fetch models into the cache."""
    from octavo.cli.models import pull

    return pull(names)


@app.command("list", cls=Command)
@command
def list_() -> int:
    """List the models in the cache."""
    from octavo.cli.models import listed

    return listed()


@app.command(cls=Command)
@command
def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="a model that `octavo list` shows")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
) -> int:
    """Remove a model from the cache."""
    from octavo.cli.models import remove

    return remove(name, yes)


@app.command(cls=Command)
@command
def inspect(
    model: Model,
    memory: Any,
    length: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="how many requests of this many tokens fit")
    ] = None,
) -> int:
    """Show a model and what fits into memory.

    Nothing is loaded: the model's headers are read and the KV cache is sized as `generate` would size it.
    """
    from octavo.cli.inspect import run

    return run(model, length, memory)


@app.command(cls=Command)
@command
def generate(
    model: Model,
    engine: Any,
    sampling: Any,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="prompts; without any, all of stdin is one")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help='prompts, one a line (.jsonl: a text or {"prompt": text}); - is stdin'
        ),
    ] = None,
    system: System = None,
    template: Annotated[
        bool | None,
        typer.Option("--template/--no-template", help="use the model's chat template (default: if it has one)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object a prompt")] = False,
    progress: Annotated[bool, typer.Option("--progress", "-p", help="show a bar and a summary, on stderr")] = False,
) -> int:
    """Answer one prompt, streamed, or many in one batch."""
    from octavo.cli.generate import run

    return run(
        model,
        prompts or [],
        file=file,
        system=system,
        template=template,
        as_json=json,
        progress=progress,
        engine=engine,
        sampling=sampling,
    )


@app.command(cls=Command)
@command
def chat(model: Model, engine: Any, sampling: Any, system: System = None) -> int:
    """Talk to a model in the terminal."""
    from octavo.cli.chat import run

    return run(model, system, engine, sampling)


@app.command(cls=Command)
@command
def serve(
    engine: Any,
    server: Any,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="as for the other commands; the demo model is fetched if needed")
    ] = "smollm2-135m",
) -> int:
    """Serve a model over HTTP, as OpenAI's clients expect it.

    Listens on 127.0.0.1:8000 unless told otherwise.
    """
    from octavo.cli.serve import run

    return run(model, server, engine)


@app.command(cls=Command)
@command
def replay(
    engine: Any,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="receipts, as JSON or JSON lines; - is stdin", show_default=False)
    ],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="the model (default: the one that the receipts name)")
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="replay on a running server; its key is taken from OCTAVO_API_KEY")
    ] = None,
    only: Annotated[
        list[int] | None, typer.Option(metavar="N", help="only the Nth receipt of the file (may be given again)")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, metavar="N", help="requests at a time; it changes no byte")
    ] = 8,
    keep_going: Annotated[bool, typer.Option("--keep-going", "-k", help="go on after one that differs")] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="replay also where other bytes are to be expected")] = False,
) -> int:
    """Run recorded requests again and compare every byte.

    Receipts come from `octavo serve --record FILE`, or from any client: {"path": ..., "request": ..., "response": ...}.
    Compared are texts, token ids, log-probabilities, tool calls, finish reasons and token counts.  The exit code is 0
    if all are the same, 1 if one differs, 2 if the receipts are of another model, build, KV type or compute mode.
    Engine options that are not given are as recorded.
    """
    from octavo.cli.serve import check_extra

    check_extra()
    from octavo.cli.replay import run

    return run(
        file,
        model=model,
        url=url,
        only=only or [],
        concurrency=concurrency,
        keep_going=keep_going,
        anyway=anyway,
        engine=engine,
    )


class _Bench(TyperGroup):
    """``octavo bench MODEL`` is ``octavo bench engine MODEL``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["engine", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(name="bench", cls=_Bench, no_args_is_help=True, help="Measure the engine, or a server under load.")
app.add_typer(bench)


@bench.command("engine", cls=Command)
@command
def bench_engine(
    model: Model,
    engine: Any,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="prompt tokens of a request")] = 128,
    output: Annotated[int, typer.Option(min=2, metavar="N", help="tokens that a request answers")] = 64,
    requests: Annotated[int, typer.Option(min=1, metavar="N", help="requests at once")] = 16,
) -> int:
    """Measure tokens a second on this machine (also without the word engine).

    On random prompts: one request's prefill and decode, then many requests at once.
    """
    from octavo.cli.bench import run

    return run(model, prompt, output, requests, engine)


@bench.command("serve", cls=Command)
@command
def bench_serve(
    load: Any,
    url: Annotated[str, typer.Argument(metavar="URL", help="where the server is, with or without /v1")] = (
        "http://127.0.0.1:8000"
    ),
) -> int:
    """Put a load on a server that speaks OpenAI's API.

    Prints rates and percentiles of the times to the first token, between tokens and to the end.  Without --rate or
    --trace it keeps 16 requests in flight; Ctrl-C prints what was measured so far.
    """
    from octavo.cli.bench_serve import run

    return run(url, load)


@app.command(cls=Command)
@command
def doctor() -> int:
    """Show what Octavo finds on this machine.

    Instruction set, threads, memory, extras, and the folder of the models.
    """
    from octavo.cli.doctor import run

    return run()
