"""Reference of the replay: every operation of every round, one after the other, as the docstrings of the product describe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from trainwright.cost.schedule_replay import BACKWARD, FORWARD, BoundaryChannel, PassDurations, ReplayTrace
from trainwright.plan import Schedule

_Input = tuple[int, int, float, float]
"""Channel number, sender, send seconds and latency seconds."""


@dataclass
class PlainReplay:
    """Replay with hidden transfers."""

    schedule: Schedule
    micro_batches: int
    durations: Sequence[PassDurations]
    channels: Sequence[BoundaryChannel]
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
        for direction, stages in ((FORWARD, self._by_stage), (BACKWARD, self._by_stage[::-1])):
            for index in range(self.micro_batches):
                for worker in chain.from_iterable(stages):
                    self._execute(worker, direction, index)

    def _one_forward_one_backward(self) -> None:
        """Replay rounds: in round k a stage runs its next forward, if one is left, and backward k; the last stage first."""
        total, stages = self.micro_batches, len(self._by_stage)
        warm_up = [min(total, stages - 1 - stage) for stage in range(stages)]
        for index in range(warm_up[0]):
            for stage, workers in enumerate(self._by_stage):
                if index < warm_up[stage]:
                    for worker in workers:
                        self._execute(worker, FORWARD, index)
        for index in range(total):
            for stage in range(stages - 1, -1, -1):
                if warm_up[stage] + index < total:
                    for worker in self._by_stage[stage]:
                        self._execute(worker, FORWARD, warm_up[stage] + index)
                for worker in self._by_stage[stage]:
                    self._execute(worker, BACKWARD, index)

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


@dataclass
class PlainFifoReplay(PlainReplay):
    """Replay whose messages queue for NICs."""

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


@dataclass
class PlainBlockingReplay(PlainReplay):
    """Replay whose workers wait for their messages."""

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
