"""``octavo replay``: recorded requests again, and whether the same bytes come."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from octavo.cli.comparison import Difference, first_difference
from octavo.cli.console import counted
from octavo.cli.receipts import Receipt, chosen, read
from octavo.cli.targets import InProcess, Remote, Target, fingerprint_of, told
from octavo.errors import ConfigError
from octavo.kernels.select import runnable_isas
from octavo.loadgen.http import Address, Client
from octavo.server.fingerprint import Fingerprint
from octavo.server.joining import JOINERS
from octavo.server.receipts import events

DIFFERS, MISMATCH = 1, 2
_OPTIONS = {"KV type": "--kv-dtype", "compute mode": "--compute"}


def run(
    file: str,
    *,
    model: str | None,
    url: str | None,
    only: Sequence[int],
    concurrency: int,
    keep_going: bool,
    anyway: bool,
    engine: dict[str, Any],
) -> int:
    """Returns the exit code: 0 all the same, 1 an answer differs, 2 other bytes were to be expected."""
    receipts, notes = read(file)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    receipts = chosen(receipts, only)
    replay = Replay(receipts, concurrency, keep_going, anyway)
    if url is not None:
        if model is not None or engine:
            raise ConfigError(
                "--url: the server there has its model and its engine; the options for these don't go", "url"
            )
        return asyncio.run(_remote(replay, url))
    return _here(replay, model, engine)


async def _remote(replay: Replay, url: str) -> int:
    key = os.environ.get("OCTAVO_API_KEY", "").split(",")[0].strip()
    client = Client(Address.of(url), {"Authorization": f"Bearer {key}"} if key else {})
    target = Remote(client)
    try:
        return await replay.on(target, await target.model())
    finally:
        client.close()


def _here(replay: Replay, model: str | None, engine: dict[str, Any]) -> int:
    from octavo.engine.service import AsyncLLM
    from octavo.server.app import create_app
    from octavo.server.settings import ServerSettings

    first = replay.receipts[0]
    model = model or first.model
    if model is None:
        raise ConfigError("the receipts name no model: give --model", "model")
    known = {k: v for k, v in first.settings.items() if k in ("tool_format", "reasoning")}
    # What was let in once is let in again, all of it at a time.
    settings = ServerSettings(
        access_log="off",
        map="off",
        max_waiting=10**6,
        max_waiting_tokens=10**12,
        max_body=2**31,
        max_prompts=10**5,
        max_n=1024,
        max_stops=64,
        max_logprobs=1000,
        **known,
    )
    with AsyncLLM(model, progress=True, **{**as_recorded(first.fingerprint), **engine}) as llm:
        app = create_app(llm, settings, model)
        return asyncio.run(replay.on(InProcess(app), model))


def as_recorded(fingerprint: str | None) -> dict[str, Any]:
    """The engine's settings that a fingerprint names and that this machine can have."""
    found = Fingerprint.parse(fingerprint or "")
    if found is None or not found.backend:
        return {}
    kind, _, isa = found.backend.partition("-")
    if kind == "triton":
        return {"kv_dtype": found.kv_dtype, "gemm": found.compute}
    # A machine with a GPU replays what a CPU answered on its CPU.
    settings: dict[str, Any] = {"kv_dtype": found.kv_dtype, "compute": found.compute, "device": "cpu"}
    if kind == "reference":
        settings["backend"] = kind
    elif isa in runnable_isas():
        settings["isa"] = isa
    return settings


class Replay:
    """Owns: what is to be asked again, and how.

    Promises: nothing is run where other bytes are to be expected, unless ``anyway``; results are told in the order of
    the receipts, however many run at a time.
    """

    def __init__(self, receipts: Sequence[Receipt], concurrency: int, keep_going: bool, anyway: bool) -> None:
        self.receipts = receipts
        self._places = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self._keep_going = keep_going
        self._anyway = anyway

    async def on(self, target: Target, model: str) -> int:
        """Compare fingerprints, ask, compare, tell.  Returns the exit code."""
        here = await fingerprint_of(target)
        if self._mismatched(here) and not self._anyway:
            print(
                "nothing was replayed: other bytes are to be expected; --anyway replays all the same", file=sys.stderr
            )
            return MISMATCH
        print(f"replaying {counted(len(self.receipts), 'receipt')} on {here}, {self._concurrency} at a time")
        tasks = [asyncio.ensure_future(self._one(target, model, receipt)) for receipt in self.receipts]
        same = differs = 0
        try:
            for receipt, task in zip(self.receipts, tasks, strict=True):
                found = await task
                _tell(receipt, found)
                same, differs = (same, differs + 1) if found else (same + 1, differs)
                if found and not self._keep_going:
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        left = len(self.receipts) - same - differs
        verb = "differs" if differs == 1 else "differ"
        rest = f", {left} left out: --keep-going replays them too" if left else ""
        print(f"{counted(len(self.receipts), 'receipt')}: {same} same, {differs} {verb}{rest}")
        return DIFFERS if differs else 0

    def _mismatched(self, here: str) -> bool:
        """Whether any receipt is of another fingerprint; tells the parts that differ, once for each."""
        by_name: dict[str | None, list[int]] = {}
        for receipt in self.receipts:
            by_name.setdefault(receipt.fingerprint, []).append(receipt.number)
        for name, numbers in by_name.items():
            which = f"receipt {numbers[0]}" + (f" and {len(numbers) - 1} more" if numbers[1:] else "")
            if name is None:
                print(f"note: {which}: no system_fingerprint to compare", file=sys.stderr)
            elif name != here:
                for line in mismatch(name, here):
                    print(f"{which}: {line}", file=sys.stderr)
        return bool(by_name.keys() - {here, None})

    async def _one(self, target: Target, model: str, receipt: Receipt) -> Difference | None:
        async with self._places:
            answer = await target.ask("POST", receipt.path, json.dumps(receipt.body(model)).encode())
        if answer.status != 200:
            return Difference("the answer", "an answer", f"an error (status {answer.status}): {told(answer)}")
        if answer.stream:
            chunks = events(answer.body)
            failed = next((chunk["error"] for chunk in chunks if "error" in chunk), None)
            if failed is not None:
                return Difference("the answer", "an answer", f"an error: {failed.get('message')}")
            now = JOINERS[receipt.path](chunks)
        else:
            now = json.loads(answer.body)
        return first_difference(receipt.response, now, receipt.whole)


def mismatch(recorded: str, here: str) -> list[str]:
    """What differs between two fingerprints that aren't equal, a line for each part."""
    old, new = Fingerprint.parse(recorded), Fingerprint.parse(here)
    if old is None or new is None:
        return [f"recorded on {recorded!r}, which is no fingerprint of Octavo's; here is {here}"]
    lines = []
    for part, before, now in old.differences(new):
        hint = f" ({_OPTIONS[part]} {before})" if part in _OPTIONS else ""
        lines.append(f"another {part}: recorded {before}, here {now}{hint}")
    return lines


def _tell(receipt: Receipt, found: Difference | None) -> None:
    print(f"{receipt.number:>5}  {'differs' if found else 'same   '}  {receipt.path}  {receipt.name}".rstrip())
    if found is None:
        return
    print(f"       {found.place}")
    print(f"       recorded  {found.before}")
    print(f"       now       {found.now}")
    if receipt.chancy:
        print("       the receipt tells no seed, so its answer may have been drawn by chance")
