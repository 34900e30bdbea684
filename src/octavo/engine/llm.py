"""The offline API: ``LLM(model).generate(prompts, params)``."""

from __future__ import annotations

import signal
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from octavo.config import EngineConfig
from octavo.core.params import SamplingParams
from octavo.core.request import Request
from octavo.engine.build import Parts, build
from octavo.engine.intake import Prompt, checked_options, salted
from octavo.engine.outputs import RequestOutput, request_output
from octavo.engine.progress import Bar, load_bar
from octavo.engine.session import Session, SessionState
from octavo.engine.stats import Stats
from octavo.errors import EngineError, RequestError

Message = Mapping[str, Any]


class LLM:
    """A model, loaded, and an engine around it.

    ``model`` is a pulled name ("smollm2-135m"), a ``.gguf`` file or a Hugging Face folder; the settings are those of
    :class:`octavo.config.EngineConfig`.  Raises ModelError or ConfigError with one sentence that says what is wrong.

    >>> with LLM("smollm2-135m") as llm:                                        # doctest: +SKIP
    ...     print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)
    """

    def __init__(self, model: str, *, progress: bool = False, **settings: Any) -> None:
        config = EngineConfig.of(**settings)
        with load_bar(progress) as told:
            self._parts: Parts | None = build(str(model), config, told)
        self._lock = threading.RLock()

    # ---- generation ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        priority: int | Sequence[int] = 0,
        user: str | Sequence[str] = "",
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers to one text, one list of token ids, or a list of either, in order.

        ``params``: one for all, or one for each.  All prompts are checked before any runs (RequestError names the
        field).  A request that the engine fails to compute has ``error`` set in its output, others are unaffected.
        Ctrl-C ends these requests, gives back their blocks and raises KeyboardInterrupt; the engine stays usable.
        """
        parts = self._open()
        items = _as_list(prompts)
        every = _for_each("params", params, len(items))
        ranks, users = _for_each("priority", priority, len(items)), _for_each("user", user, len(items))
        requests = [
            parts.intake.request(p, q, priority=r, user=u, cache_salt=cache_salt)
            for p, q, r, u in zip(items, every, ranks, users, strict=True)
        ]
        return self._run(requests, progress)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        progress: bool = False,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation (a list of messages) or several, through the model's chat template."""
        parts = self._open()
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a list of messages, or a list of such lists", "messages")
        talks: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        every = _for_each("params", params, len(talks))
        options = {"add_generation_prompt": add_generation_prompt, **checked_options(chat_template_kwargs)}
        requests = []
        for talk, own in zip(talks, every, strict=True):
            text = parts.template.render(talk, tools=tools, **options)
            requests.append(parts.intake.request(text, own, cache_salt=cache_salt, add_special=False))
        return self._run(requests, progress)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        width: int = 4,
        max_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        n: int | None = None,
        ignore_eos: bool = False,
        *,
        progress: bool = False,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """The ``n`` (default: all ``width``) best answers to each prompt by beam search, best first.

        Scores and stopping follow transformers' ``generate(num_beams=width, do_sample=False)``: a finished answer's
        ``score`` is the sum of its log-probabilities over length^length_penalty; ``early_stopping`` True ends with
        ``width`` finished answers, False when no running beam looks able to beat them, "never" when none could.
        Beams share blocks; a block is copied only when one beam writes to it while others hold it.
        """
        parts = self._open()
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= width):
            raise RequestError(f"n must be an integer in [1, width], not {n!r}", "n")
        requests = [
            parts.intake.beam_search(
                prompt,
                width=width,
                max_tokens=max_tokens,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                ignore_eos=ignore_eos,
                cache_salt=cache_salt,
            )
            for prompt in _as_list(prompts)
        ]
        results = self._run(requests, progress)
        for result in results:
            del result.outputs[n if n is not None else width :]
        return results

    def _run(self, requests: list[Request], progress: bool) -> list[RequestOutput]:
        engine = self._open().engine
        with self._lock:
            for request in requests:
                engine.add(request)
            self._drive(requests, progress)
        return [request_output(r, lambda tokens: self.tokenizer.decode(tokens)) for r in requests]

    def _drive(self, requests: list[Request], progress: bool = False) -> None:
        """Step until these requests, which the engine has, are finished."""
        engine = self._open().engine
        with Interrupts() as interrupted, Bar(progress, len(requests)) as bar:
            try:
                while not all(r.finished for r in requests):
                    engine.step()
                    bar.update(requests, engine.counters)
                    if interrupted():
                        raise KeyboardInterrupt
            finally:
                for request in requests:
                    engine.abort(request)

    def session(self, prompt: Prompt | None = None, *, cache_salt: str | None = None, user: str = "") -> Session:
        """A text that stays in blocks: append to it, continue it, fork it, rewind it, score what might follow.

        For agents, tree search and evaluations.  Forks are free until they write; an idle session is the first to
        give up its blocks when memory runs short, and goes on exactly where it was when it is used again.
        """
        parts = self._open()
        tokens = array("i") if prompt is None else parts.intake.tokens(prompt)
        with self._lock:
            state = SessionState(parts.engine, parts.intake, tokens, salted(cache_salt), user)
            return Session(state, self._drive, self._lock)

    # ---- the rest --------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        return self._open().tokenizer

    @property
    def parts(self) -> Parts:
        """The engine and its parts, for those who build on them."""
        return self._open()

    def stats(self) -> Stats:
        """Counters since the start and gauges of now."""
        return self._open().engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        with self._lock:
            self._open().engine.kv.reset_cache()

    def close(self) -> None:
        """Give back the memory.  Closing twice is fine; using a closed LLM is an EngineError."""
        if self._parts is not None:
            with self._lock:
                self._parts.engine.close()
                self._parts = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Parts:
        if self._parts is None:
            raise EngineError("this LLM is closed")
        return self._parts


class Interrupts:
    """Ctrl-C ends a generation between two steps, never inside one, so that blocks and tokens stay in agreement."""

    def __enter__(self) -> Callable[[], bool]:
        self._hit = False
        self._old: Any = None
        self._installed = threading.current_thread() is threading.main_thread()
        if self._installed:
            self._old = signal.getsignal(signal.SIGINT)
            # A program that ignores or handles SIGINT itself keeps its way.
            self._installed = self._old is signal.default_int_handler
        if self._installed:
            signal.signal(signal.SIGINT, self._note)
        return lambda: self._hit

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._hit = True

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._old)


def _as_list(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(f"prompts must be text, ids, or a list of them, not {type(prompts).__name__}", "prompt")
    if not prompts:
        raise RequestError("prompt is empty: there is no prompt in the list", "prompt")
    if all(hasattr(p, "__index__") for p in prompts):
        return [prompts]  # one list of token ids
    return list(prompts)


def _for_each(field: str, value: Any, count: int) -> list[Any]:
    if isinstance(value, (list, tuple)):
        if len(value) != count:
            raise RequestError(f"{field}: {len(value)} given for {count} prompts", field)
        return list(value)
    return [value] * count
