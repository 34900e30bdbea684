"""Reads frames of the live map, written from the format's description alone."""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from dataclasses import dataclass, field
from typing import Any

from octavo.watch.snapshot import FIGURES


@dataclass
class Unfolded:
    serial: int = 0
    key: bool = False
    time: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    states: bytes = b""
    sequences: dict[int, dict[str, Any]] = field(default_factory=dict)
    requests: dict[int, str] = field(default_factory=dict)


NAMES = ("number", "request", "branch", "state", "tokens", "computed", "prompt")


def unfold(data: bytes, slots: int) -> list[Unfolded]:
    """All frames in ``data``; ``slots``: blocks of the pool and slots of the host tier together."""
    out: list[Unfolded] = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        at += 4
        if length:
            out.append(_one(data[at : at + length], out[-1] if out else Unfolded(), slots))
        at += length
    assert at == len(data)
    return out


def _one(data: bytes, before: Unfolded, slots: int) -> Unfolded:
    mark, time, *figures = struct.unpack_from(f"<Id{len(FIGURES)}d", data)
    now = Unfolded(mark & 0x7FFFFFFF, bool(mark >> 31), time, dict(zip(FIGURES, figures, strict=True)))
    if now.key:
        before = Unfolded(states=bytes(slots))
    else:
        assert now.serial == before.serial + 1
    body = zlib.decompress(data[12 + 8 * len(FIGURES) :])
    (length,) = struct.unpack_from("<I", body)
    assert length % 4 == 0
    head = json.loads(body[4 : 4 + length])
    rest = body[4 + length :]
    now.states = bytes(a ^ b for a, b in zip(rest[:slots], before.states, strict=True))
    entries = array("i", rest[slots:])
    for *values, groups in head["sequences"]:
        row = dict(zip(NAMES, values, strict=True))
        row["tables"] = []
        for group, (holes, kept, more) in enumerate(groups):
            old = before.sequences[row["number"]]["tables"][group] if kept else []
            table = [*old[:kept], *entries[:more]]
            del entries[:more]
            row["tables"].append([-1 if i < holes else block for i, block in enumerate(table)])
        now.sequences[row["number"]] = row
    assert not entries
    now.requests = {int(number): id for number, id in head["requests"].items()}
    return now
