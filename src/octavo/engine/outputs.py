"""Results in the shape that users of vLLM know."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from octavo.core.events import Delta
from octavo.core.plan import TokenLogprobs
from octavo.core.request import Request
from octavo.core.sequence import Sequence
from octavo.engine.reader import Reader

Decode = Callable[[Seq[int]], str]


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at a position, of the raw logits; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One branch's answer.

    ``logprobs[i]`` maps token id to :class:`Logprob` for output token i: the best ones asked for, and the token itself.
    ``finish_reason`` is "stop", "length", "abort", "error", or None while it runs; ``stop_reason`` the stop string or
    stop token id that ended it, None for an end token of the model.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float | None = None  # of a beam search: cumulative_logprob / length^length_penalty


@dataclass
class RequestOutput:
    """A request's result.

    ``prompt_logprobs`` has one entry a prompt token, the first None.  ``num_cached_tokens`` of the prompt came from
    the prefix cache, and ``cache_miss`` says why not more: "", "evicted", "salt", "off" or "differs at token N".
    ``seed`` is the one that was used, drawn if none was given.  ``error`` is set if the engine could not compute it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    cache_miss: str = ""
    seed: int | None = None
    preemptions: int = 0
    finished: bool = True
    error: str | None = None
    first_token_seconds: float | None = None


def _entry(scored: TokenLogprobs) -> dict[int, Logprob]:
    entry = {token: Logprob(value, rank) for rank, (token, value) in enumerate(scored.best, 1)}
    entry.setdefault(scored.token, Logprob(scored.logprob, scored.rank))
    return entry


def completion(sequence: Sequence, reader: Reader) -> CompletionOutput:
    wanted = sequence.params.logprobs is not None
    return CompletionOutput(
        index=sequence.branch,
        text=reader.text,
        token_ids=list(sequence.output()),
        cumulative_logprob=sum(s.logprob for s in reader.logprobs) if wanted else None,
        logprobs=[_entry(s) for s in reader.logprobs] if wanted else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )


def _best(request: Request) -> list[CompletionOutput]:
    """The branches' answers; of ``best_of`` branches the ``n`` with the largest sum of log-probabilities."""
    n, pairs = request.params.n, list(zip(request.branches, request.readers, strict=True))
    if request.finished and len(pairs) > n:
        pairs.sort(key=lambda pair: -sum(s.logprob for s in pair[1].logprobs))  # equal sums in the order of branches
        return [replace(completion(s, r), index=i) for i, (s, r) in enumerate(pairs[:n])]
    return [completion(s, r) for s, r in pairs]


def beam_completions(request: Request, decode: Decode) -> list[CompletionOutput]:
    """The finished hypotheses, best first."""
    search = request.beams.search
    out = []
    for index, found in enumerate(search.finished):
        ended = bool(found.tokens) and found.tokens[-1] in search.ends
        out.append(
            CompletionOutput(
                index,
                decode(found.tokens[: -1 if ended else None]),
                list(found.tokens),
                cumulative_logprob=found.score * len(found.tokens) ** search.length_penalty,
                finish_reason="stop" if ended else "length",
                score=found.score,
            )
        )
    return out


def request_output(request: Request, decode: Decode = lambda tokens: "") -> RequestOutput:
    """The result as far as it is."""
    scores = None
    if request.params.prompt_logprobs is not None:
        scores = [None, *(_entry(s) for s in request.scores)]
    first = request.first_token
    if request.beams is not None:
        outputs = beam_completions(request, decode)
    else:
        outputs = _best(request)
    return RequestOutput(
        request_id=request.id,
        prompt=request.prompt_text,
        prompt_token_ids=list(request.prompt),
        outputs=outputs,
        prompt_logprobs=scores,
        num_cached_tokens=request.cached,
        cache_miss=request.miss,
        seed=request.params.seed,
        preemptions=request.preemptions,
        finished=request.finished,
        error=request.error,
        first_token_seconds=None if first is None else first - request.arrival,
    )


class Growing:
    """Owns: a request's result as its events have told it so far; needs nothing of the engine, which runs on."""

    def __init__(self, request: Request) -> None:
        wanted = request.params.logprobs is not None
        self._result = RequestOutput(
            request.id, request.prompt_text, list(request.prompt), seed=request.params.seed, finished=False
        )
        self._empty = CompletionOutput(0, "", [], 0.0 if wanted else None, [] if wanted else None)

    def add(self, delta: Delta) -> RequestOutput:
        outputs = self._result.outputs
        while len(outputs) <= delta.branch:
            wanted = self._empty.logprobs is not None
            outputs.append(replace(self._empty, index=len(outputs), token_ids=[], logprobs=[] if wanted else None))
        old = outputs[delta.branch]
        outputs[delta.branch] = replace(
            old,
            text=old.text + delta.text,
            token_ids=[*old.token_ids, *delta.tokens],
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        new = outputs[delta.branch]
        if old.logprobs is not None and old.cumulative_logprob is not None:
            new.logprobs = old.logprobs + [_entry(s) for s in delta.logprobs]
            new.cumulative_logprob = old.cumulative_logprob + sum(s.logprob for s in delta.logprobs)
        return replace(self._result, outputs=list(outputs))
