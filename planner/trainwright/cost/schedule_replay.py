"""Replay of a pipeline schedule (1F1B or GPipe) as a max-plus recurrence: sends hidden, queued, or occupying both ends.

Durations are fixed and every worker has a fixed order of operations, so each moment is the maximum of earlier moments
plus a duration: a shorter duration never makes anything later. Once rounds repeat, the rest is extrapolated.

On a real NIC, packets of all senders interleave, so messages that start together end together. An emulated link is one
FIFO queue: the second message waits for the first, its receiver runs that much later, and from then on the two no longer
meet. Replicas of a stage thus drift apart by one message, once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
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


MAX_PERIOD = 64
"""Most rounds after which a replay may repeat; of 4,300 replays of three searches the longest took 10."""
MAX_REPLAYED_ROUNDS = 512
"""Rounds after which a pipeline that is not periodic is extrapolated at its mean round."""
TOLERANCE = 1e-9
"""Share of a period by which periods may differ and still count as equal."""
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
_Step = tuple[int, int, float, Sequence[_Input]]
"""Worker, direction, seconds and inputs of an operation."""


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
    _stage_steps: list[tuple[tuple[list[_Step], list[_Step]], ...]] = field(default_factory=list)
    """[stage][direction] steps of an iteration's usual micro-batches, and of its first forward or last backward."""
    _logged: Counter[tuple[int, int]] = field(default_factory=Counter)

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
        self._stage_steps = [(([], []), ([], [])) for _ in range(stages)]
        for worker, (work, (forwards, backwards)) in enumerate(zip(self.durations, self._inputs, strict=True)):
            self._by_stage[work.stage].append(worker)
            (usual_forwards, first_forwards), (usual_backwards, last_backwards) = self._stage_steps[work.stage]
            usual_forwards.append((worker, FORWARD, work.forward_seconds, forwards))
            first_forwards.append((worker, FORWARD, work.forward_seconds + work.first_gather_seconds, forwards))
            usual_backwards.append((worker, BACKWARD, work.backward_seconds, backwards))
            last_backwards.append((worker, BACKWARD, work.last_backward_seconds, backwards))

    def _gpipe(self) -> None:
        last, stages = self.micro_batches - 1, range(len(self._by_stage))
        self._replay_rounds(lambda index: self._steps([(s, FORWARD, index) for s in stages]), last + 1, FORWARD)
        for_round = [(s, BACKWARD) for s in reversed(stages)]
        self._replay_rounds(lambda index: self._steps([(*item, index) for item in for_round]), last, BACKWARD)
        self._execute(self._steps([(*item, last) for item in for_round]))

    def _one_forward_one_backward(self) -> None:
        """Replay rounds: in round k a stage runs its next forward, if one is left, and backward k; the last stage first."""
        total, stages = self.micro_batches, len(self._by_stage)
        warm_up = [min(total, stages - 1 - stage) for stage in range(stages)]
        for index in range(warm_up[0]):
            self._execute(self._steps([(s, FORWARD, index) for s in range(stages) if index < warm_up[s]]))

        def steps_of(index: int) -> list[_Step]:
            order: list[tuple[int, int, int]] = []
            for stage in range(stages - 1, -1, -1):
                if warm_up[stage] + index < total:
                    order.append((stage, FORWARD, warm_up[stage] + index))
                order.append((stage, BACKWARD, index))
            return self._steps(order)

        full = max(total - warm_up[0] - 1, 0)
        self._replay_rounds(steps_of, full, None)
        for index in range(full, total):
            self._execute(steps_of(index))

    def _steps(self, order: Iterable[tuple[int, int, int]]) -> list[_Step]:
        """Return the steps of all workers for (stage, direction, micro-batch) in order."""
        ends = 0, self.micro_batches - 1  # the micro-batch of each direction that may take longer
        steps: list[_Step] = []
        for stage, direction, micro_batch in order:
            steps += self._stage_steps[stage][direction][micro_batch == ends[direction]]
        return steps

    def _replay_rounds(self, steps_of: Callable[[int], list[_Step]], rounds: int, direction: int | None) -> None:
        """Run the rounds, of which all but the first have equal steps; leave out periods once they repeat."""
        history: list[list[float]] = []
        steps, index, may_repeat = steps_of(0) if rounds else [], 0, self.trace is None
        while index < rounds:
            self._execute(steps)
            index += 1
            if index == 1:
                steps = steps_of(1)
            if may_repeat:
                history.append(self._moments())
                period, left = self._period(history, direction), rounds - index
                if period:
                    self._advance(history[-1], history[-1 - period], left // period)
                    index += left // period * period
                elif len(history) >= self.max_rounds:
                    period = min(_MEAN_OVER, len(history) - 1)
                    self._advance(history[-1], history[-1 - period], left / period)
                    index = rounds
                may_repeat = not period

    def _moments(self) -> list[float]:
        """Return all moments, then the waits."""
        return [
            *self._worker_free,
            *self._operation_start,
            *self._operation_end[FORWARD],
            *self._operation_end[BACKWARD],
            *self._channel_free,
            *self._transit,
            *self._idle,
        ]

    def _period(self, history: Sequence[Sequence[float]], direction: int | None) -> int:
        """Return the rounds after which all moments that advance have advanced by one step; 0 if there are none yet.

        All later rounds then repeat, too, since the recurrence is homogeneous: it knows differences of moments alone. In
        `direction`, a stage of GPipe may also keep a longer step than the stages before it.
        """
        now, last = history[-1], len(self.durations) - 1
        if len(history) < 3:
            return 0
        for period in range(1, min(len(history) - 1, MAX_PERIOD) + 1):
            earlier = history[-1 - period]
            step = now[0] - earlier[0]
            # One worker rules most periods out.
            if abs(now[last] - earlier[last] - step) <= TOLERANCE * step and self._advance_together(now, earlier):
                # A period of one round is awaited twice, so that its seconds are rounded as they always were.
                return period if period > 1 or self._advance_together(earlier, history[-3]) else 0
        return 1 if direction is not None and self._is_steady(history[-3:], direction) else 0

    def _advance_together(self, now: Sequence[float], earlier: Sequence[float]) -> bool:
        moments = len(now) - 2 * len(self.durations)
        steps = [a - b for a, b in zip(now[:moments], earlier[:moments], strict=True) if a > b]
        return max(steps, default=0.0) - min(steps, default=0.0) <= TOLERANCE * max(steps, default=0.0)

    def _is_steady(self, history: Sequence[Sequence[float]], direction: int) -> bool:
        """Return whether every moment advances by a constant step and waits for none that advances by a longer one."""
        before, earlier, now = history
        moments = len(now) - 2 * len(self.durations)
        steps = [a - b for a, b in zip(now, earlier, strict=True)]
        limit = TOLERANCE * max(steps[:moments])
        if any(abs(steps[n] - (earlier[n] - before[n])) > limit for n in range(moments)):
            return False
        for index, channel in enumerate(self.channels):
            if channel.direction == direction:
                receiver, left = steps[channel.receiver], steps[4 * len(self.durations) + index]
                if abs(left - receiver) > limit or steps[channel.sender] > receiver + limit:
                    return False
        return True

    def _advance(self, now: Sequence[float], earlier: Sequence[float], periods: float) -> None:
        """Advance all moments and waits by what they advanced from `earlier` to `now`, as many times as there are periods."""
        moved = iter([a + periods * (a - b) for a, b in zip(now, earlier, strict=True)])
        for target in (
            self._worker_free,
            self._operation_start,
            *self._operation_end,
            self._channel_free,
            self._transit,
            self._idle,
        ):
            target[:] = islice(moved, len(target))

    def _execute(self, steps: Sequence[_Step]) -> None:
        # The innermost loop of every estimate: lists in local variables, comparisons in place of `max`.
        free, started, all_ends, all_left = (
            self._worker_free,
            self._operation_start,
            self._operation_end,
            self._channel_free,
        )
        for worker, direction, seconds, inputs in steps:
            ends = all_ends[direction]
            start = before = free[worker]
            if inputs:
                receive_posted, all_computed = started[worker], 0.0
                for index, sender, drain, latency in inputs:
                    computed, left = ends[sender], all_left[index]
                    if computed > all_computed:  # noqa: PLR1730
                        all_computed = computed
                    if computed > left:  # noqa: PLR1730
                        left = computed
                    if receive_posted > left:  # noqa: PLR1730
                        left = receive_posted
                    all_left[index] = left = left + drain
                    arrived = left + latency
                    if arrived > start:  # noqa: PLR1730
                        start = arrived
                if start > before:
                    transit = start - max(before, all_computed)
                    self._transit[worker] += transit
                    self._idle[worker] += start - before - transit
            started[worker] = start
            free[worker] = ends[worker] = start + seconds
            if self.trace is not None:
                self._log(worker, direction, start, start + seconds)

    def _compute(self, worker: int, direction: int, start: float, seconds: float) -> None:
        end = start + seconds
        self._operation_start[worker] = start
        self._worker_free[worker] = self._operation_end[direction][worker] = end
        if self.trace is not None:
            self._log(worker, direction, start, end)

    def _log(self, worker: int, direction: int, start: float, end: float) -> None:
        assert self.trace is not None
        self.trace.append((worker, direction, self._logged[worker, direction], start, end))
        self._logged[worker, direction] += 1


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

    def _execute(self, steps: Sequence[_Step]) -> None:
        """Execute the operations; a stage's first worker sends the queued messages of all its workers."""
        for worker, direction, seconds, inputs in steps:
            stage = self.durations[worker].stage
            if worker == self._by_stage[stage][0]:
                self._send_queued(self._channels_into_stage.get((stage, direction), ()), direction)
            free = start = self._worker_free[worker]
            if inputs:
                sent = max(self._operation_end[direction][sender] for _, sender, _, _ in inputs)
                start = max(free, *(self._channel_free[index] + latency for index, _, _, latency in inputs))
                transit = start - max(free, sent) if start > free else 0.0
                self._transit[worker] += transit
                self._idle[worker] += start - free - transit
            self._compute(worker, direction, start, seconds)

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

    def _is_steady(self, history: Sequence[Sequence[float]], direction: int) -> bool:
        """Return False: stages with different steps would let messages overtake each other."""
        del history, direction
        return False


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

    def _execute(self, steps: Sequence[_Step]) -> None:
        """Execute the operations; a stage's first worker carries the messages of all its workers."""
        for worker, direction, seconds, _ in steps:
            stage = self.durations[worker].stage
            if worker == self._by_stage[stage][0]:
                self._carry([index for index in self._outputs[stage] if self._is_pending[index]])
                self._carry([index for index in self._stage_inputs[stage][direction] if self._is_pending[index]])
                for index in self._outputs[stage]:
                    self._is_pending[index] = self.channels[index].direction == direction
            self._compute(worker, direction, self._worker_free[worker], seconds)

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

    def _is_steady(self, history: Sequence[Sequence[float]], direction: int) -> bool:
        """Return False: both ends of a message wait, so that stages have one step."""
        del history, direction
        return False
