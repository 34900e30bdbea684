"""Many streams at once for a while, some dropped and some read slowly: the rest must be whole and right.

Then memory must have stayed flat and every block be back; then the server is killed without warning and started again
on the same disk tier, and must answer as before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from common import save, verdict

from octavo.loadgen.asking import Events
from octavo.loadgen.http import Address, Client
from octavo.loadgen.process import ServerProcess

PROMPTS, LENGTH = 24, 40
FILLERS = 64
FLAT = 1.1  # memory after the first third of the time against the end
SPARE = 16 << 20  # bytes of growth that are nobody's leak: pages of buffers, caches of the allocator


@dataclass
class Seen:
    """Owns: what became of the streams, and how much memory the server held."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    body: bytes
    answer: str

    def raw(self, address: Address) -> bytes:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.named}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n".encode() + self.body


async def questions(server: ServerProcess, tokens: int) -> list[Question]:
    """Prompts with their answers, asked one by one and in one piece."""
    client = Client(Address.of(server.url))
    rng = random.Random(0)
    out = []
    for _ in range(PROMPTS):
        asked: dict[str, Any] = {"prompt": [rng.randrange(3, 400) for _ in range(LENGTH)], "max_tokens": tokens}
        asked |= {"temperature": 0, "ignore_eos": True}
        reply = await client.exchange("POST", "/v1/completions", json.dumps(asked).encode())
        if reply.status != 200:
            raise SystemExit(f"error: {reply.status}: {reply.body!r}")
        answer = json.loads(reply.body)["choices"][0]["text"]
        out.append(Question(json.dumps({**asked, "stream": True}).encode(), answer))
    client.close()
    return out


async def place(number: int, asked: list[Question], address: Address, end: float, seen: Seen) -> None:
    """One connection after the other until the time is over: one in ten is dropped, one in ten read slowly."""
    rng = random.Random(f"place {number}")
    while time.monotonic() < end:
        kind = rng.choices(("whole", "dropped", "slow"), (8, 1, 1))[0]
        question = rng.choice(asked)
        try:
            text = await stream(question.raw(address), address, kind, rng)
        except (OSError, ValueError, LookupError) as error:
            seen.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            continue
        seen.ends[kind] += 1
        if kind != "dropped" and text != question.answer:
            seen.wrong.append(f"{kind}: {text!r} instead of {question.answer!r}")


async def stream(raw: bytes, address: Address, kind: str, rng: random.Random) -> str:
    """The text of one stream; an empty one if it was dropped."""
    # A slow reader's buffers are small, so that it is the server that has to hold what is not read.
    limit = 1024 if kind == "slow" else 65536
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=limit)
    try:
        writer.write(raw)
        left = rng.uniform(0, 2) if kind == "dropped" else None
        async with asyncio.timeout(left) as limited:
            return await read(reader, kind, rng)
    except TimeoutError:
        if limited.expired():
            return ""
        raise
    finally:
        writer.transport.abort()


async def read(reader: asyncio.StreamReader, kind: str, rng: random.Random) -> str:
    status = await reader.readline()
    if b" 200 " not in status:
        raise ValueError(f"answered with {status.decode().strip()}")
    while (await reader.readline()).strip():
        pass
    events, text, done = Events(), "", False
    while size := int((await reader.readline()).strip() or b"0", 16):
        for data in events.feed((await reader.readexactly(size + 2))[:-2]):
            if data == b"[DONE]":
                done = True
            else:
                message = json.loads(data)
                text += "".join(choice["text"] for choice in message["choices"])
        if kind == "slow":
            await asyncio.sleep(rng.uniform(0.05, 0.2))
    if not done:
        raise ValueError(f"ended without its end after {text!r}")
    return text


async def watched(server: ServerProcess, seen: Seen, end: float) -> None:
    while time.monotonic() < end:
        seen.memory.append((time.monotonic(), server.resident()))
        await asyncio.sleep(0.5)


async def soak(server: ServerProcess, asked: list[Question], connections: int, seconds: float) -> Seen:
    seen = Seen()
    end = time.monotonic() + seconds
    address = Address.of(server.url)
    places = [place(i, asked, address, end, seen) for i in range(connections)]
    await asyncio.gather(watched(server, seen, end), *places)
    return seen


async def displace(server: ServerProcess) -> None:
    """Long prompts, enough of them that what is cached falls out of the pool, and out of the host tier too."""
    client = Client(Address.of(server.url))
    rng = random.Random(1)
    for _ in range(FILLERS):
        prompt = [rng.randrange(3, 400) for _ in range(10 * LENGTH)]
        body = json.dumps({"prompt": prompt, "max_tokens": 1}).encode()
        await client.exchange("POST", "/v1/completions", body)
    client.close()


def blocks_back(server: ServerProcess) -> bool:
    """Within a few seconds: nobody runs or waits, and no sequence holds a block."""
    for _ in range(100):
        found = server.metrics()
        held = found['octavo:kv_blocks{state="used",tier="device"}']
        busy = sum(value for name, value in found.items() if name.startswith("octavo:num_requests_"))
        if held == busy == 0:
            return True
        time.sleep(0.1)
    print(f"still held: {held:.0f} blocks, {busy:.0f} requests")
    return False


def main() -> int:
    p = argparse.ArgumentParser(prog="bench/soak.py", description=__doc__.splitlines()[0])
    p.add_argument("--model", default="smollm2-135m", help="a pulled model or a file (default: %(default)s)")
    p.add_argument("--connections", type=int, default=1000, help="(default: %(default)s)")
    p.add_argument("--seconds", type=float, default=120.0, help="(default: %(default)s)")
    p.add_argument("--tokens", type=int, default=24, help="tokens of an answer (default: %(default)s)")
    p.add_argument("--kv-blocks", type=int, default=1024, help="(default: %(default)s)")
    given = p.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, given.connections + 100), hard), hard))
    with tempfile.TemporaryDirectory() as folder:
        options = ("--kv-blocks", str(given.kv_blocks), "--max-waiting", str(given.connections), "--access-log", "off")
        # A small host tier, so that what falls out of the pool reaches the disk.
        options += ("--swap-memory", "1MiB", "--kv-disk", "256MiB", "--kv-disk-path", folder)
        return 0 if whole_run(given, options) else 1


def whole_run(given: argparse.Namespace, options: tuple[str, ...]) -> bool:
    with ServerProcess(given.model, *options) as server:
        asked = asyncio.run(questions(server, given.tokens))
        seen = asyncio.run(soak(server, asked, given.connections, given.seconds))
        good = [verdict(f"streams whole and right, of which slow: {seen.ends['slow']}", seen.ends["whole"], 1)]
        print(f"dropped at random moments: {seen.ends['dropped']}")
        good.append(verdict("streams that were not", len(seen.wrong), 0, at_least=False))
        for line in seen.wrong[:5]:
            print(f"  {line}")
        third = [size for moment, size in seen.memory if moment - seen.memory[0][0] > given.seconds / 3]
        growth = max(third) / min(third) if max(third) - min(third) > SPARE else 1.0
        print(f"memory: {third[0] >> 20} MiB after a third of the time, {third[-1] >> 20} MiB at the end")
        good.append(verdict("growth of memory", growth, FLAT, at_least=False))
        good.append(verdict("all blocks back", float(blocks_back(server)), 1))
        asyncio.run(displace(server))
        written = server.metrics()['octavo:kv_disk_writes_total{model_name="' + server.model + '"}']
        server.kill()
    with ServerProcess(given.model, *options) as server:
        again = asyncio.run(questions(server, given.tokens))
        good.append(verdict("the same answers after kill -9", float(again == asked), 1))
        found = server.metrics()
        label = '_total{model_name="' + server.model + '"}'
        read, failed = found["octavo:kv_disk_reads" + label], found["octavo:kv_disk_failures" + label]
        print(f"disk tier: {written:.0f} blocks written before")
        good.append(verdict("blocks read from disk after it", read, 1))
        good.append(verdict("blocks that the disk lost", failed, 0, at_least=False))
    save("soak", {"ends": dict(seen.ends), "wrong": seen.wrong, "memory": seen.memory, "disk": [written, read, failed]})
    return all(good)


if __name__ == "__main__":
    sys.exit(main())
