"""Decision process: snapshots of large plans on standard input, the actions on standard output, both pickled.

They would hold the operator's loop and take memory without a limit. The process lives on between decisions, since imports
take longer than most of them, and keeps what it parsed and derived. It ends when its input ends.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from typing import BinaryIO, Final, NamedTuple

from trainwright_operator.flow.actions import Action
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.quarantine import describe
from trainwright_operator.flow.snapshot import NodeFacts, SliceDevice, Snapshot
from trainwright_operator.memory_limit import allowed_bytes, limit_memory

LENGTH_BYTES: Final = 8
"""Bytes of an answer's length, which precedes it."""
_SHARE: Final = 0.1
"""Share of the container's memory, beyond what the process takes at its start."""


class DecisionRequest(NamedTuple):
    """Snapshot without its nodes, which are the same for many passes and pickled once."""

    snapshot: Snapshot
    nodes: bytes
    now: datetime

    @classmethod
    def of(cls, snapshot: Snapshot, nodes: bytes, now: datetime) -> DecisionRequest:
        return cls(replace(snapshot, nodes=(), slice_devices=()), nodes, now)

    def whole_snapshot(self) -> Snapshot:
        nodes, devices = _unpacked(self.nodes)
        return replace(self.snapshot, nodes=nodes, slice_devices=devices)


def packed_nodes(snapshot: Snapshot) -> bytes:
    """Return the nodes of a snapshot as bytes."""
    return pickle.dumps((snapshot.nodes, snapshot.slice_devices))


@lru_cache(maxsize=1)
def _unpacked(nodes: bytes) -> tuple[tuple[NodeFacts, ...], tuple[SliceDevice, ...]]:
    unpacked: tuple[tuple[NodeFacts, ...], tuple[SliceDevice, ...]] = pickle.loads(nodes)  # noqa: S301 - from the operator
    return unpacked


def answer(request: DecisionRequest) -> list[Action] | str:
    """Return the actions, or an error and its place in words: not every error can be pickled."""
    try:
        return decide(request.whole_snapshot(), request.now)
    except MemoryError:
        raise  # the process ends, and another begins without what this one kept
    except Exception as error:  # noqa: BLE001 - the process continues for the other plans
        return describe(error)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    while True:
        try:
            request: DecisionRequest = pickle.load(requests)  # noqa: S301 - from the operator
        except EOFError:
            return
        data = pickle.dumps(answer(request))
        answers.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        answers.flush()


if __name__ == "__main__":
    allowed = allowed_bytes(_SHARE)
    if allowed is not None:
        limit_memory(allowed)
    serve(sys.stdin.buffer, sys.stdout.buffer)
