"""Replay of a pipeline schedule (1F1B or GPipe) as a max-plus recurrence: sends hidden, queued, or occupying both ends.

Durations are fixed and every worker has a fixed order of operations, so each moment is the maximum of earlier moments
plus a duration: a shorter duration never makes anything later. Once rounds repeat, the rest is extrapolated.

On a real NIC, packets of all senders interleave, so messages that start together end together. An emulated link is one
FIFO queue: the second message waits for the first, its receiver runs that much later, and from then on the two no longer
meet. Replicas of a stage thus drift apart by one message, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.plan import Schedule

FORWARD, BACKWARD = 0, 1
Operation = tuple[int, int]
"""(FORWARD or BACKWARD, micro-batch)."""


def operations(schedule: Schedule, micro_batches: int, stage: int, stages: int) -> tuple[Operation, ...]:
    """Return the operations of a stage in one iteration, in order; all its replicas run the same.

    1F1B (PipeDream-Flush) alternates one forward and one backward after some warm-up forwards; GPipe runs all forwards first.
    """
    forwards = [(FORWARD, i) for i in range(micro_batches)]
    backwards = [(BACKWARD, i) for i in range(micro_batches)]
    if schedule is Schedule.GPIPE:
        return (*forwards, *backwards)
    warm_up = min(micro_batches, stages - 1 - stage)
    steady = [pair for i in range(micro_batches - warm_up) for pair in (forwards[warm_up + i], backwards[i])]
    return (*forwards[:warm_up], *steady, *backwards[micro_batches - warm_up :])


MAX_REPLAYED_ROUNDS = 512
"""Rounds after which a pipeline that is not periodic is extrapolated at its mean round."""
TOLERANCE = 1e-9
"""Share of a round by which rounds may differ and still count as equal."""
_MEAN_OVER = 16


class PassDurations(NamedTuple):
    """Stage of a worker, and seconds of its forward, backward and last backward.

    Attributes:
        first_gather_seconds: by which its first forward takes longer, to gather weights that later passes find gathered.
    """

    stage: int
    forward_seconds: float
    backward_seconds: float
    last_backward_seconds: float
    first_gather_seconds: float = 0.0


class BoundaryChannel(NamedTuple):
    """Messages of one direction between workers of neighbouring stages, one per micro-batch, in order.

    Attributes:
        direction: FORWARD or BACKWARD: the operation that sends the message and the operation that needs it.
        send_seconds: until a message has left, once it is computed, its receive is posted and the previous one has left.
        latency_seconds: from then until it has arrived.
        nic_queues: queues shared with other channels into the same stage, and the seconds for which a message occupies each.
    """

    sender: int
    receiver: int
    direction: int
    send_seconds: float
    latency_seconds: float
    nic_queues: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplayTrace:
    """Result of a replay, by worker.

    Attributes:
        ends: when its last operation ends.
        transit_seconds: waiting while its message is in transit.
        idle_seconds: waiting before that message is sent.
    """

    ends: tuple[float, ...]
    transit_seconds: tuple[float, ...]
    idle_seconds: tuple[float, ...]


_Input = tuple[int, int, float, float]
"""Channel number, sender, send seconds and latency seconds."""


@dataclass
class Replay:
    """Replay of workers that compute in order, send asynchronously and wait for their inputs.

    A message leaves once it is computed and its receive is posted (in gloo the sender waits for the receiver's notice); the
    receive is posted when the operation before the one that needs it starts. Messages of one channel leave one after the
    other.
    """

    schedule: Schedule
    micro_batches: int
    durations: Sequence[PassDurations]
    channels: Sequence[BoundaryChannel]
    max_rounds: int = MAX_REPLAYED_ROUNDS
    trace: list[tuple[int, int, int, float, float]] | None = None
    """Log of every operation as (worker, direction, micro-batch, start, end); if given, no round is extrapolated."""
    _inputs: list[tuple[list[_Input], list[_Input]]] = field(default_factory=list)

    def run(self) -> ReplayTrace:
        self._prepare()
        if self.schedule is Schedule.GPIPE:
            self._gpipe()
        else:
            self._one_forward_one_backward()
        return ReplayTrace(tuple(self._worker_free), tuple(self._transit), tuple(self._idle))

    def _prepare(self) -> None:
        count = len(self.durations)
        self._inputs = [([], []) for _ in range(count)]
        for index, channel in enumerate(self.channels):
            self._inputs[channel.receiver][channel.direction].append(
                (index, channel.sender, channel.send_seconds, channel.latency_seconds)
            )
        self._worker_free = [0.0] * count
        self._operation_start = [0.0] * count
        self._operation_end = ([0.0] * count, [0.0] * count)
        self._channel_free = [0.0] * len(self.channels)
        self._transit = [0.0] * count
        self._idle = [0.0] * count
        stages = 1 + max(work.stage for work in self.durations)
        self._by_stage: list[list[int]] = [[] for _ in range(stages)]
        for worker, work in enumerate(self.durations):
            self._by_stage[work.stage].append(worker)

    def _gpipe(self) -> None:
        last = self.micro_batches - 1
        forwards = [(worker, FORWARD) for stage in self._by_stage for worker in stage]
        backwards = [(worker, BACKWARD) for stage in reversed(self._by_stage) for worker in stage]
        self._replay_rounds(forwards, 0, last + 1, FORWARD)
        self._replay_rounds(backwards, 0, last, BACKWARD)
        for worker, _ in backwards:
            self._execute(worker, BACKWARD, last)

    def _one_forward_one_backward(self) -> None:
        """Replay rounds: in round k a stage runs its next forward, if one is left, and backward k; the last stage first."""
        total, stages = self.micro_batches, len(self._by_stage)
        warm_up = [min(total, stages - 1 - stage) for stage in range(stages)]
        for index in range(warm_up[0]):
            for stage, workers in enumerate(self._by_stage):
                if index < warm_up[stage]:
                    for worker in workers:
                        self._execute(worker, FORWARD, index)
        full = max(total - warm_up[0] - 1, 0)
        both = [(w, d) for stage in reversed(self._by_stage) for d in (FORWARD, BACKWARD) for w in stage]
        self._replay_rounds(both, 0, full, None, warm_up=warm_up)
        for index in range(full, total):
            for stage in range(stages - 1, -1, -1):
                if warm_up[stage] + index < total:
                    for worker in self._by_stage[stage]:
                        self._execute(worker, FORWARD, warm_up[stage] + index)
                for worker in self._by_stage[stage]:
                    self._execute(worker, BACKWARD, index)

    def _replay_rounds(
        self, order: list[tuple[int, int]], first: int, stop: int, direction: int | None, *, warm_up: Sequence[int] = ()
    ) -> None:
        """Repeat a round of operations until it is periodic, then extrapolate."""
        previous_state: list[float] = []
        steps: list[float] = []
        history: list[tuple[list[float], list[float], list[float]]] = []
        for index in range(first, stop):
            for worker, what in order:
                self._execute(
                    worker, what, index + (warm_up[self.durations[worker].stage] if warm_up and what == FORWARD else 0)
                )
            if self.trace is not None:
                continue
            state = [
                *self._worker_free,
                *self._operation_start,
                *self._operation_end[0],
                *self._operation_end[1],
                *self._channel_free,
            ]
            history.append((state, list(self._transit), list(self._idle)))
            now = [a - b for a, b in zip(state, previous_state, strict=True)] if previous_state else []
            if steps and self._is_steady(now, steps, direction):
                self._extrapolate(stop - 1 - index, history, 1)
                return
            if len(history) >= self.max_rounds:
                self._extrapolate(stop - 1 - index, history, min(_MEAN_OVER, len(history) - 1))
                return
            previous_state, steps = state, now

    def _is_steady(self, now: list[float], steps: list[float], direction: int | None) -> bool:
        """Return whether every moment advances by a constant step and waits for none that advances by a longer one.

        All later rounds then do so too, since max-plus recurrences are homogeneous.
        """
        limit = TOLERANCE * max(now)
        if any(abs(a - b) > limit for a, b in zip(now, steps, strict=True)):
            return False
        if direction is None:
            return max(now) - min(now) <= limit
        for index, channel in enumerate(self.channels):
            if channel.direction == direction:
                receiver, left = now[channel.receiver], now[4 * len(self.durations) + index]
                if abs(left - receiver) > limit or now[channel.sender] > receiver + limit:
                    return False
        return True

    def _extrapolate(
        self, rounds: int, history: list[tuple[list[float], list[float], list[float]]], mean_rounds: int
    ) -> None:
        """Advance all moments by `rounds` rounds, at the mean of the last `mean_rounds`."""
        if rounds <= 0:
            return
        targets = [self._worker_free, self._operation_start, *self._operation_end, self._channel_free]
        last, earlier = history[-1], history[-1 - mean_rounds]
        position = 0
        for target in targets:
            for index in range(len(target)):
                target[index] += rounds * (last[0][position] - earlier[0][position]) / mean_rounds
                position += 1
        for target, part in ((self._transit, 1), (self._idle, 2)):
            for index in range(len(target)):
                target[index] += rounds * (last[part][index] - earlier[part][index]) / mean_rounds

    def _execute(self, worker: int, direction: int, micro_batch: int) -> None:
        free = start = self._worker_free[worker]
        inputs = self._inputs[worker][direction]
        if inputs:
            receive_posted, ends, all_left, all_computed = (
                self._operation_start[worker],
                self._operation_end[direction],
                self._channel_free,
                0.0,
            )
            for index, sender, drain, latency in inputs:
                computed, left = ends[sender], all_left[index]
                all_computed = max(all_computed, computed)
                # Unrolled: this is the innermost loop of every estimate.
                left = max(left, computed)
                left = max(left, receive_posted)
                all_left[index] = left = left + drain
                start = max(start, left + latency)
            if start > free:
                transit = start - (max(free, all_computed))
                self._transit[worker] += transit
                self._idle[worker] += start - free - transit
        self._compute(worker, direction, micro_batch, start)

    def _compute(self, worker: int, direction: int, micro_batch: int, start: float) -> None:
        work = self.durations[worker]
        if direction == FORWARD:
            end = start + work.forward_seconds + (0.0 if micro_batch else work.first_gather_seconds)
        elif micro_batch == self.micro_batches - 1:
            end = start + work.last_backward_seconds
        else:
            end = start + work.backward_seconds
        self._operation_start[worker] = start
        self._worker_free[worker] = self._operation_end[direction][worker] = end
        if self.trace is not None:
            self.trace.append((worker, direction, micro_batch, start, end))


@dataclass
class FifoReplay(Replay):
    """Replay whose channels may have FIFO NIC queues, so that workers cannot be merged.

    All messages of one micro-batch are served before any of the next. If a fast replica is a micro-batch ahead of a slow one,
    its own end is predicted too late; the iteration's end hardly changes. A message enters all its queues at once.
    """

    _channels_into_stage: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """Channels into each (stage, direction)."""

    def _prepare(self) -> None:
        super()._prepare()
        self._channels_into_stage = {}
        for index, channel in enumerate(self.channels):
            key = self.durations[channel.receiver].stage, channel.direction
            self._channels_into_stage.setdefault(key, []).append(index)
        queues = 1 + max((queue for channel in self.channels for queue, _ in channel.nic_queues), default=-1)
        self._channel_free += [0.0] * queues

    def _execute(self, worker: int, direction: int, micro_batch: int) -> None:
        """Execute one operation; the stage's first worker sends the queued messages of all its workers."""
        stage = self.durations[worker].stage
        if worker == self._by_stage[stage][0]:
            self._send_queued(self._channels_into_stage.get((stage, direction), ()), direction)
        free = start = self._worker_free[worker]
        inputs = self._inputs[worker][direction]
        if inputs:
            sent = max(self._operation_end[direction][sender] for _, sender, _, _ in inputs)
            start = max(free, *(self._channel_free[index] + latency for index, _, _, latency in inputs))
            transit = start - max(free, sent) if start > free else 0.0
            self._transit[worker] += transit
            self._idle[worker] += start - free - transit
        self._compute(worker, direction, micro_batch, start)

    def _send_queued(self, channels: Sequence[int], direction: int) -> None:
        ready = []
        for index in channels:
            channel = self.channels[index]
            ready.append(
                (max(self._operation_end[direction][channel.sender], self._operation_start[channel.receiver]), index)
            )
        first_queue = len(self.channels)
        for moment, index in sorted(ready):
            channel = self.channels[index]
            begin = max(moment, self._channel_free[index])
            for queue, _ in channel.nic_queues:
                begin = max(begin, self._channel_free[first_queue + queue])
            self._channel_free[index] = begin + channel.send_seconds
            for queue, busy in channel.nic_queues:
                self._channel_free[first_queue + queue] = begin + busy

    def _is_steady(self, now: list[float], steps: list[float], direction: int | None) -> bool:
        """Require also that all moments that advance do so by one step: otherwise messages overtake each other."""
        moving = [step for step in now if step > 0]
        is_even = not moving or max(moving) - min(moving) <= TOLERANCE * max(moving)
        return is_even and super()._is_steady(now, steps, direction)


@dataclass
class BlockingReplay(Replay):
    """Replay in which a transfer begins when sender and receiver are both free, and neither computes meanwhile.

    Between two operations a stage sends the outputs of the first and receives the inputs of the second (Megatron-LM's
    `p2p_communication.py` waits for every request; DeepSpeed's `TrainSchedule` exchanges on the compute stream). All
    messages of a micro-batch in one direction of a boundary pass together; where activations and gradients meet, the
    gradients follow. Under FIFO messages queue for their NICs.

    In the order of operations of `Replay`, a stage comes to a message only when the other end has computed all that
    precedes it there, so the message is carried as soon as one of its ends comes to it. A worker ends when its last
    message has arrived.
    """

    _outputs: list[list[int]] = field(default_factory=list)
    """Channels out of each stage."""
    _stage_inputs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Channels into each stage, by direction."""
    _is_pending: list[bool] = field(default_factory=list)
    """Whether the last output of a channel's sender was not sent yet."""

    def _prepare(self) -> None:
        super()._prepare()
        stages = len(self._by_stage)
        self._outputs = [[] for _ in range(stages)]
        self._stage_inputs = [([], []) for _ in range(stages)]
        self._is_pending = [False] * len(self.channels)
        for index, channel in enumerate(self.channels):
            self._outputs[self.durations[channel.sender].stage].append(index)
            self._stage_inputs[self.durations[channel.receiver].stage][channel.direction].append(index)
        queues = 1 + max((queue for channel in self.channels for queue, _ in channel.nic_queues), default=-1)
        self._channel_free = [0.0] * queues

    def _execute(self, worker: int, direction: int, micro_batch: int) -> None:
        """Execute one operation; the stage's first worker carries the messages of all its workers."""
        stage = self.durations[worker].stage
        if worker == self._by_stage[stage][0]:
            self._carry([index for index in self._outputs[stage] if self._is_pending[index]])
            self._carry([index for index in self._stage_inputs[stage][direction] if self._is_pending[index]])
            for index in self._outputs[stage]:
                self._is_pending[index] = self.channels[index].direction == direction
        self._compute(worker, direction, micro_batch, self._worker_free[worker])

    def _carry(self, group: Sequence[int]) -> None:
        """Carry messages that pass together; each occupies its ends until it has arrived."""
        free = self._worker_free
        ready = []
        for index in group:
            channel = self.channels[index]
            ready.append((max(free[channel.sender], free[channel.receiver]), index))
            self._is_pending[index] = False
        begun: dict[int, float] = {}
        arrived: dict[int, float] = {}
        for moment, index in sorted(ready):
            channel, begin = self.channels[index], moment
            for queue, _ in channel.nic_queues:
                begin = max(begin, self._channel_free[queue])
            for queue, busy in channel.nic_queues:
                self._channel_free[queue] = begin + busy
            end = begin + channel.send_seconds + channel.latency_seconds
            for worker in (channel.sender, channel.receiver):
                begun[worker] = min(begun.get(worker, begin), begin)
                arrived[worker] = max(arrived.get(worker, 0.0), end)
        for worker, end in arrived.items():
            self._idle[worker] += begun[worker] - free[worker]
            self._transit[worker] += end - begun[worker]
            free[worker] = end

    def _is_steady(self, now: list[float], steps: list[float], direction: int | None) -> bool:  # noqa: ARG002
        """Return whether all moments that advance do so by one step, twice: both ends of a message wait."""
        limit = TOLERANCE * max(now)
        moving = [step for step in now if step > 0]
        return all(abs(a - b) <= limit for a, b in zip(now, steps, strict=True)) and (
            not moving or max(moving) - min(moving) <= limit
        )
