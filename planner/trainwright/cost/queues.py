"""The same iteration where messages queue for a link: each leaves whole, of a micro-batch the one that is ready first.

Packets of all senders take turns on a GPU node's network card, so that messages which start together end together. A
shaped link is one queue, and a small message enters it at once: the second waits for the first, its receiver goes on
that much later, and from then on the two no longer meet. Replicas of a stage so fall apart by one message, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trainwright.cost.replay import TOLERANCE, Replay


@dataclass
class QueuedReplay(Replay):
    """A replay whose channels may name queues. Workers that share one are not alike, so they are not lumped.

    All messages of one micro-batch are served before any of the next, also where a fast replica is that far ahead of a
    slow one: its own end is then told too late, the slowest one's (an iteration's) hardly.

    A message enters all its queues at once.
    """

    _inbound: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """By stage and direction: the channels into it."""

    def _prepare(self) -> None:
        super()._prepare()
        self._inbound = {}
        for index, channel in enumerate(self.channels):
            key = self.works[channel.receiver].stage, channel.direction
            self._inbound.setdefault(key, []).append(index)
        queues = 1 + max((queue for channel in self.channels for queue, _ in channel.queues), default=-1)
        self._left += [0.0] * queues

    def _do(self, worker: int, direction: int, micro_batch: int) -> None:
        """Workers of a stage do the same operation one after the other; with the first all their messages leave."""
        stage = self.works[worker].stage
        if worker == self._by_stage[stage][0]:
            self._carry(self._inbound.get((stage, direction), ()), direction)
        free = start = self._free[worker]
        inputs = self._inputs[worker][direction]
        if inputs:
            sent = max(self._ends[direction][sender] for _, sender, _, _ in inputs)
            start = max(free, *(self._left[index] + latency for index, _, _, latency in inputs))
            transit = start - max(free, sent) if start > free else 0.0
            self._transit[worker] += transit
            self._idle[worker] += start - free - transit
        self._compute(worker, direction, micro_batch, start)

    def _carry(self, channels: Sequence[int], direction: int) -> None:
        ready = []
        for index in channels:
            channel = self.channels[index]
            ready.append((max(self._ends[direction][channel.sender], self._started[channel.receiver]), index))
        first_queue = len(self.channels)
        for moment, index in sorted(ready):
            channel = self.channels[index]
            begin = max(moment, self._left[index])
            for queue, _ in channel.queues:
                begin = max(begin, self._left[first_queue + queue])
            self._left[index] = begin + channel.drain_seconds
            for queue, busy in channel.queues:
                self._left[first_queue + queue] = begin + busy

    def _is_steady(self, now: list[float], steps: list[float], direction: int | None) -> bool:
        """Of forwards alone only where all that moves on does so by one step: else messages overtake each other."""
        moving = [step for step in now if step > 0]
        is_even = not moving or max(moving) - min(moving) <= TOLERANCE * max(moving)
        return is_even and super()._is_steady(now, steps, direction)
