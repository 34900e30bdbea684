"""One branch of a request: its tokens and how far they are computed.  Holds no block ids, so it ships and prints."""

from __future__ import annotations

from array import array
from enum import Enum

from octavo.core.params import SamplingParams
from octavo.core.plan import NO_TOKENS


class State(Enum):
    WAITING = "waiting"  # empty-handed: new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"


_ALLOWED = {
    State.WAITING: (State.RUNNING, State.FINISHED),
    State.RUNNING: (State.WAITING, State.FINISHED),
    State.FINISHED: (),
}


class Sequence:
    """Owns: one branch's tokens (prompt, then output), how many of them are computed, its state.

    Promises: ``state`` changes only through :meth:`become`; ``computed`` tokens have their K and V in blocks while it
    runs, none while it waits.
    """

    __slots__ = (
        "number", "request", "branch", "tokens", "prompt_length", "computed", "state", "params", "salt", "user",
        "priority", "arrival", "served", "preemptions", "forks", "scored", "limit", "finish_reason", "stop_reason",
        "cached", "parked", "idle", "miss", "drafts",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        request: int,
        branch: int,
        tokens: array[int],
        prompt_length: int,
        params: SamplingParams,
        limit: int,
        salt: bytes = b"",
        priority: int = 0,
        user: str = "",
        arrival: float = 0.0,
    ) -> None:
        self.number = number
        self.request = request  # requests are numbered in order of arrival
        self.branch = branch
        self.tokens = tokens
        self.prompt_length = prompt_length
        self.params = params
        self.limit = limit  # most tokens, prompt and output together
        self.salt = salt
        self.priority = priority
        self.user = user
        self.arrival = arrival
        self.computed = 0
        self.state = State.WAITING
        self.served = -1  # the last step in which it had a row
        self.preemptions = 0
        self.forks = params.branches - 1 if branch == 0 else 0  # branches still to be forked off this one
        self.scored = 0 if params.prompt_logprobs is not None and branch == 0 else prompt_length
        self.miss = ""  # why no more of the prompt came from the prefix cache
        self.idle = False  # of a session that nobody uses for now: the first to lose its blocks
        self.parked = False  # has nothing to compute for now: a beam that waits for the others, an idle session
        self.drafts = NO_TOKENS  # what may follow `tokens`, to be verified in its next step if there is room
        self.cached: int | None = None  # prompt tokens taken from the prefix cache when first admitted
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def become(self, state: State) -> None:
        if state not in _ALLOWED[self.state]:
            raise RuntimeError(f"sequence {self.number}: {self.state.value} cannot become {state.value}")
        self.state = state
        if state is State.WAITING:
            self.computed = 0
            self.drafts = NO_TOKENS

    @property
    def pending(self) -> int:
        """Tokens known but not computed: 1 while decoding, more while (re)computing a prompt."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its next row is a single token, besides drafts."""
        return not self.parked and len(self.tokens) - self.computed == 1

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of prompt tokens are still owed, so that cached tokens would not do."""
        return self.scored < self.prompt_length - 1

    def output(self) -> array[int]:
        return self.tokens[self.prompt_length :]

    def __repr__(self) -> str:
        return (
            f"<sequence {self.number} (request {self.request}, branch {self.branch}) {self.state.value} "
            f"{self.computed}/{len(self.tokens)}>"
        )
