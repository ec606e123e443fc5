"""Emulated devices: each piece of computation is real, and then lasts as long as the device table says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Emulation
from trainwright.layer import LayerKind

_COARSE_MARGIN_SECONDS = 0.0004
_FINE_SLEEP_SECONDS = 0.00005
"""The shortest sleep, and about what every sleep lasts too long."""
_LATE_SECONDS = 0.0002
_LATE_SHARE = 0.02
"""Computation counts as late beyond what a sleep misses its end by, or beyond 2 % of its time."""
BLOCKED_SECONDS = 0.0002
"""A wait longer than this found its message missing: what follows starts when the message came."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Uninterrupted computation on the emulated device; under tensor parallelism an all-reduce may follow it."""

    seconds: float
    ends_in_all_reduce: bool


def forward_pieces(emulation: Emulation, kind: LayerKind, *, rows: int, tensor: int) -> tuple[Piece, ...]:
    """The pieces of one layer's forward for `rows` rows on one of `tensor` ranks."""
    degree = tensor if kind.is_tensor_parallel else 1
    share = 1 / len(kind.segments)
    return tuple(
        Piece(
            emulation.compute_seconds(segment.forward_flops_per_row * rows / degree, floor_share=share),
            segment.ends_in_all_reduce and degree > 1,
        )
        for segment in kind.segments
    )


def backward_pieces(forward: Sequence[Piece]) -> tuple[Piece, ...]:
    """The same layers backwards: twice the FLOPs and twice the floor; all-reduces follow the same pieces."""
    return tuple(Piece(2 * piece.seconds, piece.ends_in_all_reduce) for piece in reversed(forward))


class Pacer:
    """Stretches computation to the emulated device's time; without a device table it does nothing.

    A pass is a forward, a backward or an update. It starts where the wait before it ended or, if it need not wait,
    where the pass before it was due: neither a sleep that lasts too long nor a late pass adds up. Waits for messages
    always lie outside of the paced chunks, so that no communication hides in them.

    Attributes:
        paced, late: chunks that were paced, and those of them whose real computation was not done in time.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.paced = 0
        self.late = 0
        self._chunks: Sequence[float] = ()
        self._next = 0
        self._begin = 0.0
        self._started = 0.0
        self._due = 0.0

    def reset_counts(self) -> None:
        self.paced = self.late = 0

    def start(self, lengths: Sequence[float], *, waited_seconds: float) -> None:
        """A pass of these chunks begins, after a wait of `waited_seconds`."""
        if self.active:
            self._chunks, self._next = lengths, 0
            self._started = time.perf_counter()
            self._begin = self._started if waited_seconds > BLOCKED_SECONDS else self._due

    def interrupt(self) -> None:
        """The chunk before an all-reduce ends here."""
        if self.active:
            self._end_chunk()

    def resume(self) -> None:
        """The all-reduce is done; the next chunk begins now."""
        if self.active:
            self._begin = self._started = time.perf_counter()

    def finish(self) -> None:
        """The pass ends here. Its last chunk is empty where it ended in an all-reduce."""
        if not self.active:
            return
        if self._next != len(self._chunks) - 1:
            raise RuntimeError(f"a pass of {len(self._chunks)} paced chunks ended in chunk {self._next}")
        if self._chunks[self._next] > 0:
            self._end_chunk()
        else:
            self._next += 1
            self._due = self._begin

    def synchronize(self) -> None:
        """Communication ended just now; a pass that need not wait starts from here."""
        if self.active:
            self._due = time.perf_counter()

    def _end_chunk(self) -> None:
        length = self._chunks[self._next]
        due = self._begin + length
        self._next += 1
        if length == 0:  # one communication follows upon another
            self._due = self._begin
            return
        self.paced += 1
        self._due = due
        # Behind an earlier late chunk a chunk may end late through no fault of its own: its own time counts.
        if time.perf_counter() - max(self._started, self._begin) - length > max(_LATE_SECONDS, _LATE_SHARE * length):
            self.late += 1
            return
        while (left := due - time.perf_counter()) > _FINE_SLEEP_SECONDS:
            time.sleep(left - _COARSE_MARGIN_SECONDS if left > 2 * _COARSE_MARGIN_SECONDS else _FINE_SLEEP_SECONDS)
