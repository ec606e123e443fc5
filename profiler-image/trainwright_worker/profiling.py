"""Layer profiling: each distinct layer kind by itself, as often as it takes to know its times."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trainwright.layer import LayerKind
from trainwright.orders import FailureReason, ProfileOrder, ProfileReport
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright_worker import output
from trainwright_worker.bench import Bench
from trainwright_worker.clock import Clock, Moment
from trainwright_worker.emulation import Pacer
from trainwright_worker.failures import classify
from trainwright_worker.layers.layer import Output
from trainwright_worker.repeats import Enough, relative_spread
from trainwright_worker.seat import Seat
from trainwright_worker.watchdog import Watchdog


def run(order: ProfileOrder, seat: Seat, device: torch.device, watchdog: Watchdog) -> ProfileReport:
    """Measure every kind at the order's tensor degree; kinds that are not tensor parallel at degree 1 alone.

    That rows do not fit into the device's memory is a finding: what is larger is not tried.
    """
    accelerator = order.gang.nodes[0].accelerator
    kinds = [kind for kind in order.model.kinds if order.tensor_degree == 1 or kind.is_tensor_parallel]
    rows = sorted(set(order.rows))
    found: list[LayerProfile] = []
    too_large: list[LayerTooLarge] = []
    for number, kind in enumerate(kinds):
        for place, count in enumerate(rows):
            watchdog.beat(f"profiling {kind.name} with {count} rows")
            profile = _try(order, kind, count, device, watchdog)
            if profile is None:
                too_large.append(LayerTooLarge(accelerator, kind.name, order.tensor_degree, count))
                break
            found.append(profile)
            if seat.is_speaker:
                output.progress(number * len(rows) + place + 1, len(kinds) * len(rows), "layer profiles")
    return ProfileReport(tuple(found), tuple(too_large))


def _try(
    order: ProfileOrder, kind: LayerKind, rows: int, device: torch.device, watchdog: Watchdog
) -> LayerProfile | None:
    """The profile, or None where memory does not suffice for it."""
    accelerator = order.gang.nodes[0].accelerator
    try:
        bench = Bench.of(order, kind, rows, device, order.gang.emulation_of(accelerator))
        return _profile(order, bench, accelerator, watchdog)
    except (MemoryError, RuntimeError) as error:
        if classify(error).reason is not FailureReason.OUT_OF_MEMORY:
            raise
        error.__traceback__ = None  # its frames hold the layer and all that was computed
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _profile(order: ProfileOrder, bench: Bench, accelerator: str, watchdog: Watchdog) -> LayerProfile:
    laps = _measure(order, bench, watchdog)
    return LayerProfile(
        accelerator=accelerator,
        kind=bench.kind.name,
        tensor_degree=order.tensor_degree,
        rows=bench.rows,
        forward_seconds=statistics.median(laps.forwards),
        backward_seconds=statistics.median(laps.backwards),
        update_seconds=statistics.median(laps.updates),
        activation_bytes=bench.activation_bytes,
        parameter_bytes=bench.parameter_bytes,
        samples=len(laps.forwards),
        relative_spread=relative_spread(laps.both),
        peak_bytes=bench.peak_bytes(),
    )


@dataclass
class _Laps:
    """Seconds of every measured forward, backward and update."""

    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        return [forward + backward for forward, backward in zip(self.forwards, self.backwards, strict=True)]


def _measure(order: ProfileOrder, bench: Bench, watchdog: Watchdog) -> _Laps:
    """Warm up, then measure rounds of the ordered iterations until the median is known, or the time is over."""
    stopwatch = _Stopwatch(bench)
    enough = Enough(order.target_uncertainty, order.seconds_per_layer)
    stopwatch.round(order.warmup_iterations)
    begin = time.perf_counter()
    laps, rounds = _Laps(), 0
    while not rounds or not enough.is_reached(laps.both, rounds=rounds, elapsed_seconds=time.perf_counter() - begin):
        watchdog.beat(f"profiling {bench.kind.name} with {bench.rows} rows")
        for forward, backward, update in stopwatch.round(order.iterations):
            laps.forwards.append(forward)
            laps.backwards.append(backward)
            laps.updates.append(update)
        rounds += 1
    return laps


class _Stopwatch:
    """Times a bench's iterations: paced on an emulated device, by its own computing time on a CPU, by events on a GPU.

    On a GPU the process runs ahead within a round, as it does in training.
    """

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._pacer = Pacer(active=bench.emulation is not None)
        self._paces = bench.paces()
        # What other processes do on a machine's cores is no part of a layer; but a paced one sleeps.
        self._clock = Clock(bench.device, time.perf_counter if self._pacer.active else time.thread_time)

    def round(self, iterations: int) -> list[tuple[float, float, float]]:
        """Seconds of forward, backward and update of each iteration."""
        marks = [self._iterate() for _ in range(iterations)]
        self._clock.settle()
        return [tuple(self._clock.seconds(*pair) for pair in iteration) for iteration in marks]  # type: ignore[misc]

    def _iterate(self) -> list[tuple[Moment, Moment]]:
        bench, outputs = self._bench, list[Output]()
        forward, backward, update = self._paces
        found = [
            self._timed(forward, lambda: outputs.append(bench.forward())),
            self._timed(backward, lambda: bench.backward(outputs.pop())),
        ]
        bench.sum()
        found.append(self._timed(update, bench.update))
        bench.clear()
        return found

    def _timed(self, pace: Sequence[float], work: Callable[[], object]) -> tuple[Moment, Moment]:
        self._pacer.synchronize()
        begin = self._clock.mark()
        self._pacer.start(pace, waited_seconds=0.0)
        work()
        self._pacer.finish()
        return begin, self._clock.mark()
