"""``python -m octavo.sim.run --steps 1000000 --seed 7``: the simulation, for as long as one likes."""

from __future__ import annotations

import argparse
import sys
import time

from octavo.sim.world import Tally, simulate


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo.sim.run", description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000, help="how many engine steps (default 100000)")
    parser.add_argument("--seed", type=int, default=None, help="replay this seed; by default one is made up and shown")
    parser.add_argument("--audit-every", type=int, default=1, help="recount all blocks after every so many steps")
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.audit_every < 1:
        parser.error("--steps and --audit-every must be at least 1")
    seed = given.seed if given.seed is not None else time.time_ns() % 2**31
    print(f"seed {seed}", flush=True)
    shown = 0

    def told(tally: Tally) -> None:
        nonlocal shown
        if tally.steps >= shown + 50_000:
            shown = tally.steps
            print(tally, flush=True)

    try:
        print(simulate(given.steps, seed, given.audit_every, told=told))
    except AssertionError as error:
        print(f"FAILED: {error}", file=sys.stderr)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
