"""Emulated devices: real computation, followed by sleep until the device table's time has passed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.cluster import Emulation
from trainwright.layer import LayerKind

_SLEEP_MARGIN_SECONDS = 0.0004
_FINE_SLEEP_SECONDS = 0.00005
"""Shortest sleep, and about the overshoot of every sleep."""
_LATE_TOLERANCE_SECONDS = 0.0002
_LATE_TOLERANCE_RATIO = 0.02
"""Lateness beyond this share of the emulated time, or beyond the absolute tolerance for a sleep's overshoot, counts as late."""
BLOCKED_SECONDS = 0.0002
"""Waits longer than this blocked: the next pass starts when the message came."""


@dataclass(frozen=True, slots=True)
class ComputeSegment:
    """Uninterrupted computation on the emulated device.

    Attributes:
        sums_gradients: whether the backward sums the gradients of its input over the tensor group.
        sums_output: whether its output is summed over the tensor group.
        gathers_statistics: whether the tensor group gathers statistics of its output.
    """

    seconds: float
    sums_gradients: bool
    sums_output: bool
    gathers_statistics: bool = False


def forward_segments(emulation: Emulation, kind: LayerKind, *, rows: int, tensor: int) -> tuple[ComputeSegment, ...]:
    """Return the segments of one layer's forward for `rows` rows on one of `tensor` ranks.

    `kind` is as the tensor group computes it, with a divided vocabulary.
    """
    degree = tensor if kind.is_tensor_parallel else 1
    share = 1 / len(kind.segments)
    return tuple(
        ComputeSegment(
            emulation.compute_seconds(segment.forward_flops_per_row * rows / degree, floor_share=share),
            segment.backward_all_reduce_elements_per_row > 0 and degree > 1,
            segment.ends_in_all_reduce and degree > 1,
            segment.forward_gathered_bytes_per_row > 0 and degree > 1,
        )
        for segment in kind.segments
    )


def backward_segments(forward: Sequence[ComputeSegment], share: float = 1.0) -> tuple[ComputeSegment, ...]:
    """Return the segments of the backward: twice the FLOPs and the floor; a copy's backward is an all-reduce.

    `share` of its work is left where weights are frozen.
    """
    return tuple(
        ComputeSegment(2 * share * piece.seconds, sums_gradients=piece.sums_output, sums_output=piece.sums_gradients)
        for piece in reversed(forward)
    )


class Pacer:
    """Pacer that stretches computation to the emulated device's time; inactive without a device table.

    A pass is a forward, a backward or an update. It starts when the preceding wait ended or, without a wait, when the
    previous pass was due, so neither sleep overshoot nor a late pass accumulates. Paced segments never contain waits for
    messages, so no communication hides in them.

    Attributes:
        paced: number of paced segments.
        late: number of paced segments whose real computation took longer than the emulated device would.
        paced_seconds: emulated seconds of all paced segments.
        late_seconds: seconds that the late ones took longer.
    """

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.reset_counts()
        self._segment_seconds: Sequence[float] | None = ()
        self._stated_seconds = 0.0
        self._segment_index = 0
        self._segment_start = 0.0
        self._actual_start = 0.0
        self._due = 0.0

    def reset_counts(self) -> None:
        self.paced = self.late = 0
        self.paced_seconds = self.late_seconds = 0.0

    @property
    def late_ratio(self) -> float:
        """Seconds that late segments took longer, over the emulated seconds of all."""
        return self.late_seconds / self.paced_seconds if self.paced_seconds else 0.0

    def start(self, segment_seconds: Sequence[float] | None, *, waited_seconds: float) -> None:
        """Start a pass of these segments, after a wait of `waited_seconds`; None: `add` states their seconds."""
        if self.active:
            self._segment_seconds, self._segment_index, self._stated_seconds = segment_seconds, 0, 0.0
            self._actual_start = time.perf_counter()
            self._segment_start = self._actual_start if waited_seconds > BLOCKED_SECONDS else self._due

    def add(self, seconds: float) -> None:
        """Add to the current segment of a pass whose segments are not known when it starts."""
        self._stated_seconds += seconds

    def pause(self) -> None:
        """End the current segment, before a communication."""
        if self.active:
            self._end_segment()

    def resume(self) -> None:
        """Start the next segment, after a communication."""
        if self.active:
            self._segment_start = self._actual_start = time.perf_counter()

    def end(self) -> None:
        """End the pass. Its last segment is empty if the pass ended in a communication."""
        if not self.active:
            return
        if self._segment_seconds is None:
            self._end_segment()
            return
        if self._segment_index != len(self._segment_seconds) - 1:
            raise RuntimeError(
                f"a pass of {len(self._segment_seconds)} paced chunks ended in chunk {self._segment_index}"
            )
        if self._segment_seconds[self._segment_index] > 0:
            self._end_segment()
        else:
            self._segment_index += 1
            self._due = self._segment_start

    def reset_due(self) -> None:
        """Let the next pass that does not wait start now: a communication has just ended."""
        if self.active:
            self._due = time.perf_counter()

    def _end_segment(self) -> None:
        if self._segment_seconds is None:
            planned_seconds, self._stated_seconds = self._stated_seconds, 0.0
        else:
            planned_seconds = self._segment_seconds[self._segment_index]
        due = self._segment_start + planned_seconds
        self._segment_index += 1
        if planned_seconds == 0:  # one communication directly follows another
            self._due = self._segment_start
            return
        self.paced += 1
        self.paced_seconds += planned_seconds
        self._due = due
        # A segment after a late one may end late without being slow: only its own time counts.
        late_seconds = time.perf_counter() - max(self._actual_start, self._segment_start) - planned_seconds
        if late_seconds > max(_LATE_TOLERANCE_SECONDS, _LATE_TOLERANCE_RATIO * planned_seconds):
            self.late += 1
            self.late_seconds += late_seconds
            return
        while (remaining := due - time.perf_counter()) > _FINE_SLEEP_SECONDS:
            time.sleep(
                remaining - _SLEEP_MARGIN_SECONDS if remaining > 2 * _SLEEP_MARGIN_SECONDS else _FINE_SLEEP_SECONDS
            )
