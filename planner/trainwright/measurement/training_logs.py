"""Logs of trainers: seconds of their iterations, and the memory that they state."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

WARM_UP_SHARE: Final = 0.25
"""Share of the logged iterations that are dropped at most as warm-up."""
MAX_WARM_UP: Final = 3
"""Iterations that are dropped at most: the first ones compile kernels, grow memory pools and connect communicators."""
LEAST_ITERATIONS: Final = 3
"""Iterations of a log that are needed: one of warm-up, and two that show whether they agree."""
PAUSE_RATIO: Final = 2.0
"""Interval between two readings of a bar over the usual one, above which the trainer paused. Assumed."""
BAR_ERROR_SECONDS: Final = 2
"""Seconds that an interval can seem longer than it is, with room: bars show whole seconds."""
MAX_NAMED: Final = 3
"""Entries of a list that a sentence names."""
_GIB, _MIB = 2**30, 2**20
_CONTROLS: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER: Final = r"([+-]?(?:[\d,]+(?:\.\d+)?(?:[eE][+-]?\d+)?|(?i:nan|inf)))"


@dataclass(frozen=True, slots=True)
class Batch:
    """Size of an iteration, by which rates become seconds.

    Attributes:
        tokens_per_row: None for models without tokens.
    """

    rows: int
    tokens_per_row: int | None
    devices: int


@dataclass(frozen=True)
class LoggedRun:
    """Run of a trainer, as its log states it.

    Attributes:
        trainer: name of the format.
        iteration_seconds: without the warm-up.
        warm_up: logged iterations that were dropped.
        peak_bytes: by rank, the most that each states; of rank 0 where the log does not say of which.
        dtype: number format of the weights, if the log states it: `float32`.
        skipped: which of its iterations, from 1, have a time that is no positive number.
    """

    trainer: str
    iteration_seconds: tuple[float, ...]
    warm_up: int
    peak_bytes: Mapping[int, int]
    dtype: str | None = None
    skipped: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Format:
    """Format of a trainer's log.

    Attributes:
        mark: of a line: what says that it is of an iteration, else nothing.
        seconds: of the iterations in the lines, in their order.
        peaks: rank and bytes of every statement of a peak.
        needs: what an iteration's line looks like, for a refusal.
        is_mean: whether it has the mean of the iterations after the warm-up alone.
    """

    mark: Callable[[str], object]
    seconds: Callable[[list[str], Batch], Iterator[float]]
    peaks: Callable[[list[str]], Iterator[tuple[int, int]]]
    needs: str
    is_mean: bool = False


def read_log(text: str, batch: Batch, trainer: str | None = None) -> LoggedRun:
    """Return what the log of a run says.

    Args:
        text: the log, of one rank or of several together.
        batch: of the plan that ran.
        trainer: name of the format; None: the one that most lines are of.

    Raises ValueError with one sentence for a log without iterations, or with fewer than `LEAST_ITERATIONS`.
    """
    lines = [line for line in re.split(r"[\r\n]+", _CONTROLS.sub("", text)) if line]
    if trainer is None:
        trainer = _recognised(lines)
    elif trainer not in FORMATS:
        raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {trainer!r}")
    format_ = FORMATS[trainer]
    logged = [*format_.seconds(lines, batch)]
    seconds = [value for value in logged if _is_positive(value)]
    if not seconds:
        raise ValueError(f"holds no iteration of {trainer}: no line has {format_.needs}{_other_bars(lines)}")
    if len(seconds) < LEAST_ITERATIONS and not format_.is_mean:
        raise ValueError(_too_few(len(seconds), trainer))
    dropped = 0 if format_.is_mean else min(MAX_WARM_UP, max(int(WARM_UP_SHARE * len(seconds)), 1))
    peaks: dict[int, int] = {}
    for rank, peak in format_.peaks(lines):
        peaks[rank] = max(peak, peaks.get(rank, 0))
    skipped = tuple(number for number, value in enumerate(logged, 1) if not _is_positive(value))
    return LoggedRun(trainer, tuple(seconds[dropped:]), dropped, peaks, _dtype(lines), skipped)


def _is_positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def _too_few(count: int, trainer: str) -> str:
    return (
        f"holds {count} iteration{'s' * (count > 1)} of {trainer}, the first of which warms up; at least {LEAST_ITERATIONS} "
        "are needed: log more iterations"
    )


def _recognised(lines: list[str]) -> str:
    counts = {name: sum(bool(format_.mark(line)) for line in lines) for name, format_ in FORMATS.items()}
    name = max(counts, key=lambda name: counts[name])
    if not counts[name]:
        kinds = "; ".join(f"{name}: {format_.needs}" for name, format_ in FORMATS.items())
        raise ValueError(f"holds no iteration of a trainer that is known ({kinds}); log every step{_other_bars(lines)}")
    return name


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _values(pattern: re.Pattern[str], lines: list[str]) -> Iterator[float]:
    for line in lines:
        if match := pattern.search(line):
            yield _number(match[1])


def _seconds(amount: float, rates: Iterator[float]) -> Iterator[float]:
    """Yield the seconds of an amount at each rate; not a number where the rate is no positive one."""
    return (amount / rate if _is_positive(rate) else math.nan for rate in rates)


def _rank(line: str) -> int:
    """Return the rank that a line's prefix names (`[Rank 3]`, `[rank3]:`, `[default3]:`), else 0."""
    named = re.search(r"\[(?:rank|default)\s?(\d+)\]", line, re.IGNORECASE)
    return 0 if named is None else int(named[1])


def _of_first_rank(lines: list[str]) -> list[str]:
    """Return the lines of the least rank that logs, where every rank logs its iterations."""
    ranks = {_rank(line) for line in lines}
    return [line for line in lines if _rank(line) == min(ranks)] if len(ranks) > 1 else lines


_MEGATRON: Final = re.compile(rf"elapsed time per iteration \(ms\):\s*{_NUMBER}")
_MEGATRON_PEAK: Final = re.compile(rf"memory \(MB\).*?\bmax allocated:\s*{_NUMBER}")
_TORCHTITAN: Final = re.compile(rf"\bstep:\s*\d+.*\btps:\s*{_NUMBER}")
_TORCHTITAN_PEAK: Final = re.compile(rf"\bmemory:\s*{_NUMBER}\s?GiB")
_DEEPSPEED_RATE: Final = re.compile(rf"CurrSamplesPerSec=\s*{_NUMBER}")
_DEEPSPEED_STAGES: Final = re.compile(rf"\bsteps:\s*\d+.*\biter time \(s\):\s*{_NUMBER}")
_DEEPSPEED: Final = re.compile(rf"{_DEEPSPEED_RATE.pattern}|{_DEEPSPEED_STAGES.pattern}")
_DEEPSPEED_PEAK: Final = re.compile(rf"(?:MaxMemAllocated=|\bMax_MA )\s*{_NUMBER}\s?GB")
_PROGRESS: Final = re.compile(r"\b(\d+)/(\d+) \[(?:(\d+):)?(\d+):(\d+)<[^\]]*(?:s/it|it/s)")
_RUNTIME: Final = re.compile(rf"'train_steps_per_second': '?{_NUMBER}")
_DESCRIPTION: Final = re.compile(r"([^\W\d][^|]*):\s+(?:\d+%.*)?$")
_FSDP2: Final = re.compile(rf"^step \d+: {_NUMBER} s, loss ")
_FSDP2_PEAK: Final = re.compile(rf"^step \d+: .*\bpeak {_NUMBER} GiB")


def _megatron(lines: list[str], batch: Batch) -> Iterator[float]:
    del batch
    return (value / 1e3 for value in _values(_MEGATRON, lines))


def _torchtitan(lines: list[str], batch: Batch) -> Iterator[float]:
    if batch.tokens_per_row is None:
        raise ValueError("has tokens a second, but rows of the model have none")
    tokens = batch.rows * batch.tokens_per_row / batch.devices
    steps = [line for line in lines if _TORCHTITAN.search(line)]
    return _seconds(tokens, _values(_TORCHTITAN, _of_first_rank(steps)))


def _deepspeed(lines: list[str], batch: Batch) -> Iterator[float]:
    stages = [*_values(_DEEPSPEED_STAGES, lines)]  # the pipeline's engine states the time itself
    yield from stages or _seconds(batch.rows, _values(_DEEPSPEED_RATE, lines))


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reading of a progress bar.

    Attributes:
        description: what stands before its percentage: `Loading checkpoint shards`.
        seconds: whole, since the bar's start.
    """

    description: str
    step: int
    total: int
    seconds: int


def _readings(line: str) -> Iterator[_Reading]:
    end = 0
    for match in _PROGRESS.finditer(line):
        step, total, hours, minutes, seconds = (int(text or 0) for text in match.groups())
        before = re.sub(r"\[[^\]]*\]:?", "", line[end : match.start()])  # without the prefix of a rank
        described = _DESCRIPTION.search(before)
        yield _Reading(described[1] if described else "", step, total, 3600 * hours + 60 * minutes + seconds)
        end = match.end()


def _accelerate_mark(line: str) -> bool:
    return _RUNTIME.search(line) is not None or any(not reading.description for reading in _readings(line))


def _accelerate(lines: list[str], batch: Batch) -> Iterator[float]:
    """Yield the mean of the steps by the bar of the training, whose seconds are whole; without a bar that of the whole run."""
    del batch
    readings = [reading for line in lines for reading in _readings(line)]
    intervals = _without_pauses(_intervals(readings, _training_steps(readings)))
    steps, seconds = sum(steps for steps, _ in intervals), sum(seconds for _, seconds in intervals)
    if seconds:
        if steps + 1 < LEAST_ITERATIONS:  # the first step comes before the first interval
            raise ValueError(_too_few(steps + 1, "accelerate"))
        yield seconds / steps
    else:
        yield from _seconds(1, _values(_RUNTIME, lines))


def _training_steps(readings: list[_Reading]) -> int:
    """Return the steps of the bar that lasts longest; 0 without any. Loading weights is described, evaluating is shorter."""
    bars = (reading for reading in readings if not reading.description)
    return max(bars, key=lambda reading: reading.seconds, default=_Reading("", 0, 0, 0)).total


def _intervals(readings: list[_Reading], total: int) -> list[tuple[int, int]]:
    """Return the steps and seconds between the readings of one bar after its warm-up, but for those with another bar between."""
    intervals, last, is_interrupted = list[tuple[int, int]](), _Reading("", 0, total, 0), False
    for reading in readings:
        if reading.description or reading.total != total:
            is_interrupted = True
        elif reading.step > last.step and reading.seconds >= last.seconds:  # else of another rank, or written again
            if last.step and not is_interrupted:
                intervals.append((reading.step - last.step, reading.seconds - last.seconds))
            last, is_interrupted = reading, False
    return intervals[min(MAX_WARM_UP, len(intervals) // 4) :]


def _without_pauses(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Drop the intervals far above the median, in which the trainer evaluates or saves without a bar."""
    usual = statistics.median(seconds / steps for steps, seconds in intervals) if intervals else 0.0
    return [
        (steps, seconds) for steps, seconds in intervals if seconds <= PAUSE_RATIO * usual * steps + BAR_ERROR_SECONDS
    ]


def _other_bars(lines: list[str]) -> str:
    """Return what a refusal adds for bars of other work than training; nothing without any."""
    names = dict.fromkeys(reading.description for line in lines for reading in _readings(line) if reading.description)
    named = ", ".join(f"`{name}`" for name in [*names][:MAX_NAMED])
    return f"; its progress bars are of {named}, not of a training" if names else ""


def _fsdp2(lines: list[str], batch: Batch) -> Iterator[float]:
    del batch
    return _values(_FSDP2, lines)


def _peaks(pattern: re.Pattern[str], unit: int) -> Callable[[list[str]], Iterator[tuple[int, int]]]:
    def read(lines: list[str]) -> Iterator[tuple[int, int]]:
        for line in lines:
            if (match := pattern.search(line)) and _is_positive(peak := _number(match[1]) * unit):
                yield _rank(line), round(peak)

    return read


FORMATS: Final[Mapping[str, _Format]] = MappingProxyType(
    {
        "megatron": _Format(
            _MEGATRON.search, _megatron, _peaks(_MEGATRON_PEAK, _MIB), "`elapsed time per iteration (ms): …`"
        ),
        "torchtitan": _Format(_TORCHTITAN.search, _torchtitan, _peaks(_TORCHTITAN_PEAK, _GIB), "`step: … tps: …`"),
        "deepspeed": _Format(
            _DEEPSPEED.search,
            _deepspeed,
            _peaks(_DEEPSPEED_PEAK, _GIB),
            "`CurrSamplesPerSec=…` or `steps: … iter time (s): …`",
        ),
        "accelerate": _Format(
            _accelerate_mark,
            _accelerate,
            lambda _: iter(()),
            "a progress bar `12/100 [00:14<…` or `'train_steps_per_second': …`",
            is_mean=True,
        ),
        "fsdp2": _Format(_FSDP2.search, _fsdp2, _peaks(_FSDP2_PEAK, _GIB), "`step …: … s, loss …`"),
    }
)
"""Formats by the name of `--format`."""

_DTYPES: Final = re.compile(
    r"\bparams_dtype[ .=:]+torch\.(float32|float16|bfloat16)\b|\bmixed_precision_param[\"' =:]+(float32|bfloat16)\b"
)


def _dtype(lines: list[str]) -> str | None:
    """Return the number format of the weights that the arguments in a log state; None if it has none."""
    for line in lines:
        if match := _DTYPES.search(line):
            return match[1] or match[2]
    return None
