"""Rules of NCCL for the calls of all ranks: functions on records that return what is wrong."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, zip_longest

from recorded_calls import Call, Close, Communicator, Event, Record, Wait


def groups_with_different_members(records: Sequence[Record]) -> list[str]:
    """Return the groups that their members do not create alike."""
    wrong = []
    for name in dict.fromkeys(name for record in records for name in record.groups):
        ranks_by_creator = {record.rank: record.groups[name] for record in records if name in record.groups}
        if any(ranks != tuple(ranks_by_creator) for ranks in ranks_by_creator.values()):
            wrong.append(f"group {name}: {ranks_by_creator}")
    return wrong


def communicators_started_by_some(records: Sequence[Record]) -> list[str]:
    """Return communicators whose first call only some members make, or not in one scope: it never returns."""
    wrong = []
    for communicator, calls_by_rank in _by_communicator(records).items():
        first = [calls[0] for calls in calls_by_rank.values()]
        starts = {(call.scope, call.batch is None) for call in first}
        if tuple(sorted(calls_by_rank)) != communicator.ranks or len(starts) > 1:
            wrong.append(f"{communicator}: {_by_rank(calls_by_rank, first)}")
    return wrong


def pairs_that_may_block(records: Sequence[Record]) -> list[str]:
    """Return groups of two whose first messages do not go both ways in one batch.

    The first message of a pair in each direction blocks its process until the peer's call. A schedule posts receives ahead,
    whose messages the peer may only send after what this process has not submitted yet.
    """
    wrong = []
    for record in records:
        for communicator, calls in record.calls_by_communicator().items():
            messages = [call for call in calls if call.peer is not None]
            first = {call.kind for call in messages if call.batch is not None and call.batch == messages[0].batch}
            if messages and len(record.groups.get(communicator.group, ())) == 2 and first != {"send", "receive"}:
                wrong.append(f"rank {record.rank}, {communicator}: {first or 'outside a batch'}")
    return wrong


def collectives_that_differ(records: Sequence[Record]) -> list[str]:
    """Return the first place in each group where two members make different collectives, or sizes or dtypes differ."""
    wrong = []
    for communicator, calls_by_rank in _by_communicator(records).items():
        collectives = [[call for call in calls if call.peer is None] for calls in calls_by_rank.values()]
        for calls in zip_longest(*collectives):
            if len({call and call.message for call in calls}) > 1:
                wrong.append(f"{communicator}: {_by_rank(calls_by_rank, calls)}")
                break
    return wrong


def barriers_on_other_devices(records: Sequence[Record], device_of: Callable[[int], int]) -> list[str]:
    """Return barriers that do not name their rank's device."""
    return [
        f"rank {record.rank}: {call.device_ids} in {call.scope}"
        for record in records
        for call in record.calls
        if call.kind == "barrier" and call.device_ids != (device_of(record.rank),)
    ]


def messages_that_differ(records: Sequence[Record]) -> list[str]:
    """Return the first place in each pair's messages where the two ends differ.

    Outside batches, the order of both directions together counts: opposite messages that both send first never end.
    """
    wrong = []
    for communicator, calls_by_rank in _by_communicator(records).items():
        for one, other in combinations(communicator.ranks, 2):
            ends = [
                [call for call in calls_by_rank.get(rank, ()) if call.peer == peer]
                for rank, peer in ((one, other), (other, one))
            ]
            orders = _directions(ends) if any(call.batch is not None for end in ends for call in end) else [ends]
            for order in orders:
                for pair in zip_longest(*order):
                    if None in pair or pair[0].message != _mirrored(pair[1]):
                        wrong.append(f"{communicator}: {_by_rank((one, other), pair)}")
                        break
    return wrong


def _directions(ends: list[list[Call]]) -> list[list[list[Call]]]:
    """Return sends with their receives, of each direction."""
    kinds = (("send", "receive"), ("receive", "send"))
    return [[[call for call in end if call.kind == kind] for end, kind in zip(ends, one, strict=True)] for one in kinds]


def _mirrored(call: Call) -> tuple[object, ...]:
    return ({"send": "receive", "receive": "send"}[call.kind], *call.message[1:])


def _by_communicator(records: Sequence[Record]) -> dict[Communicator, dict[int, list[Call]]]:
    found: dict[Communicator, dict[int, list[Call]]] = defaultdict(dict)
    for record in records:
        for communicator, calls in record.calls_by_communicator().items():
            found[communicator][record.rank] = calls
    return found


def _by_rank(ranks: object, calls: Sequence[Call | None]) -> str:
    return ", ".join(
        f"rank {rank} {call and (call.scope, call.message)}" for rank, call in zip(ranks, calls, strict=True)
    )


def groups_closed_wrongly(records: Sequence[Record]) -> list[str]:
    """Return groups that are used after their end, or that end in another order on another rank."""
    wrong, orders = [], []
    for record in records:
        closed: list[str] = []
        for event in record.events:
            if isinstance(event, Close):
                closed.append(event.group)
            elif isinstance(event, Call) and event.communicator.group in closed:
                wrong.append(f"rank {record.rank}: {event} after its group's end")
        orders.append(closed)
    for (one, first), (other, second) in combinations(enumerate(orders), 2):
        common = set(first) & set(second)
        if [name for name in first if name in common] != [name for name in second if name in common]:
            wrong.append(f"ranks {one} and {other} end their groups in different orders")
    return wrong


@dataclass
class _Stream:
    """Calls of one rank on one communicator, in order; the messages of a batch run together."""

    entries: list[range] = field(default_factory=list)
    ended: int = 0

    @property
    def head(self) -> range:
        return self.entries[self.ended] if self.ended < len(self.entries) else range(0)


class Replay:
    """Replay of all ranks' calls as NCCL runs them, with the strictest rules.

    A communicator's first call blocks its process until all members make theirs. Calls on a communicator run in order. A
    collective ends when all members' have begun, a message when both ends have, and a process goes on after a wait when what
    it waits for has ended. (On a GPU the stream waits, not the process, which can then only submit more.)

    Args:
        one_queue: whether a call must begin before its process goes on, as if the GPU had one hardware queue for all streams.
    """

    def __init__(self, records: Sequence[Record], *, one_queue: bool = False) -> None:
        self._one_queue = one_queue
        self._events = {record.rank: record.events for record in records}
        self._next = dict.fromkeys(self._events, 0)
        self._callers: dict[Communicator, set[int]] = defaultdict(set)
        self._streams: dict[tuple[Communicator, int], _Stream] = defaultdict(_Stream)
        self._ended: dict[int, set[int]] = {rank: set() for rank in self._events}

    def stuck(self) -> list[str]:
        """Return where each rank is stuck at last; empty if all reach their end and all calls have ended."""
        while any(self._advance(rank) for rank in self._events):
            pass
        blocked = [
            f"rank {rank} at {self._describe(rank, events[self._next[rank]])}"
            for rank, events in self._events.items()
            if self._next[rank] < len(events)
        ]
        return blocked or [
            f"rank {rank}: {self._events[rank][stream.head[0]]} never ends"
            for (_, rank), stream in self._streams.items()
            if stream.head
        ]

    def _describe(self, rank: int, event: Event) -> str:
        return f"a wait for {self._events[rank][event.event]}" if isinstance(event, Wait) else str(event)

    def _advance(self, rank: int) -> bool:
        """Run a rank until it blocks. Returns whether it moved."""
        events, start = self._events[rank], self._next[rank]
        while self._next[rank] < len(events):
            steps = self._run(rank, events[self._next[rank]])
            if not steps:
                break
            self._next[rank] += steps
        return self._next[rank] > start

    def _run(self, rank: int, event: Event) -> int:
        """Run an event. Returns how many events are done with it, 0 if it blocks."""
        if isinstance(event, Wait):
            return int(event.event in self._ended[rank])
        if isinstance(event, Close):
            return 1
        communicator, first = event.communicator, self._next[rank]
        self._callers[communicator].add(rank)
        stream = self._streams[communicator, rank]
        if len(self._callers[communicator]) < len(communicator.ranks) or (self._one_queue and stream.head):
            return 0
        stop = first + 1
        while event.batch is not None and self._is_in_batch(rank, stop, event.batch):
            stop += 1
        stream.entries.append(range(first, stop))
        while self._end_heads(communicator):
            pass
        return stop - first

    def _is_in_batch(self, rank: int, index: int, batch: int) -> bool:
        event = self._events[rank][index] if index < len(self._events[rank]) else None
        return isinstance(event, Call) and event.batch == batch

    def _end_heads(self, communicator: Communicator) -> bool:
        """End the calls at the heads of a communicator's streams that can end. Returns whether later ones can now begin."""
        streams = {rank: self._streams[communicator, rank] for rank in communicator.ranks}
        heads = {rank: [(index, self._call(rank, index)) for index in one.head] for rank, one in streams.items()}
        if all(head and head[0][1].peer is None for head in heads.values()):
            for rank, head in heads.items():
                self._ended[rank].update(index for index, _ in head)
        for rank, head in heads.items():
            for index, call in head:
                if call.kind == "send" and call.peer is not None:
                    self._meet(rank, index, call.peer, heads[call.peer])
        moved = [one for rank, one in streams.items() if one.head and self._ended[rank].issuperset(one.head)]
        for stream in moved:
            stream.ended += 1
        return bool(moved)

    def _meet(self, rank: int, index: int, peer: int, calls_of_peer: list[tuple[int, Call]]) -> None:
        """End a send and the first receive at the peer that still waits for this rank."""
        if index in self._ended[rank]:
            return
        for received, call in calls_of_peer:
            if call.kind == "receive" and call.peer == rank and received not in self._ended[peer]:
                self._ended[rank].add(index)
                self._ended[peer].add(received)
                return

    def _call(self, rank: int, index: int) -> Call:
        event = self._events[rank][index]
        assert isinstance(event, Call)
        return event
