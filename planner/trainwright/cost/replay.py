"""One iteration, event by event, as the executor runs it."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.cost.collectives import Fabric, Route
from trainwright.cost.network import Network
from trainwright.cost.schedule import FORWARD, Operation


@dataclass(frozen=True, slots=True)
class Worker:
    """A unit's work: its operations in order and how long a forward and a backward take."""

    operations: tuple[Operation, ...]
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages of one direction between two workers, one for each micro-batch, in order.

    Attributes:
        direction: the operation that sends: FORWARD or BACKWARD; the receiver needs it for the same operation.
    """

    sender: int
    receiver: int
    direction: int
    route: Route
    message_bytes: float


@dataclass(frozen=True, slots=True)
class Sync:
    """An all-reduce of gradients: starts when its workers and earlier syncs are done."""

    workers: tuple[int, ...]
    after: tuple[int, ...]
    route: Route
    ring_bytes: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the replay saw.

    Attributes:
        ends: when each worker's last operation ended.
        transit: seconds for which each worker waited while its message was on the way.
        idle: seconds for which it waited before that message was even sent.
        sync_ends: when each all-reduce ended.
    """

    ends: tuple[float, ...]
    transit: tuple[float, ...]
    idle: tuple[float, ...]
    sync_ends: tuple[float, ...]


@dataclass(slots=True)
class _ChannelState:
    sent_at: list[float] = field(default_factory=list)
    posted: int = 0
    started: int = 0
    arrived: int = 0
    busy: bool = False


_COMPUTED, _DRAINED, _ARRIVED, _REDUCED, _SYNCED = range(5)
Event = tuple[int, int]
"""(what happened, to which worker, channel or sync)."""


class Replay:
    """Workers compute in their order; sends are asynchronous; a receiver waits.

    A message leaves only when it is both computed and asked for (so does gloo: the sender waits for the receiver's
    notice), and a receiver asks for it when the operation before the one that needs it starts to compute. Messages of a channel leave one after the other; all
    transfers that run at the same time share the network cards, the all-reduces of gradients included.
    """

    def __init__(
        self, workers: Sequence[Worker], channels: Sequence[Channel], syncs: Sequence[Sync], fabric: Fabric
    ) -> None:
        self.workers, self.channels, self.syncs = workers, channels, syncs
        self.network: Network[Event] = Network(fabric)
        self._events: list[tuple[float, int, Event]] = []
        self._count = 0
        self._position = [0] * len(workers)
        self._entered = [0.0] * len(workers)
        self._busy = [False] * len(workers)
        self._transit = [0.0] * len(workers)
        self._idle = [0.0] * len(workers)
        self._ends = [math.nan] * len(workers)
        self._states = [_ChannelState() for _ in channels]
        self._sync_ends = [math.nan] * len(syncs)
        self._missing = [len(sync.workers) + len(sync.after) for sync in syncs]
        self._inputs: dict[tuple[int, int], list[int]] = {}
        self._outputs: dict[tuple[int, int], list[int]] = {}
        for index, channel in enumerate(channels):
            self._inputs.setdefault((channel.receiver, channel.direction), []).append(index)
            self._outputs.setdefault((channel.sender, channel.direction), []).append(index)

    def run(self) -> Timeline:
        """Replay the iteration. Raises RuntimeError where the operations wait for each other in a circle."""
        for worker in range(len(self.workers)):
            self._post(worker, 0)
            self._enter(worker)
        while True:
            event_time = self._events[0][0] if self._events else math.inf
            now = min(event_time, self.network.next_end())
            if now == math.inf:
                break
            ended = self.network.advance(now)
            for event in ended:
                self._handle(event)
            while self._events and self._events[0][0] <= now:
                self._handle(heapq.heappop(self._events)[2])
        if any(math.isnan(end) for end in (*self._ends, *self._sync_ends)):
            raise RuntimeError("the schedule waits in a circle: some operations never got their messages")
        return Timeline(tuple(self._ends), tuple(self._transit), tuple(self._idle), tuple(self._sync_ends))

    def _at(self, seconds: float, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._events, (seconds, self._count, event))

    def _handle(self, event: Event) -> None:
        what, index = event
        if what == _COMPUTED:
            self._finish_operation(index)
        elif what == _DRAINED:
            self._states[index].busy = False
            self._at(self.network.now + self.channels[index].route.latency_seconds, (_ARRIVED, index))
            self._pump(index)
        elif what == _ARRIVED:
            self._states[index].arrived += 1
            self._try(self.channels[index].receiver)
        elif what == _REDUCED:
            self._at(self.network.now + self.syncs[index].latency_seconds, (_SYNCED, index))
        else:
            self._finish_sync(index)

    def _post(self, worker: int, position: int) -> None:
        """Ask for the messages of the operation at that position."""
        operations = self.workers[worker].operations
        if position < len(operations):
            for index in self._inputs.get((worker, operations[position][0]), ()):
                self._states[index].posted += 1
                self._pump(index)

    def _enter(self, worker: int) -> None:
        """Turn to the next operation: wait for its messages."""
        self._entered[worker] = self.network.now
        if self._position[worker] == len(self.workers[worker].operations):
            self._ends[worker] = self.network.now
            for number, sync in enumerate(self.syncs):
                if worker in sync.workers:
                    self._release(number)
            return
        self._try(worker)

    def _try(self, worker: int) -> None:
        """Start the worker's operation if all its messages are there, and ask for those of the one behind it."""
        if self._busy[worker] or self._position[worker] == len(self.workers[worker].operations):
            return
        direction, micro_batch = self.workers[worker].operations[self._position[worker]]
        inputs = self._inputs.get((worker, direction), ())
        if any(self._states[index].arrived <= micro_batch for index in inputs):
            return
        now, entered = self.network.now, self._entered[worker]
        if inputs and now > entered:
            sent = max(self._states[index].sent_at[micro_batch] for index in inputs)
            transit = now - max(sent, entered)
            self._transit[worker] += transit
            self._idle[worker] += now - entered - transit
        work = self.workers[worker]
        self._busy[worker] = True
        self._post(worker, self._position[worker] + 1)
        self._at(now + (work.forward_seconds if direction == FORWARD else work.backward_seconds), (_COMPUTED, worker))

    def _finish_operation(self, worker: int) -> None:
        direction, _ = self.workers[worker].operations[self._position[worker]]
        self._busy[worker] = False
        self._position[worker] += 1
        for index in self._outputs.get((worker, direction), ()):
            self._states[index].sent_at.append(self.network.now)
            self._pump(index)
        self._enter(worker)

    def _pump(self, index: int) -> None:
        """Let the channel's next message leave if it is computed, asked for, and the one before is through."""
        state = self._states[index]
        if state.busy or state.started >= min(len(state.sent_at), state.posted):
            return
        state.started += 1
        state.busy = True
        channel = self.channels[index]
        self._transfer(channel.route, channel.message_bytes, (_DRAINED, index))

    def _transfer(self, route: Route, message_bytes: float, event: Event) -> None:
        if route.crossings and message_bytes > 0:
            self.network.start(route, message_bytes, event)
        else:
            self._at(self.network.now + message_bytes / route.alone_bytes_per_second, event)

    def _release(self, number: int) -> None:
        self._missing[number] -= 1
        if self._missing[number] == 0:
            sync = self.syncs[number]
            self._transfer(sync.route, sync.ring_bytes, (_REDUCED, number))

    def _finish_sync(self, number: int) -> None:
        self._sync_ends[number] = self.network.now
        for later, sync in enumerate(self.syncs):
            if number in sync.after:
                self._release(later)
