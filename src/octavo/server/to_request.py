"""From the body of a request to what the engine is asked."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.guide import Guide
from octavo.core.params import ParamError, SamplingParams
from octavo.core.request import Request
from octavo.engine.intake import Intake
from octavo.errors import RequestError
from octavo.server.errors import ApiError, unsupported
from octavo.server.guiding import guide_of
from octavo.server.schema import ChatBody, CompletionBody, Generating
from octavo.server.settings import ServerSettings

# Fields that SamplingParams has under the same name.
_SAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)
COMPLETION_TOKENS = 16  # as OpenAI's: a completion without a limit has this one
MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 1e6


@dataclass(frozen=True)
class Beam:
    """Beam search in place of sampling."""

    width: int
    length_penalty: float
    early_stopping: bool | str


@dataclass(frozen=True)
class Asked:
    """Owns: what one HTTP request asks of each of its prompts.  Promises: checked but for what the prompt decides."""

    params: SamplingParams
    n: int
    logprobs: int | None = None  # best ones at each position that the answer shows
    echo: bool = False
    prompt_logprobs: bool = False  # whether the answer shows the prompt's
    token_ids: bool = False
    stream: bool = False
    usage: bool = False  # a last chunk with the usage
    beam: Beam | None = None
    form: str = "guide"  # the field that says the form of the answer
    timeout: float | None = None
    priority: int = 0
    user: str = ""
    cache_salt: str | None = None
    seeds: tuple[int, ...] = ()  # one for each prompt, in place of one for all

    @property
    def sequences(self) -> int:
        return self.params.branches if self.beam is None else self.beam.width

    @property
    def ranked(self) -> bool:
        """Whether more is computed than told, so that nothing can be told before the end."""
        return self.beam is not None or self.params.branches > self.n

    def request(self, intake: Intake, prompt: array[int], *, seed: int | None = None, **given: Any) -> Request:
        """One prompt's request, with a seed of its own if it has one.  Raises RequestError."""
        outer = {"priority": self.priority, "user": self.user, "cache_salt": self.cache_salt, **given}
        if self.beam is None:
            params = self.params if seed is None else replace(self.params, seed=seed)
            return intake.request(prompt, params, **outer)
        most = self.params.max_tokens
        if most is None:
            most = max(1, min(intake.context, intake.longest) - len(prompt))
        return intake.beam_search(
            prompt,
            width=self.beam.width,
            max_tokens=most,
            length_penalty=self.beam.length_penalty,
            early_stopping=self.beam.early_stopping,
            ignore_eos=self.params.ignore_eos,
            **outer,
        )


def completion(body: CompletionBody, settings: ServerSettings, user: str) -> Asked:
    """Raises ApiError or RequestError, naming the field."""
    if body.suffix:
        raise unsupported("suffix", "is not supported: the models here continue a text, they do not fill one in")
    if body.logprobs is not None and not 0 <= body.logprobs <= settings.max_logprobs:
        raise ParamError("logprobs", f"must be in [0, {settings.max_logprobs}], got {body.logprobs}")
    values = _common(body, settings)
    echo = bool(body.echo)
    values["max_tokens"] = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if values["max_tokens"] == 0 and not echo and body.prompt_logprobs is None:
        raise ParamError("max_tokens", "must be at least 1; 0 goes with echo, to score a prompt")
    if body.best_of is not None:
        if not 1 <= body.best_of <= settings.max_n:
            raise ParamError("best_of", f"must be in [1, {settings.max_n}], got {body.best_of}")
        values["best_of"] = body.best_of
    values["logprobs"] = body.logprobs
    if echo and body.prompt_logprobs is None and (body.logprobs is not None or values["max_tokens"] == 0):
        values["prompt_logprobs"] = body.logprobs or 0
    asked = _asked(body, values, body.logprobs, settings, user, echo=echo)
    return asked if body.seeds is None else replace(asked, seeds=_seeds(body))


def chat(body: ChatBody, settings: ServerSettings, user: str, calls: Guide | None = None, marks: bool = False) -> Asked:
    """Raises ApiError or RequestError, naming the field.

    ``calls``: the form of tool calls, where there must be some; ``marks``: whether special tokens have to be told,
    since tool calls are marked by them.
    """
    _refuse_unsupported(body)
    limits = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    values = _common(body, settings)
    if limits:
        name = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
        if min(limits) < 1:
            raise ParamError(name, f"must be at least 1, got {min(limits)}")
        values["max_tokens"] = min(limits)
    logprobs = None
    if body.top_logprobs is not None:
        if not 0 <= body.top_logprobs <= settings.max_logprobs:
            raise ParamError("top_logprobs", f"must be in [0, {settings.max_logprobs}], got {body.top_logprobs}")
        if not body.logprobs:
            raise ParamError("top_logprobs", "goes with logprobs, which must be true")
    if body.logprobs:
        logprobs = body.top_logprobs or 0
    if marks:
        values["skip_special_tokens"] = False
    values["logprobs"] = logprobs
    return _asked(body, values, logprobs, settings, user, calls=calls)


def _common(body: Generating, settings: ServerSettings) -> dict[str, Any]:
    values = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.n is not None and not 1 <= body.n <= settings.max_n:
        raise ParamError("n", f"must be in [1, {settings.max_n}], got {body.n}")
    if isinstance(body.stop, list) and len(body.stop) > settings.max_stops:
        raise ParamError("stop", f"holds {len(body.stop)} entries, at most {settings.max_stops} are allowed")
    most = settings.max_logprobs
    if body.prompt_logprobs is not None and not 0 <= body.prompt_logprobs <= most:
        raise ParamError("prompt_logprobs", f"must be in [0, {most}], got {body.prompt_logprobs}")
    return values


def _asked(
    body: Generating,
    values: dict[str, Any],
    logprobs: int | None,
    settings: ServerSettings,
    user: str,
    *,
    echo: bool = False,
    calls: Guide | None = None,
) -> Asked:
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise ParamError("stream_options", "goes with stream, which must be true")
    if body.timeout is not None and not MIN_TIMEOUT <= body.timeout <= MAX_TIMEOUT:
        raise ParamError("timeout", f"must be in [{MIN_TIMEOUT:g}, {MAX_TIMEOUT:g}] seconds, got {body.timeout:g}")
    beam = _beam(body, values, settings)
    form, guide = guide_of(body)
    if calls is not None:
        if guide is not None:
            raise ApiError(400, f"{form}: cannot be had together with a tool call", param=form)
        form, guide = "tools", calls
    if guide is not None:
        if beam is not None:
            raise unsupported("use_beam_search", "does not go with a form that the answer must have")
        values["guide"] = guide
    asked = Asked(
        SamplingParams(**values),
        body.n or 1,
        logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        stream=stream,
        usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        beam=beam,
        form=form,
        timeout=body.timeout,
        priority=body.priority or 0,
        user=user or body.user or "",
        cache_salt=body.cache_salt,
        echo=echo,
    )
    if asked.stream and asked.ranked:
        field = "use_beam_search" if beam else "best_of"
        raise ApiError(
            400, f"{field}: the best answers are known only at the end, so stream must be false", param=field
        )
    if beam is not None and (logprobs is not None or asked.params.prompt_logprobs is not None):
        raise unsupported("logprobs", "a beam search reports scores, no log-probabilities of tokens")
    return asked


def _beam(body: Generating, values: dict[str, Any], settings: ServerSettings) -> Beam | None:
    """What is asked of beam search; its answers are the ``n`` best of ``beam_width``."""
    if not body.use_beam_search:
        if body.beam_width is not None:
            raise ParamError("beam_width", "goes with use_beam_search, which must be true")
        return None
    width = body.beam_width if body.beam_width is not None else max(body.n or 1, 4)
    if not max(1, body.n or 1) <= width <= settings.max_n:
        raise ParamError("beam_width", f"must be in [{body.n or 1}, {settings.max_n}], got {width}")
    if values.get("temperature") not in (None, 0, 0.0):
        raise ParamError("temperature", "must be 0 or left out with use_beam_search")
    early = body.early_stopping if body.early_stopping is not None else False
    return Beam(width, 1.0 if body.length_penalty is None else body.length_penalty, early)


def _refuse_unsupported(body: ChatBody) -> None:
    """Fields whose silent loss would change the answer."""
    if body.functions or body.function_call not in (None, "none"):
        raise unsupported("functions", "was replaced by tools, and tool_choice")
    if body.modalities and body.modalities != ["text"]:
        raise unsupported("modalities", 'only ["text"] is supported')
    for name in ("audio", "prediction", "web_search_options"):
        if getattr(body, name):
            raise unsupported(name, "is not supported")
    if body.continue_final_message:
        raise unsupported("continue_final_message", "is not supported: use /v1/completions to continue a text")


def prompts(value: Any, settings: ServerSettings) -> list[Any]:
    """One text, a list of texts, one list of ids or a list of such lists, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError(f"prompt must be text, token ids, or a list of either, not {_kind(value)}", "prompt")
    if not value:
        raise RequestError("prompt is empty", "prompt")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        return [value]
    if len(value) > settings.max_prompts:
        raise RequestError(f"prompt holds {len(value)} prompts, at most {settings.max_prompts} are allowed", "prompt")
    for i, item in enumerate(value):
        if not isinstance(item, (str, list)):
            raise RequestError(f"prompt[{i}] must be text or a list of token ids, not {_kind(item)}", f"prompt[{i}]")
    return value


def _seeds(body: CompletionBody) -> tuple[int, ...]:
    """A seed for each prompt."""
    if body.seed is not None:
        raise RequestError("seeds: only one of seed and seeds can be given", "seeds")
    seeds = body.seeds
    if not isinstance(seeds, list) or not all(isinstance(s, int) and not isinstance(s, bool) for s in seeds):
        raise RequestError("seeds must be a list of integers", "seeds")
    return tuple(seeds)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", dict: "an object", type(None): "null"}
    return names.get(type(value), type(value).__name__)
