"""From a sequence to the draws of its next token, and from parameters to what may not be drawn."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.params import SamplingParams
from octavo.core.plan import NO_TOKENS, Draw, Mask
from octavo.core.sequence import Sequence

BAN = float("-inf")


@dataclass(frozen=True)
class Rules:
    """What holds for every draw of one request.

    ``ends``: ids that end the output (the model's and the request's own), held back until ``min_tokens``;
    ``bad``: token sequences whose last token is banned when the ones before it have just been generated.
    """

    ends: tuple[int, ...] = ()
    bad: tuple[tuple[int, ...], ...] = ()


def banned_next(output: Seq[int], bad: Seq[tuple[int, ...]]) -> Iterator[int]:
    """Ids that would complete one of the ``bad`` sequences after ``output``."""
    for ids in bad:
        head = ids[:-1]
        if not head or (len(output) >= len(head) and tuple(output[-len(head) :]) == head):
            yield ids[-1]


def draws(sequence: Sequence, rules: Rules, mask: Mask | None = None) -> tuple[Draw, ...]:
    """The draws at the sequence's end: its own, and those of the branches still to be forked off it.

    ``mask``: what a guide allows.
    """
    params = sequence.params
    if params.max_tokens == 0:
        return ()
    bias = _bias(sequence, params, rules)
    history = tuple(_history(sequence).items()) if params.penalised else ()
    position = len(sequence.tokens)
    if not sequence.forks:
        return (Draw(sequence.branch, position, *params.constants, bias, history, mask),)
    branches = range(sequence.branch, sequence.branch + sequence.forks + 1)
    return tuple(Draw(branch, position, *params.constants, bias, history, mask) for branch in branches)


def draft_draws(sequence: Sequence, rules: Rules, drafts: array[int]) -> Iterator[Draw]:
    """A draw in place of each draft and one after them: each the sequence's own, were the drafts before it right."""
    params = sequence.params
    counts = _history(sequence) if params.penalised else {}
    for right in range(len(drafts) + 1):
        if right and params.penalised:
            counts[drafts[right - 1]] = counts.get(drafts[right - 1], 0) + 1
        bias = _bias(sequence, params, rules, drafts[:right])
        position = len(sequence.tokens) + right
        yield Draw(sequence.branch, position, *params.constants, bias, tuple(counts.items()))


def beam_draws(sequence: Sequence, candidates: int) -> tuple[Draw, ...]:
    """For a beam: the ``candidates`` most likely tokens; which of them are taken is the search's to say."""
    return (Draw(sequence.branch, len(sequence.tokens), 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, candidates),)


def _bias(
    sequence: Sequence, params: SamplingParams, rules: Rules, drafts: array[int] = NO_TOKENS
) -> tuple[tuple[int, float], ...]:
    """What is added to the logits of the token behind ``drafts``."""
    if not params.logit_bias and not rules.bad and not params.min_tokens:
        return ()
    bias = dict(params.logit_bias or {})
    if len(sequence.tokens) + len(drafts) - sequence.prompt_length < params.min_tokens:
        bias.update((token, BAN) for token in rules.ends)
    if rules.bad:
        bias.update((token, BAN) for token in banned_next(sequence.output() + drafts, rules.bad))
    return tuple(bias.items())


def _history(sequence: Sequence) -> dict[int, int]:
    """How often the output holds each token; 0 for those that only the prompt holds."""
    counts = dict.fromkeys(sequence.tokens[: sequence.prompt_length], 0)
    counts.update(Counter(sequence.tokens[sequence.prompt_length :]))
    return counts
