"""One iteration of a pipeline, operation by operation, until it goes on at a steady pace.

All durations are fixed and every worker has a fixed order, so that each moment is the latest of some others plus a
duration (a max-plus recurrence): no duration that shrinks makes anything later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainwright.cost.schedule import BACKWARD, FORWARD
from trainwright.plan import Schedule

MAX_REPLAYED_ROUNDS = 512
"""A pipeline that has found no steady pace by then goes on at its mean pace."""
TOLERANCE = 1e-9
"""Share of a round by which rounds of one pace may differ."""
_MEAN_OVER = 16


class Work(NamedTuple):
    """What a worker does: its stage, and seconds of a forward, a backward and its last backward."""

    stage: int
    forward_seconds: float
    backward_seconds: float
    last_backward_seconds: float


class Channel(NamedTuple):
    """Messages of one direction between workers of neighbouring stages, one for each micro-batch, in order.

    Attributes:
        direction: the operation that sends: FORWARD or BACKWARD; the receiver needs it for the same operation.
        drain_seconds: until a message has left, from when it is computed, asked for and the one before has left.
        latency_seconds: until it has arrived from then.
        queues: numbers of the queues that its messages pass together with those of other channels into the same stage,
            and for how many seconds one occupies each.
    """

    sender: int
    receiver: int
    direction: int
    drain_seconds: float
    latency_seconds: float
    queues: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """What the replay saw, by worker.

    Attributes:
        ends: when its last operation ended.
        transit: seconds for which it waited while its message was on the way.
        idle: seconds for which it waited before that message was even sent.
    """

    ends: tuple[float, ...]
    transit: tuple[float, ...]
    idle: tuple[float, ...]


_Input = tuple[int, int, float, float]
"""A channel's number, its sender, and its seconds."""


@dataclass
class Replay:
    """Workers compute in their order; sends are asynchronous; a receiver waits.

    A message leaves only when it is both computed and asked for (so does gloo: the sender waits for the receiver's
    notice), and a receiver asks for it when the operation before the one that needs it starts to compute. Messages of
    a channel leave one after the other.
    """

    schedule: Schedule
    micro_batches: int
    works: Sequence[Work]
    channels: Sequence[Channel]
    max_rounds: int = MAX_REPLAYED_ROUNDS
    trace: list[tuple[int, int, int, float, float]] | None = None
    """Where given, it gets every operation replayed: worker, direction, micro-batch, start, end; no round is skipped."""
    _inputs: list[tuple[list[_Input], list[_Input]]] = field(default_factory=list)

    def run(self) -> Timeline:
        self._prepare()
        if self.schedule is Schedule.GPIPE:
            self._gpipe()
        else:
            self._one_forward_one_backward()
        return Timeline(tuple(self._free), tuple(self._transit), tuple(self._idle))

    def _prepare(self) -> None:
        count = len(self.works)
        self._inputs = [([], []) for _ in range(count)]
        for index, channel in enumerate(self.channels):
            self._inputs[channel.receiver][channel.direction].append(
                (index, channel.sender, channel.drain_seconds, channel.latency_seconds)
            )
        self._free = [0.0] * count
        self._started = [0.0] * count
        self._ends = ([0.0] * count, [0.0] * count)
        self._left = [0.0] * len(self.channels)
        self._transit = [0.0] * count
        self._idle = [0.0] * count
        stages = 1 + max(work.stage for work in self.works)
        self._by_stage: list[list[int]] = [[] for _ in range(stages)]
        for worker, work in enumerate(self.works):
            self._by_stage[work.stage].append(worker)

    def _gpipe(self) -> None:
        last = self.micro_batches - 1
        forwards = [(worker, FORWARD) for stage in self._by_stage for worker in stage]
        backwards = [(worker, BACKWARD) for stage in reversed(self._by_stage) for worker in stage]
        self._rounds(forwards, 0, last + 1, FORWARD)
        self._rounds(backwards, 0, last, BACKWARD)
        for worker, _ in backwards:
            self._do(worker, BACKWARD, last)

    def _one_forward_one_backward(self) -> None:
        """Round k of a stage: its next forward, if there is one left, and backward k; the last stage goes first."""
        total, stages = self.micro_batches, len(self._by_stage)
        ahead = [min(total, stages - 1 - stage) for stage in range(stages)]
        for index in range(ahead[0]):
            for stage, workers in enumerate(self._by_stage):
                if index < ahead[stage]:
                    for worker in workers:
                        self._do(worker, FORWARD, index)
        full = max(total - ahead[0] - 1, 0)
        both = [(w, d) for stage in reversed(self._by_stage) for d in (FORWARD, BACKWARD) for w in stage]
        self._rounds(both, 0, full, None, ahead=ahead)
        for index in range(full, total):
            for stage in range(stages - 1, -1, -1):
                if ahead[stage] + index < total:
                    for worker in self._by_stage[stage]:
                        self._do(worker, FORWARD, ahead[stage] + index)
                for worker in self._by_stage[stage]:
                    self._do(worker, BACKWARD, index)

    def _rounds(
        self, order: list[tuple[int, int]], first: int, stop: int, direction: int | None, *, ahead: Sequence[int] = ()
    ) -> None:
        """Repeat a round of operations; where two rounds in a row add the same, so do all that follow."""
        before: list[float] = []
        steps: list[float] = []
        history: list[tuple[list[float], list[float], list[float]]] = []
        for index in range(first, stop):
            for worker, what in order:
                self._do(worker, what, index + (ahead[self.works[worker].stage] if ahead and what == FORWARD else 0))
            if self.trace is not None:
                continue
            state = [*self._free, *self._started, *self._ends[0], *self._ends[1], *self._left]
            history.append((state, list(self._transit), list(self._idle)))
            now = [a - b for a, b in zip(state, before, strict=True)] if before else []
            if steps and self._is_steady(now, steps, direction):
                self._skip(stop - 1 - index, history, 1)
                return
            if len(history) >= self.max_rounds:
                self._skip(stop - 1 - index, history, min(_MEAN_OVER, len(history) - 1))
                return
            before, steps = state, now

    def _is_steady(self, now: list[float], steps: list[float], direction: int | None) -> bool:
        """Whether every moment moves on by its own step, and none waits for one that moves on by a longer step.

        Then each goes on so: what it waited for last stays the latest (max-plus recurrences are homogeneous).
        """
        limit = TOLERANCE * max(now)
        if any(abs(a - b) > limit for a, b in zip(now, steps, strict=True)):
            return False
        if direction is None:
            return max(now) - min(now) <= limit
        for index, channel in enumerate(self.channels):
            if channel.direction == direction:
                receiver, left = now[channel.receiver], now[4 * len(self.works) + index]
                if abs(left - receiver) > limit or now[channel.sender] > receiver + limit:
                    return False
        return True

    def _skip(self, rounds: int, history: list[tuple[list[float], list[float], list[float]]], over: int) -> None:
        """Let so many rounds pass at the pace of the last ones."""
        if rounds <= 0:
            return
        targets = [self._free, self._started, *self._ends, self._left]
        last, earlier = history[-1], history[-1 - over]
        position = 0
        for target in targets:
            for index in range(len(target)):
                target[index] += rounds * (last[0][position] - earlier[0][position]) / over
                position += 1
        for target, part in ((self._transit, 1), (self._idle, 2)):
            for index in range(len(target)):
                target[index] += rounds * (last[part][index] - earlier[part][index]) / over

    def _do(self, worker: int, direction: int, micro_batch: int) -> None:
        free = start = self._free[worker]
        inputs = self._inputs[worker][direction]
        if inputs:
            asked, ends, all_left, sent = self._started[worker], self._ends[direction], self._left, 0.0
            for index, sender, drain, latency in inputs:
                computed, left = ends[sender], all_left[index]
                sent = max(sent, computed)
                # Written out: this is the innermost loop of every estimate.
                left = max(left, computed)
                left = max(left, asked)
                all_left[index] = left = left + drain
                start = max(start, left + latency)
            if start > free:
                transit = start - (max(free, sent))
                self._transit[worker] += transit
                self._idle[worker] += start - free - transit
        self._compute(worker, direction, micro_batch, start)

    def _compute(self, worker: int, direction: int, micro_batch: int, start: float) -> None:
        work = self.works[worker]
        if direction == FORWARD:
            end = start + work.forward_seconds
        elif micro_batch == self.micro_batches - 1:
            end = start + work.last_backward_seconds
        else:
            end = start + work.backward_seconds
        self._started[worker] = start
        self._free[worker] = self._ends[direction][worker] = end
        if self.trace is not None:
            self.trace.append((worker, direction, micro_batch, start, end))
