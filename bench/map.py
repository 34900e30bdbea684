"""What the live map costs the engine: decoding with and without its recorder, in turn, in one process.

CPU time is compared, of all threads together, since the time on the wall differs more between two turns than any
recorder could make it.

64 sequences in a pool of 10,000 blocks; "kept" records for the history alone, "watched" for a page as well.
"""

from __future__ import annotations

import argparse
import statistics
import time

from common import save, table

from octavo import AsyncLLM, SamplingParams
from octavo.server.kvmap import record
from octavo.watch.snapshot import Snapshot, encode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--blocks", type=int, default=10_000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=0.8, help="of each turn")
    parser.add_argument("--rounds", type=int, default=25)
    given = parser.parse_args()
    settings = {"kv_blocks": given.blocks, "block_size": given.block_size, "swap_memory": 0}
    with AsyncLLM(given.model, **settings) as llm:
        report = measured(llm, given)
    save("map", report)


def measured(llm: AsyncLLM, given: argparse.Namespace) -> dict[str, object]:
    parts, service = llm.parts, llm.service
    most = min(parts.intake.context, given.blocks * given.block_size // given.sequences) - 308
    params = SamplingParams(temperature=1.0, max_tokens=most, ignore_eos=True)
    for i in range(given.sequences):
        service.submit(parts.intake.request([5 + i, *range(40, 340)], params))
    counters = parts.engine.counters
    while counters.generated_tokens < 4 * given.sequences:
        time.sleep(0.05)

    def rate() -> float:
        """CPU seconds that a step takes, of all threads together: what others do on the machine is not in it."""
        began, first = service.call(lambda: (time.process_time(), counters.steps))
        time.sleep(given.seconds)
        ended, last = service.call(lambda: (time.process_time(), counters.steps))
        return float(ended - began) / int(last - first)

    # Turns without, kept, without, watched, without ...: each with is held against the two without beside it, since
    # sequences grow, and steps with them.
    shares: dict[str, list[float]] = {"kept": [], "watched": []}
    frames = 0
    before = rate()
    for turn in range(2 * given.rounds):
        name = ("kept", "watched")[turn % 2]
        recorder = record(llm)
        if name == "watched":
            recorder.listen(lambda: None)
        time.sleep(0.1)
        during = rate()
        frames += len(recorder.history())
        recorder.close()
        after = rate()
        shares[name].append(during / ((before + after) / 2) - 1)
        before = after
    lines = []
    for name, own in shares.items():
        spread = statistics.stdev(own) / len(own) ** 0.5
        lines.append(
            [
                name,
                f"{100 * statistics.fmean(own):+.2f} %",
                f"{100 * statistics.median(own):+.2f} %",
                f"{100 * spread:.2f} %",
            ]
        )
    table(["recorder", "CPU a step, mean", "median", "standard error"], lines)
    copied, packed = alone(llm)
    print(
        f"by themselves: {1e6 * copied:.0f} us to copy in the engine's thread, {1e6 * packed:.0f} us to pack beside it"
    )
    live = parts.engine.stats()
    print(f"{live.running} sequences, {live.blocks_used} of {live.blocks} blocks in use, {frames} frames")
    return {
        "shares": shares,
        "frames": frames,
        "running": live.running,
        "blocks_used": live.blocks_used,
        "copy": copied,
        "pack": packed,
    }


def alone(llm: AsyncLLM) -> tuple[float, float]:
    """Seconds that one snapshot and one frame take, the middle of many."""
    recorder = record(llm, slow=1e6)
    copied, packed = [], []
    before = recorder.fresh()[1]
    for serial in range(60):
        time.sleep(0.1)

        def timed() -> tuple[float, Snapshot]:
            began = time.thread_time()
            taken = recorder.take()
            return time.thread_time() - began, taken

        spent, now = llm.service.call(timed)
        began = time.thread_time()
        encode(now, before, serial)
        packed.append(time.thread_time() - began)
        copied.append(spent)
        before = now
    recorder.close()
    return statistics.median(copied), statistics.median(packed)


if __name__ == "__main__":
    main()
