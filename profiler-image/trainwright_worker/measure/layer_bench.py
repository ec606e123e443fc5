"""Benchmark of each distinct layer kind: forward, backward and update on one device."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trainwright.families import Custom
from trainwright.layer import LayerKind
from trainwright.profiles import LayerProfile, LayerTooLarge
from trainwright.worker_api import FailureReason, ProfilingReport, ProfilingTask
from trainwright_worker.device import CacheFlush, Clock, TimeMark, synchronize
from trainwright_worker.emulation import Pacer
from trainwright_worker.gang import report_writer
from trainwright_worker.gang.errors import WorkerError, classify_error
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.layers.custom_errors import describe_error
from trainwright_worker.layers.layer import Output
from trainwright_worker.live_bytes import bytes_beside_tensors
from trainwright_worker.measure.attention_kernels import attention_kernels
from trainwright_worker.measure.format_speedup import format_speedup
from trainwright_worker.measure.layer_under_test import LayerUnderTest

MAX_ROUNDS = 20
"""Maximum rounds: what still scatters after them will do so after more."""
MAX_ROUND_ITERATIONS = 1000
"""Maximum iterations of a GPU's round, each of which takes six events."""
_GPU_WARMUP_SECONDS, _GPU_ROUND_SECONDS = 0.5, 0.25
"""Seconds of load before the first round, and of a round: clocks settle within some tenths of a second."""
_SUBMISSIONS = 5
"""Times that a layer is submitted to an idle device."""
_MIN_SAMPLES = 6
"""Minimum samples for a 95 % confidence interval of the median."""


@dataclass(frozen=True, slots=True)
class StoppingRule:
    """Stopping rule of a measurement, checked after every round.

    Attributes:
        target_uncertainty: relative uncertainty of the median.
        max_seconds: time after which no further round begins; the first always does.
    """

    target_uncertainty: float
    max_seconds: float

    def should_stop(self, samples: Sequence[float], *, rounds: int, elapsed_seconds: float) -> bool:
        if rounds >= MAX_ROUNDS or elapsed_seconds >= self.max_seconds:
            return True
        return median_uncertainty(samples) <= self.target_uncertainty


def median_uncertainty(samples: Sequence[float]) -> float:
    """Return half of the median's 95 % confidence interval, relative to the median; infinite for too few samples.

    The interval is distribution-free, between two of the sorted samples: the number of n samples below the true median is
    binomial, n/2 ± √n/2.
    """
    count = len(samples)
    if count < _MIN_SAMPLES:
        return math.inf
    low = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    ordered = sorted(samples)
    return (ordered[count - 1 - low] - ordered[low]) / 2 / statistics.median(ordered)


def iterations_lasting(seconds: float, iteration_seconds: float, *, at_least: int) -> int:
    """Return the iterations that last some seconds, given the seconds of one; a bounded number, at least `at_least`."""
    iterations = math.ceil(seconds / iteration_seconds) if iteration_seconds > 0 else MAX_ROUND_ITERATIONS
    return max(min(iterations, MAX_ROUND_ITERATIONS), at_least)


def relative_spread(samples: Sequence[float]) -> float:
    """Return (90th - 10th percentile) / median, 0 for a single sample."""
    if len(samples) < 2:
        return 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / statistics.median(samples)


def profile_layers(
    task: ProfilingTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> ProfilingReport:
    """Measure the task's layer kinds at its tensor degree.

    Running out of memory is a result, not an error: larger row counts are then skipped. Several devices of a CPU measure the same
    at the same time, since they share caches and memory, as in a trial; the first one's figures count.
    """
    accelerator = task.gang.nodes[0].accelerator
    kinds = task.layer_kinds
    rows = sorted(set(task.rows))
    is_shared = len(assignment.devices) > 1
    profiles: list[LayerProfile] = []
    too_large: list[LayerTooLarge] = []
    for number, kind in enumerate(kinds):
        for row_index, count in enumerate(rows):
            watchdog.beat(f"profiling {kind.name} with {count} rows")
            profile = profile_if_it_fits(task, kind, count, device, watchdog)
            fits = [profile is not None]
            if is_shared:
                fits = gather(profile is not None, bool, device)
            if profile is None or not all(fits):
                too_large.append(LayerTooLarge(accelerator, kind.name, task.tensor_degree, count))
                break
            profiles.append(profile)
            if assignment.is_main_process:
                report_writer.write_progress(
                    number * len(rows) + row_index + 1, len(kinds) * len(rows), "layer profiles"
                )
    watchdog.beat(f"timing matrix products in {task.model.dtype}")
    process_bytes, speedup = bytes_beside_tensors(device), format_speedup(task.model.dtype, device)
    return ProfilingReport(tuple(profiles), tuple(too_large), process_bytes, speedup)


def profile_if_it_fits(
    task: ProfilingTask, kind: LayerKind, rows: int, device: torch.device, watchdog: Watchdog
) -> LayerProfile | None:
    """Return the profile, or None if memory does not suffice. Raises WorkerError that names a user's layer that fails."""
    accelerator = task.gang.nodes[0].accelerator
    try:
        layer = LayerUnderTest.of(task, kind, rows, device, watchdog.beat)
        watchdog.beat(f"timing {kind.name} with {rows} rows")
        return _profile(task, layer, accelerator, watchdog)
    except Exception as error:
        failure = classify_error(error)
        if failure.reason is FailureReason.CRASHED and isinstance(task.model.family, Custom):
            raise _failure_of_own_layer(task.model.family, kind, rows, error) from error
        if failure.reason is not FailureReason.OUT_OF_MEMORY:
            raise
        error.__traceback__ = None  # its frames keep the layer and its activations alive
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return None


def _failure_of_own_layer(family: Custom, kind: LayerKind, rows: int, error: Exception) -> WorkerError:
    number = family.layers.index(kind.name)
    on_what = "" if number == 0 else " on random floats and on integers of the layer before it"
    mend = "correct it" if number == 0 else "hand indices on as integers, or correct it"
    return WorkerError(
        FailureReason.CRASHED,
        f"entry point {family.entrypoint}: layer {number} ({kind.name}) fails as it is measured with {rows} rows{on_what}: "
        f"{describe_error(error, otherwise=mend)}",
    )


def submission_seconds(layer: LayerUnderTest, read: Callable[[], float] = time.perf_counter) -> float:
    """Return the median time that the process takes to submit a forward and a backward to an idle device.

    Rounds do not show it: a process that is far ahead of its device waits for it.
    """
    samples = []
    for _ in range(_SUBMISSIONS):
        synchronize(layer.device)
        begin = read()
        layer.backward(layer.forward())
        samples.append(read() - begin)
        layer.reduce_gradients()
        layer.reset_gradients()
    return statistics.median(samples)


def _profile(task: ProfilingTask, layer: LayerUnderTest, accelerator: str, watchdog: Watchdog) -> LayerProfile:
    lap_times = _measure_until_known(task, layer, watchdog)
    is_gpu = layer.device.type == "cuda"
    return LayerProfile(
        accelerator=accelerator,
        kind=layer.kind.name,
        tensor_degree=task.tensor_degree,
        rows=layer.rows,
        forward_seconds=statistics.median(lap_times.forwards),
        backward_seconds=statistics.median(lap_times.backwards),
        update_seconds=statistics.median(lap_times.updates),
        activation_bytes=layer.activation_bytes,
        parameter_bytes=layer.parameter_bytes,
        samples=len(lap_times.forwards),
        relative_spread=relative_spread(lap_times.forward_backward),
        peak_bytes=layer.peak_bytes(),
        attention=attention_kernels(layer.forward) if is_gpu else (),
        submission_seconds=submission_seconds(layer) if is_gpu else None,
    )


@dataclass
class _LapTimes:
    forwards: list[float] = field(default_factory=list)
    backwards: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)

    @property
    def forward_backward(self) -> list[float]:
        return [forward + backward for forward, backward in zip(self.forwards, self.backwards, strict=True)]


def _measure_until_known(task: ProfilingTask, layer: LayerUnderTest, watchdog: Watchdog) -> _LapTimes:
    """Warm up, then measure rounds of the task's iterations until the stopping rule holds.

    On a GPU warm-up and rounds have more iterations: they last until its clocks are those of sustained load.
    """
    stopwatch = _Stopwatch(layer)
    stopping_rule = StoppingRule(task.target_uncertainty, task.seconds_per_layer)
    stopwatch.run_round(task.warmup_iterations)
    iterations = task.iterations
    if layer.device.type == "cuda":
        watchdog.beat(f"warming up {layer.kind.name} with {layer.rows} rows")
        laps = stopwatch.run_round(max(task.warmup_iterations, 1))  # the first ones loaded kernels
        seconds = sum(map(sum, laps)) / len(laps)
        stopwatch.run_round(iterations_lasting(_GPU_WARMUP_SECONDS, seconds, at_least=task.warmup_iterations))
        iterations = iterations_lasting(_GPU_ROUND_SECONDS, seconds, at_least=task.iterations)
    begin = time.perf_counter()
    lap_times, rounds = _LapTimes(), 0
    while not rounds or not stopping_rule.should_stop(
        lap_times.forward_backward, rounds=rounds, elapsed_seconds=time.perf_counter() - begin
    ):
        watchdog.beat(f"profiling {layer.kind.name} with {layer.rows} rows")
        for forward, backward, update in stopwatch.run_round(iterations):
            lap_times.forwards.append(forward)
            lap_times.backwards.append(backward)
            lap_times.updates.append(update)
        rounds += 1
    return lap_times


class _Stopwatch:
    """Stopwatch of a layer's iterations: paced time on an emulated device, thread time on a CPU, CUDA events on a GPU.

    On a GPU the process runs ahead within a round, as in training, and the L2 cache is flushed before each timing: there other
    layers ran in between.
    """

    def __init__(self, layer: LayerUnderTest) -> None:
        self._layer = layer
        self._pacer = Pacer(active=layer.emulation is not None)
        self._paced_seconds = layer.paced_seconds()
        # Thread time excludes other processes' work on shared cores, but also the sleeps of pacing.
        self._clock = Clock(layer.device, time.perf_counter if self._pacer.active else time.thread_time)
        self._cache_flush = CacheFlush(layer.device)

    def run_round(self, iterations: int) -> list[tuple[float, float, float]]:
        """Return the seconds of forward, backward and update of each iteration."""
        marks = [self._time_iteration() for _ in range(iterations)]
        self._clock.synchronize()
        return [tuple(self._clock.elapsed_seconds(*pair) for pair in iteration) for iteration in marks]  # type: ignore[misc]

    def _time_iteration(self) -> list[tuple[TimeMark, TimeMark]]:
        layer, outputs = self._layer, list[Output]()
        forward, backward, update = self._paced_seconds
        marks = [
            self._time(forward, lambda: outputs.append(layer.forward())),
            self._time(backward, lambda: layer.backward(outputs.pop())),
        ]
        layer.reduce_gradients()
        marks.append(self._time(update, layer.update_weights))
        layer.reset_gradients()
        return marks

    def _time(self, paced_seconds: Sequence[float], work: Callable[[], object]) -> tuple[TimeMark, TimeMark]:
        self._cache_flush.run()
        self._pacer.reset_due()
        begin = self._clock.mark()
        self._pacer.start(paced_seconds, waited_seconds=0.0)
        work()
        self._pacer.end()
        return begin, self._clock.mark()
