"""best_of: more branches are computed than returned, and the likeliest are kept."""

from __future__ import annotations

import pytest

from engines import Rig, ids
from octavo.core.params import SamplingParams
from octavo.engine.outputs import request_output
from octavo.errors import RequestError


def test_the_likeliest_are_returned_in_order() -> None:
    rig = Rig(pool=64, budget=64)
    request = rig.add(ids(9), 6, n=2, best_of=5, temperature=1.0, seed=3)
    everything = rig.add(ids(9), 6, n=5, temperature=1.0, seed=3, logprobs=0)
    rig.run()
    best = request_output(request).outputs
    ranked = sorted(request_output(everything).outputs, key=lambda o: -(o.cumulative_logprob or 0.0))
    assert [o.token_ids for o in best] == [o.token_ids for o in ranked[:2]]
    assert [o.index for o in best] == [0, 1]
    assert all(o.logprobs is None and o.cumulative_logprob is None for o in best)


def test_fewer_than_n_is_refused() -> None:
    with pytest.raises(RequestError, match="best_of"):
        SamplingParams(n=3, best_of=2)
