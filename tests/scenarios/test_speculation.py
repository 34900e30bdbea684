"""Speculation: several tokens a step, the same bytes, and nothing taken from anybody for it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence as Run
from typing import Any

import numpy as np
import pytest

import real
import tiny
from conftest import TinyModels
from engines import Pieces, Rig, alone, answer, ids, outputs, solo
from octavo.config import EngineConfig
from octavo.core.events import Delta, Finished
from octavo.core.params import SamplingParams
from octavo.core.plan import NO_TOKENS, Draw, Row
from octavo.core.sequence import Sequence
from octavo.decode.branching import Rules, draft_draws, draws
from octavo.engine.drafting import note_drafts
from octavo.engine.session import SessionState
from octavo.errors import ConfigError
from octavo.execute.sampler import results
from octavo.kernels.reference import ReferenceBackend
from octavo.sim.executors import prefix_hash


class Drafted:
    """A drafter that drafts the same tokens whenever it may, or all that the hash will draw (``right`` of them)."""

    def __init__(self, tokens: Run[int] = (), right: int = 0) -> None:
        self.tokens, self.right = array("i", tokens), right
        self.asked: list[int] = []  # how many sequences at a time
        self.forgotten: list[int] = []

    def drafts(self, sequence: Sequence, most: int, rows: int) -> array[int]:
        self.asked.append(rows)
        tokens = sequence.tokens[:]
        for _ in range(self.right):
            tokens.append(prefix_hash(97)(tokens, Draw(sequence.branch, len(tokens), *sequence.params.constants)))
        return (tokens[len(sequence.tokens) :] + self.tokens)[:most]

    def forget(self, number: int) -> None:
        self.forgotten.append(number)


def rig(drafter: Drafted, **given: Any) -> Rig:
    made = Rig(**{"pool": 40, "budget": 64, **given})
    made.engine.drafter = drafter
    return made


def drafts(made: Rig) -> list[int]:
    """How many each plan had."""
    return [sum(row.drafts for row in plan.rows) for plan in made.executor.plans]


# ---- what comes out --------------------------------------------------------------------------------------------------


def test_right_drafts_save_steps() -> None:
    made = rig(Drafted(right=4))
    request = made.add(ids(9), 26)
    assert made.run() == 6, "one for the prompt and its token, five of five tokens"
    assert outputs(request) == alone(ids(9), 26)
    counters = made.engine.stats().counters
    assert (counters.drafted_tokens, counters.accepted_tokens, counters.generated_tokens) == (20, 20, 26)
    assert "20 of 20 drafts right" in str(made.engine.stats())


def test_wrong_drafts_cost_steps_nothing() -> None:
    made = rig(Drafted([1, 2, 3]))
    request = made.add(ids(9), 26)
    assert made.run() == 26 and outputs(request) == alone(ids(9), 26)
    counters = made.engine.stats().counters
    assert counters.accepted_tokens == 0 and counters.drafted_tokens > 60
    assert counters.generated_tokens == 26


@pytest.mark.parametrize("right", [0, 1, 3, 8])
@pytest.mark.parametrize("most", [1, 2, 3, 7, 20])
def test_max_tokens_are_exact(right: int, most: int) -> None:
    """No draft lies beyond the last token that may be drawn, so no block is needed that intake did not count."""
    made = rig(Drafted([5] * 9, right), pool=8, block_size=4, context=9 + most)
    request = made.add(ids(9), most)
    made.run()
    assert outputs(request) == alone(ids(9), most) and request.branches[0].finish_reason == "length"
    for plan in made.executor.plans:
        assert all(row.start + len(row.tokens) < 9 + most for row in plan.rows)


def test_listeners_hear_each_token_as_without() -> None:
    said = []
    for right in (0, 6):
        made = rig(Drafted([3], right))
        request = made.add(ids(7), 20, logprobs=2)
        made.run()
        said.append([event for event in made.events[request.id] if isinstance(event, Delta)])
        assert isinstance(made.events[request.id][-1], Finished)
    assert [d[1:] for d in said[0]] == [d[1:] for d in said[1]]
    assert all(len(d.tokens) == len(d.logprobs) == 1 for d in said[1])


@pytest.mark.parametrize("at", range(1, 12))
def test_an_end_among_right_drafts_ends_there(at: int) -> None:
    """A stop token, or a stop string, that was drafted ends the output like one that was not."""
    plain = alone(ids(9), 16)[0]
    for given in ({"stop_token_ids": [plain[at]]}, {"stop_token_ids": [plain[at]], "min_tokens": at + 1}):
        want = solo(ids(9), 16, **given)
        made = rig(Drafted([1], 5))
        request = made.add(ids(9), 16, **given)
        made.run()
        assert answer(request) == answer(want)
        made_eos = rig(Drafted([1], 5), eos_ids=(plain[at],))
        request = made_eos.add(ids(9), 16)
        made_eos.run()
        assert outputs(request)[0] == plain[: plain.index(plain[at]) + 1]


def test_a_stop_string_across_drafts() -> None:
    letters = Pieces([bytes([97 + i % 26]) for i in range(97)])
    plain = alone(ids(9), 20)[0]
    text = "".join(chr(97 + token % 26) for token in plain)
    for begin in range(14):
        stop = text[begin : begin + 3]
        got = []
        for right in (0, 2, 7):
            made = rig(Drafted([1], right), tokenizer=letters)
            request = made.add(ids(9), 20, stop=[stop])
            made.run()
            got.append((answer(request), made.streamed(request)))
        assert got[0] == got[1] == got[2] and got[0][1] == text[: text.index(stop)]


def test_draws_at_drafts_are_those_of_steps_of_a_token() -> None:
    """Bias, banned words, min_tokens and the history that penalties read, as if the drafts were tokens."""
    rng = random.Random(1)
    for _ in range(300):
        prompt, output = ([rng.randrange(6) for _ in range(rng.randint(1, 9))] for _ in range(2))
        guesses = array("i", [rng.randrange(6) for _ in range(rng.randint(1, 5))])
        penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": rng.choice([0.0, 0.2])}
        params = SamplingParams(
            temperature=0.7,
            seed=3,
            min_tokens=rng.randrange(9),
            logit_bias=rng.choice([None, {2: 1.5}]),
            **rng.choice([{}, penalties]),
        ).filled({}, 0)
        rules = rng.choice([Rules(), Rules(ends=(4, 5), bad=((1,), (2, 3), (0, 1, 2)))])
        sequence = Sequence(1, 1, 2, array("i", prompt + output), len(prompt), params, 99)
        got = list(draft_draws(sequence, rules, guesses))
        for right, drawn in enumerate(got):
            known = array("i", prompt + output) + guesses[:right]
            assert (drawn,) == draws(Sequence(1, 1, 2, known, len(prompt), params, 99), rules)
        assert len(got) == len(guesses) + 1


# ---- what it may not do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", [7, 8, 9, 12])
@pytest.mark.parametrize("right", [0, 3])
def test_drafts_preempt_nobody(pool: int, right: int) -> None:
    """In every step: with drafts, the same victims and the same rows as without, and room for the drafts besides."""
    made = rig(Drafted([7] * 6, right), pool=pool, block_size=2, max_running=9)
    requests = [made.add(ids(4, i), 4) for i in range(7)]
    compared = 0
    while made.engine.busy:
        running = made.engine.scheduler.running
        note_drafts(made.engine.drafter, made.engine.scheduler.running, made.engine._owners)
        with_drafts = made.engine.scheduler.decide(0.0, 64)
        kept = {s.number: s.drafts for s in running}
        for sequence in running:
            sequence.drafts = NO_TOKENS
        without = made.engine.scheduler.decide(0.0, 64)
        for sequence in running:
            sequence.drafts = kept[sequence.number]
        assert with_drafts.victims == without.victims and with_drafts.admitted == without.admitted
        assert [(s, start) for s, start, _ in with_drafts.rows] == [(s, start) for s, start, _ in without.rows]
        longer = sum(a[2] - b[2] for a, b in zip(with_drafts.rows, without.rows, strict=True))
        assert longer >= 0 and not (longer and with_drafts.victims)
        compared += longer > 0
        made.step()
    assert [outputs(r) for r in requests] == [alone(ids(4, i), 4) for i in range(7)]
    assert compared > 0


def test_drafts_take_what_budget_is_left() -> None:
    made = rig(Drafted([7] * 6), budget=9)
    made.add(ids(5, 1), 40)
    made.add(ids(4, 2), 40)
    made.step()
    made.step()
    assert [(len(row.tokens), row.drafts) for row in made.executor.plans[-1].rows] == [(7, 6), (2, 1)]
    made.add(ids(30, 3), 2)
    made.step()
    assert [(len(row.tokens), row.drafts) for row in made.executor.plans[-1].rows] == [(1, 0), (1, 0), (7, 0)]
    assert made.executor.plans[-2].prompt_tokens == 0, "drafts are not read as a prompt"


def test_wrong_drafts_leave_no_block_behind() -> None:
    """After each step a sequence holds what its tokens need; Rig checks it, and that all published blocks are right."""
    for windows in ((None,), (None, 5), (3,)):
        made = rig(Drafted([7] * 9, 1), block_size=2, pool=40 * len(windows), windows=windows)
        request = made.add(ids(9), 30)
        while made.engine.busy:
            made.step()
            for sequence in made.engine.scheduler.running:
                lengths = {len(table) for table in made.kv.tables(sequence.number)}
                assert lengths == {-(-sequence.computed // 2)} and sequence.computed == len(sequence.tokens) - 1
        assert outputs(request) == alone(ids(9), 30, windows=windows)
        again = made.add(ids(9) + outputs(request)[0], 3)
        made.run()
        assert again.cached > 0 and outputs(again) == alone(ids(9) + outputs(request)[0], 3, windows=windows)


def test_no_drafts_for_prompts_beams_scores_and_forks() -> None:
    drafter = Drafted([7] * 4)
    made = rig(drafter, budget=4)
    made.add(ids(11), 1, prompt_logprobs=1)
    made.engine.add(made.intake.beam_search(ids(9), width=3, max_tokens=6))
    made.add([5], 1, n=3, temperature=1.0)
    made.run()
    assert not drafter.asked and not sum(drafts(made))


def test_a_failure_that_only_a_wrong_draft_leads_to_is_none() -> None:
    """Logits behind a wrong draft may be anything; those that count still end the request."""
    logits = np.zeros((3, 8), np.float32)
    logits[0, 4] = logits[1, 5] = logits[2, 6] = 9.0
    drawn = tuple(Draw(0, 10 + i, 0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, 1) for i in range(3))
    row = Row(1, 9, array("i", [1, 4, 7]), (array("i", [0]),), drawn, drafts=2)
    for bad, want in ((3, (4, 5, 6)), (2, (4, 5)), (1, (4,)), (0, ())):
        broken = logits.copy()
        broken[bad:] = np.nan
        (got,) = results(ReferenceBackend(), [row], broken, np.empty(0, np.int32))
        assert got.tokens == want and len(got.logprobs) == len(want) and (got.error is not None) == (bad == 0)


def test_lookups_end_with_their_sequences() -> None:
    drafter = Drafted([7])
    made = rig(drafter)
    aborted, _ = made.add(ids(5, 1), 30, n=2, temperature=1.0), made.add(ids(5, 2), 3)
    made.steps(3)
    made.engine.abort(aborted)
    made.run()
    assert sorted(drafter.forgotten) == [1, 2, 3]


def test_a_session_goes_on_from_where_its_text_ended() -> None:
    """An end among the drafts: what was computed behind it is given back, though the session keeps its blocks."""
    plain = alone(ids(9), 16)[0]
    made = rig(Drafted([1], 6), block_size=2)
    state = SessionState(made.engine, made.intake, array("i", ids(9)), b"", "")
    request = state.begin(SamplingParams(temperature=0.0, max_tokens=16, stop_token_ids=[plain[8]]))
    while not request.finished:
        made.step()
    state.end(request)
    cut = plain.index(plain[8]) + 1
    assert list(state.tokens) == ids(9) + plain[:cut]
    tables = made.kv.tables(state.sequence.number)
    assert len(tables[0]) == -(-state.sequence.computed // 2) and state.sequence.computed == len(state.tokens) - 1
    follow = state.begin(SamplingParams(temperature=0.0, max_tokens=5))
    while not follow.finished:
        made.step()
    state.end(follow)
    assert list(state.tokens) == ids(9) + plain[: cut + 5] if cut + 5 <= 16 else True
    state.close()
    made.run()


def test_fair_share_counts_accepted_tokens_alike() -> None:
    """A user's counter depends on the tokens that came, not on how many steps they took or what was drafted in vain."""
    counters = []
    for drafter in (Drafted(), Drafted([7] * 5), Drafted(right=5)):
        made = rig(drafter, policy="fair")
        made.add(ids(9), 25, user="a")
        made.run()
        counters.append(made.engine.scheduler.policy.counters["a"])  # type: ignore[attr-defined]
    assert counters[0] == counters[1] == counters[2]


# ---- with the lookup, on the kernels ---------------------------------------------------------------------------------

CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.0, "seed": 1, "n": 3},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.9, "seed": 2, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "frequency_penalty": 0.6},
    {"logit_bias": {7: 2.5, 9: -100.0}, "min_tokens": 12, "stop_token_ids": [3, 17, 60]},
    {"prompt_logprobs": 1},
]


@pytest.mark.parametrize(("family", "type"), [("llama", "Q8_0"), ("gemma3", "F32"), ("mistral", "F16")])
def test_same_bytes_with_prompt_lookup(family: str, type: str, tiny_models: TinyModels) -> None:
    """Prompts that hold what is then said, so that the lookup finds drafts: greedy and sampled, all parameters."""
    path = tiny_models.folder(family, type) if type != "Q8_0" else tiny_models.gguf(family, type)
    known = real.Solo(path)
    right = drafted = 0
    for number, given in enumerate(CASES):
        first = tiny.prompt(20, 90 * number)
        # The answer's beginning twice: as part of the prompt, and where the model comes to say it again by itself.
        head = known.answer(first, 30)["tokens"][0]
        prompt = head + tiny.prompt(5, 300) + first
        repeated = {**given, "logit_bias": {**(given.get("logit_bias") or {}), **dict.fromkeys(head[:14], 30.0)}}
        for each in (given, repeated):
            want = known.answer(prompt, 40, **each)
            with real.engine(path, speculate=8, block_size=4, kv_blocks=900) as parts:
                request = real.add(parts, prompt, 40, **each)
                real.finish(parts)
                assert answer(request) == want, f"{each}"
                counters = parts.engine.stats().counters
                right, drafted = right + counters.accepted_tokens, drafted + counters.drafted_tokens
    assert drafted > 30 and right > 20, f"{right} of {drafted} drafts: a lookup that finds nothing proves nothing"


def test_the_setting() -> None:
    for off in (None, 0):
        assert not EngineConfig(speculate=off).speculate
    for bad in (-1, 65, True, 2.5, "8"):
        with pytest.raises(ConfigError, match="speculate must be an integer in") as error:
            EngineConfig.of(speculate=bad)
        assert error.value.field == "speculate"
