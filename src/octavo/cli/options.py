"""Options of the commands, made from the settings that they set.

Types and defaults are those of the dataclasses; a table here adds a flag's help.  An option that isn't given stays
out of the settings, so a default is written down in one place only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

from octavo.config import EngineConfig
from octavo.core.guide import Guide
from octavo.core.params import ParamError, SamplingParams
from octavo.errors import ConfigError
from octavo.loadgen.config import LoadConfig

Settings = dict[str, Any]


@dataclass(frozen=True)
class Flag:
    """One field of a dataclass as an option: ``unit`` stands for its value in the help, ``short`` is a further name."""

    field: str
    help: str
    unit: str | None = None
    short: str | None = None


ENGINE = (
    Flag("kv_memory", 'memory for keys and values, such as "512MiB" or "2GB" (default: from what is free)', "SIZE"),
    Flag("kv_blocks", "the same as a number of blocks", "N"),
    Flag(
        "kv_dtype", "float16, float32, bfloat16, int8 or fp8 (half of float16's memory, on a CPU or on a GPU)", "TYPE"
    ),
    Flag("block_size", "token slots in a block", "N"),
    Flag("max_batched_tokens", "tokens computed in a step (default: adapts to the machine)", "N"),
    Flag("max_running", "sequences that run at a time", "N"),
    Flag("max_context", "most tokens of one sequence, prompt and answer (default: the model's)", "N"),
    Flag("prefix_cache", "do not keep computed prefixes for prompts that begin alike"),
    Flag("threads", "threads to compute with (default: the CPUs this process may use)", "N"),
    Flag("compute", "fast (8-bit activations against quantised weights) or exact (float)", "HOW"),
    Flag("isa", "a kernel build by name (default: the best that runs here, see `octavo doctor`)", "NAME"),
    Flag("generation_defaults", "do not let the model's generation config fill options that are not given"),
    Flag("policy", "fcfs (first come, first served), priority, shortest or fair", "NAME"),
    Flag("user_weights", "with the policy fair: a user's share (may be given again)", "USER=WEIGHT"),
    Flag("swap_memory", "host memory for blocks that do not fit (default: a tenth of what is free)", "SIZE"),
    Flag("preempt", "auto, swap or recompute: how a request that has to wait gets its blocks back", "HOW"),
    Flag("kv_disk", 'disk for computed prefixes, such as "8GiB"; they survive a restart', "SIZE"),
    Flag("kv_disk_path", "where they lie (default: in the cache folder)", "DIR"),
    Flag("speculate", "draft up to N tokens a step by prompt lookup: faster where answers repeat their prompt", "N"),
    Flag("device", "auto (a GPU if there is a usable one), cpu or cuda", "NAME"),
    Flag("gpu_memory", "the share of a GPU's memory that may be used, keys and values included", "SHARE"),
    Flag("gemm", "on a GPU: fixed, or cublas (answers then depend on what else runs)", "HOW"),
    Flag("tensor_parallel", "GPUs (or processes) that share the model", "N"),
    Flag("backend", "auto (the device's own), cpu, triton or reference (NumPy, slow: the definition of right)", "NAME"),
    Flag("audit", "recount all blocks after each step (slow, for debugging)"),
)

# The settings that decide what fits.
MEMORY = ("kv_memory", "kv_blocks", "kv_dtype", "block_size", "max_running", "max_context", "device", "gpu_memory")

SAMPLING = (
    Flag("max_tokens", "most tokens to generate (default: until the model ends or nothing fits)", "N", "-m"),
    Flag("temperature", "0 is greedy; higher is more random", "T", "-t"),
    Flag("top_k", "draw from the K most likely tokens; 0 is all", "K"),
    Flag("top_p", "draw from the smallest set of tokens with this share of the probability", "P"),
    Flag("min_p", "leave out tokens less likely than this share of the best one", "P"),
    Flag("repetition_penalty", "above 1: make tokens of the prompt and the answer less likely", "X"),
    Flag("presence_penalty", "subtracted from the logit of every token that the answer holds", "X"),
    Flag("frequency_penalty", "the same, times how often the answer holds it", "X"),
    Flag("seed", "the same seed and prompt give the same answer (default: drawn)", "N"),
    Flag("n", "answers to each prompt", "N", "-n"),
    Flag("best_of", "compute this many and keep the likeliest", "N"),
    Flag("stop", "end the answer at this text (may be given again)", "TEXT"),
    Flag("stop_token_ids", "end the answer at this token id (may be given again)", "ID"),
    Flag("bad_words", "text that may not appear (may be given again)", "TEXT"),
    Flag("logit_bias", "add to a token's logit (may be given again)", "ID=VALUE"),
    Flag("min_tokens", "do not end before this many tokens", "N"),
    Flag("ignore_eos", "go on past the model's end tokens"),
    Flag("logprobs", "report this many best tokens at each position (with --json)", "N"),
    Flag("prompt_logprobs", "the same for the prompt (with --json)", "N"),
    Flag("skip_special_tokens", "keep special tokens in the text"),
    Flag("include_stop_str_in_output", "keep the stop text in the answer"),
    Flag("guide", "form of the answer: json, json=SCHEMA, regex=PATTERN, choice=A|B, lark=GRAMMAR; =@FILE", "FORM"),
)

LOAD = (
    Flag("model", "as the server names it (default: the first that it lists)", "NAME"),
    Flag("requests", "how many (default: 64, or the whole trace)", "N", "-n"),
    Flag("duration", "start none after this time", "SECONDS"),
    Flag("concurrency", "keep N in flight, one comes when another ends (default: 16)", "N", "-c"),
    Flag("rate", "N a second on average in a Poisson process, whether others have ended or not", "N"),
    Flag("trace", "times and lengths from a .csv (TIMESTAMP, ContextTokens, GeneratedTokens) or .jsonl", "FILE"),
    Flag("speed", "play the trace so many times as fast", "X"),
    Flag("scale", "multiply the trace's lengths", "X"),
    Flag("prompt", "tokens of a prompt", "N"),
    Flag("output", "tokens of an answer", "N"),
    Flag("spread", "draw lengths log-normally around these means with this sigma; 0: all alike", "S"),
    Flag("context", "cut prompts and answers so that both fit into N tokens", "N"),
    Flag("prefixes", "prompts begin with one of N common prefixes", "N"),
    Flag("prefix_tokens", "tokens of a common prefix, ahead of the prompt's own", "N"),
    Flag("prefix_share", "the share of requests that have one", "P"),
    Flag("chat", "ask /v1/chat/completions instead of /v1/completions"),
    Flag("token_ids", "prompts as token ids instead of text"),
    Flag("vocab", "with --token-ids: draw from so many (default: of common words, by the server's /tokenize)", "N"),
    Flag("ignore_eos", "let answers end early (some servers do not know ignore_eos)"),
    Flag("extra", "further fields of each request", "JSON"),
    Flag("api_key", "sent as a bearer token (default: from OCTAVO_API_KEY)", "KEY"),
    Flag("goodput", "count requests within limits, such as ttft:500,itl:50,e2e:9000", "LIMITS"),
    Flag("warmup", "requests ahead that are not counted", "N"),
    Flag("time_limit", "give a request up after this time", "SECONDS"),
    Flag("seed", "the same seed gives the same requests at the same times", "N"),
    Flag("json", "write all figures there, and a line for each request", "FILE"),
    Flag("plots", "draw plots there, as SVG", "DIR"),
)

SERVER = (
    Flag("host", "address to listen on", "HOST"),
    Flag("port", "0 is any free one", "PORT"),
    Flag("served_model_name", "what clients call the model (default: its own name)", "NAME"),
    Flag("api_key_file", 'keys, one a line, or "NAME KEY"; OCTAVO_API_KEY in the environment counts too', "FILE"),
    Flag("allow_anyone", "listen beyond this machine without keys"),
    Flag("allowed_hosts", "a name that clients may reach this server by (may be given again)", "NAME"),
    Flag("cors_origins", "a web origin whose pages may call (may be given again)", "ORIGIN"),
    Flag("max_waiting", "sequences that may wait; more are refused with 429", "N"),
    Flag("max_waiting_tokens", "prompt tokens that may wait", "N"),
    Flag("request_timeout", "seconds that a request may take (default: any)", "S"),
    Flag("drain_timeout", "seconds that running requests get at the end", "S"),
    Flag("stall_limit", "seconds without a finished step that /health calls stuck", "S"),
    Flag("max_body", "bytes of a request", "N"),
    Flag("max_prompts", "prompts in a request", "N"),
    Flag("max_n", "answers to a prompt", "N"),
    Flag("max_stops", "stop strings of a request", "N"),
    Flag("max_logprobs", "log-probabilities reported of a token", "N"),
    Flag("max_sessions", "sessions at a time", "N"),
    Flag("session_idle", "seconds after which an unused session is deleted", "S"),
    Flag("access_log", "json (a line for each request, on stderr) or off", "HOW"),
    Flag("log_prompts", "let the access log tell prompts"),
    Flag("record", "append prompts and answers to it, as receipts that `octavo replay` checks (default: no)", "FILE"),
    Flag("tool_format", "how the model writes tool calls (default: found from its chat template)", "NAME"),
    Flag("reasoning", "auto (thoughts between think tags apart) or off", "HOW"),
    Flag(
        "map", "what the live map shows: off, shape or text (default: text where only you or key holders see it)", "HOW"
    ),
)
_SINGULAR = {"allowed_hosts": "--allowed-host", "cors_origins": "--cors-origin"}

# How a field's annotation is given on the command line.
_TYPES: dict[str, Any] = {
    "bool": bool | None,
    "int": int | None,
    "int | None": int | None,
    "float": float | None,
    "float | None": float | None,
    "str": str | None,
    "str | None": str | None,
    "int | str | None": str | None,
    "str | Sequence[str] | None": list[str] | None,
    "tuple[str, ...]": list[str] | None,
    "Sequence[str]": list[str] | None,
    "Sequence[int]": list[int] | None,
    "Guide | None": str | None,
    "Mapping[int, float] | None": list[str] | None,
    "Mapping[str, float] | None": list[str] | None,
}


def flag_name(field: Field[Any]) -> str:
    """``--top-k``; a switch that is on by default can only be switched off: ``--no-prefix-cache``."""
    if field.name in _SINGULAR:
        return _SINGULAR[field.name]
    return ("--no-" if field.default is True else "--") + field.name.replace("_", "-")


def _parameter(flag: Flag, field: Field[Any], panel: str) -> inspect.Parameter:
    help = flag.help
    if not isinstance(field.default, bool) and field.default not in (None, MISSING, ()) and "default:" not in help:
        help += f" (default: {field.default})"
    names = [flag_name(field), *([flag.short] if flag.short else [])]
    option = typer.Option(*names, help=help, metavar=flag.unit, rich_help_panel=panel, show_default=False)
    kind = Annotated[_TYPES[str(field.type)], option]  # type: ignore[valid-type]
    return inspect.Parameter(flag.field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)


def _settings(name: str) -> tuple[tuple[Flag, ...], type, str]:
    """Flags, the dataclass that they set, and their heading."""
    if name == "server":
        from octavo.server.settings import ServerSettings

        return SERVER, ServerSettings, "Server"
    return _TABLES[name]


_TABLES: dict[str, tuple[tuple[Flag, ...], type, str]] = {
    "engine": (ENGINE, EngineConfig, "Engine"),
    "memory": (tuple(flag for flag in ENGINE if flag.field in MEMORY), EngineConfig, "Memory"),
    "sampling": (SAMPLING, SamplingParams, "Sampling"),
    "load": (LOAD, LoadConfig, "Load"),
}


class Command(TyperCommand):
    """A command whose help lists its options in groups, on lines as wide as the terminal."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if isinstance(parameter, TyperArgument) else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for name, records in groups.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


_COMMON = {
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="show what the engine decides, on stderr")],
    "debug": Annotated[bool, typer.Option("--debug", help="show the traceback of an error")],
}


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Expands parameters called ``engine``, ``memory``, ``sampling``, ``server`` and ``load`` into options.

    The function gets what was given of each as a dict.  Every command also takes --verbose and --debug.
    """
    own = inspect.signature(function, eval_str=True)
    parameters: list[inspect.Parameter] = []
    expanded: dict[str, dict[str, Field[Any]]] = {}
    for parameter in own.parameters.values():
        if parameter.name not in (*_TABLES, "server"):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        flags, settings, panel = _settings(parameter.name)
        typed = {f.name: f for f in fields(settings)}
        parameters += [_parameter(flag, typed[flag.field], panel) for flag in flags]
        expanded[parameter.name] = {flag.field: typed[flag.field] for flag in flags}
    for name, annotation in _COMMON.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation))

    @wraps(function)
    def run(**given: Any) -> Any:
        from octavo.cli.console import show_log

        show_log(given.pop("verbose"))
        given.pop("debug")
        for name, typed in expanded.items():
            values = {f: given.pop(f) for f in typed}
            given[name] = {f: _value(typed[f], v) for f, v in values.items() if v is not None and v != []}
        return function(**given)

    signature = own.replace(parameters=parameters)
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _value(field: Field[Any], value: Any) -> Any:
    if field.default is True:
        return not value
    if field.name == "guide":
        return _guide(value)
    if field.name == "logit_bias":
        return _pairs(value, int, ParamError("logit_bias", "must be ID=VALUE, such as 42=-100"))
    if field.name == "user_weights":
        return _pairs(value, str, ConfigError("user_weights must be USER=WEIGHT, such as alice=2", "user_weights"))
    return value


def _guide(text: str) -> Guide:
    """From KIND=VALUE, where =@FILE stands for what the file holds."""
    kind, given, value = text.partition("=")
    if kind == "json" and not given:
        return Guide.json()
    if value.startswith("@"):
        try:
            value = Path(value[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ParamError("guide", f"{value[1:]} can't be read: {error}") from None
    if not given or kind not in ("json", "regex", "choice", "lark"):
        raise ParamError("guide", "must be json, json=SCHEMA, regex=PATTERN, choice=A|B or lark=GRAMMAR")
    if kind == "choice":
        return Guide.choice(value.split("|"))
    return Guide.json(value) if kind == "json" else Guide.regex(value) if kind == "regex" else Guide.lark(value)


def _pairs(given: Sequence[str], key: Callable[[str], Any], error: Exception) -> dict[Any, float]:
    pairs = {}
    for text in given:
        name, _, value = text.rpartition("=")
        try:
            pairs[key(name)] = float(value)
        except ValueError:
            raise error from None
    return pairs
