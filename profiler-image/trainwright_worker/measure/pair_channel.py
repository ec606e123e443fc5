"""Channel between two ranks of a gang, and messages that grow until they last long enough to time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trainwright.worker_api import LinkTask
from trainwright_worker.device import synchronize
from trainwright_worker.measure.pair_rounds import Pair

_MIN_MESSAGE_SECONDS = 0.005
"""Minimum seconds of the largest message, so that its bytes and not its start are timed."""
MAX_MESSAGE_BYTES = 2**28
"""Maximum size: NVLink and 400 Gbit/s take 1 and 5 ms for it."""
_MAX_GROWTH = 16.0
"""Maximum ratio of consecutive sizes, since the first bytes may pass a shaped link unshaped."""


def grown_message_bytes(message_bytes: int, seconds: float) -> int:
    """Return the size to time next, the same if a message of this size lasts long enough."""
    if seconds >= _MIN_MESSAGE_SECONDS or message_bytes >= MAX_MESSAGE_BYTES:
        return message_bytes
    growth = min(_MIN_MESSAGE_SECONDS / max(seconds, 1e-9), _MAX_GROWTH)
    return min(math.ceil(message_bytes * max(growth, 2.0)), MAX_MESSAGE_BYTES)


@dataclass(frozen=True)
class PairChannel:
    """Channel to the other end of a pair, with its message buffers."""

    peer: int
    device: torch.device
    small_message: torch.Tensor
    large_message: torch.Tensor

    def with_message_bytes(self, message_bytes: int) -> PairChannel:
        """Return the channel with room for messages of this size."""
        if message_bytes <= len(self.large_message):
            return self
        return replace(self, large_message=torch.zeros(message_bytes, dtype=torch.uint8, device=self.device))

    def send(self, message: torch.Tensor) -> None:
        dist.send(message, self.peer)
        synchronize(self.device)

    def receive(self, message: torch.Tensor) -> None:
        dist.recv(message, self.peer)
        synchronize(self.device)

    def send_number(self, number: int) -> None:
        """Send a number that `receive_number` returns."""
        self.send(torch.tensor([number], dtype=torch.int64, device=self.device))

    def receive_number(self) -> int:
        number = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.receive(number)
        return int(number)

    def send_and_confirm(self, message_bytes: int) -> float:
        """Return the seconds to send `message_bytes` bytes and receive a small reply."""
        begin = time.perf_counter()
        self.send(self.large_message[:message_bytes])
        self.receive(self.small_message)
        return time.perf_counter() - begin

    def receive_and_confirm(self, message_bytes: int) -> None:
        """Receive a message of `send_and_confirm` and reply."""
        self.receive(self.large_message[:message_bytes])
        self.send(self.small_message)

    def grow_messages(self, message_bytes: int, *, is_fixed: bool = False) -> tuple[PairChannel, int, float]:
        """Send messages that grow until one lasts long enough; return a channel with room for it, its bytes and seconds.

        `is_fixed`: they do not grow, since links are slow enough for the size (those of emulated devices are).
        """
        channel = self
        while True:
            channel.send_and_confirm(message_bytes)  # warm-up of both ends
            seconds = channel.send_and_confirm(message_bytes)
            next_bytes = message_bytes if is_fixed else grown_message_bytes(message_bytes, seconds)
            channel.send_number(next_bytes)
            if next_bytes == message_bytes:
                return channel, message_bytes, seconds
            message_bytes, channel = next_bytes, channel.with_message_bytes(next_bytes)

    def receive_growing_messages(self, message_bytes: int) -> tuple[PairChannel, int]:
        """Receive the messages of `grow_messages`; return a channel with room for the last size, and that size."""
        channel = self
        while True:
            channel.receive_and_confirm(message_bytes)
            channel.receive_and_confirm(message_bytes)
            next_bytes = channel.receive_number()
            if next_bytes == message_bytes:
                return channel, message_bytes
            message_bytes, channel = next_bytes, channel.with_message_bytes(next_bytes)


def open_channel(task: LinkTask, rank: int, pair: Pair, device: torch.device) -> PairChannel:
    """Open this rank's end of the pair."""
    small, large = (
        torch.zeros(size, dtype=torch.uint8, device=device) for size in (task.message_bytes[0], task.message_bytes[-1])
    )
    return PairChannel(pair[0] + pair[1] - rank, device, small, large)
