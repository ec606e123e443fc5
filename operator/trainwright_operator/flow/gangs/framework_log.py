"""Step times and memory in the log of a user's job: bounded, since it comes from outside.

Regular expressions are matched by the engine of pydantic, whose time is linear in the text whatever the expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from pydantic_core import SchemaError, SchemaValidator, core_schema

from trainwright.bounds import LARGEST_INTEGER, LONGEST_SECONDS, SHORTEST_SECONDS
from trainwright.families import Family
from trainwright.throughput import tokens_per_row
from trainwright.worker_api import Progress, RankMemory, TrialReport, TrialTask
from trainwright_operator.api.frameworks import FrameworkSpec, TimeUnit

_MAX_LINE: Final = 2_000
_MAX_NUMBERS: Final = 64
_MILLISECOND: Final = 1e-3
_NUMBER: Final = re.compile(r"[0-9][0-9,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OUT_OF_MEMORY: Final = ("OutOfMemoryError", "CUDA out of memory")


@dataclass(frozen=True, slots=True)
class StepLog:
    """Steps that the logs of a trial's pods state.

    Attributes:
        seconds: of the log with the most steps, warm-up included.
        memory: by pod, under its first rank's device.
    """

    task: TrialTask
    seconds: tuple[float, ...]
    memory: tuple[RankMemory, ...] = ()

    @classmethod
    def of(cls, framework: FrameworkSpec, task: TrialTask, logs: Mapping[str, str]) -> StepLog:
        """Read the logs by node. Values without sense are skipped."""
        steps = (tuple(_step_seconds(framework, task, log)) for log in logs.values())
        first_slot = {device.node: device.slot for device in reversed(task.plan.devices)}
        peaks = ((node, max(_peak_bytes(framework, log), default=0)) for node, log in logs.items())
        memory = (RankMemory(node, first_slot[node], peak) for node, peak in peaks if peak and node in first_slot)
        return cls(task, max(steps, key=len, default=()), tuple(memory))

    def report(self, *, is_over: bool) -> TrialReport | None:
        """Return the measurement once all its steps are stated, or those that there are if the job is over."""
        total = self.task.warmup_iterations + self.task.iterations
        counted = self.seconds[self.task.warmup_iterations : total]
        is_whole = is_over or len(self.seconds) >= total
        return TrialReport(counted, (), self.memory) if counted and is_whole else None

    @property
    def progress(self) -> Progress:
        total = self.task.warmup_iterations + self.task.iterations
        return Progress(min(len(self.seconds), total), total, "iterations")

    @property
    def shortcoming(self) -> str:
        """Say why a job that is over was not measured."""
        return (
            f"the job ended after {len(self.seconds)} step times in its log, {self.task.warmup_iterations} of which are "
            "warm-up (trials.warmupIterations); check trials.framework and the number of iterations that it runs"
        )


def check_framework(framework: FrameworkSpec, family: Family) -> None:
    """Raise ValueError, with one sentence, for a regular expression that is none or a unit that the model has not."""
    if framework.step_time_unit is TimeUnit.TOKENS_PER_SECOND and tokens_per_row(family) is None:
        raise ValueError("trials.framework.stepTimeUnit: this model has no tokens; log the seconds of a step")
    for field, regex in (("stepTimeRegex", framework.step_time_regex), ("memoryRegex", framework.memory_regex)):
        try:
            _pattern(regex or "")
        except SchemaError:
            raise ValueError(f"trials.framework.{field}: {regex!r} is no regular expression; mend it") from None


def states_out_of_memory(log: str) -> bool:
    """Return whether a job that ended says that its device had too little memory."""
    return any(word in log for word in _OUT_OF_MEMORY)


def _step_seconds(framework: FrameworkSpec, task: TrialTask, log: str) -> Iterator[float]:
    for value in _values(log, framework.step_time_regex, framework.step_time_json_path):
        seconds = _in_seconds(value, framework.step_time_unit, task)
        if seconds is not None and SHORTEST_SECONDS <= seconds <= LONGEST_SECONDS:
            yield seconds


def _in_seconds(value: float, unit: TimeUnit, task: TrialTask) -> float | None:
    """Return the seconds of a step; None for a rate of nothing."""
    if unit is not TimeUnit.TOKENS_PER_SECOND:
        return value * _MILLISECOND if unit is TimeUnit.MILLISECONDS else value
    tokens = (tokens_per_row(task.model.family) or 0) * task.plan.global_batch_size
    return tokens / len(task.plan.devices) / value if value > 0 else None


def _peak_bytes(framework: FrameworkSpec, log: str) -> Iterator[int]:
    for value in _values(log, framework.memory_regex, framework.memory_json_path):
        size = value * framework.memory_unit.size
        if 1 <= size <= LARGEST_INTEGER // 2:
            yield int(size)


def _values(log: str, regex: str | None, json_path: str | None) -> Iterator[float]:
    """Yield the numbers that follow the expression, or that stand under the path in lines of JSON."""
    for line in log.splitlines():
        if regex is not None:
            yield from _numbers_after(line[:_MAX_LINE], _pattern(regex))
        elif json_path is not None and line.lstrip().startswith("{"):
            yield from _number_at(line, json_path)


def _numbers_after(line: str, pattern: _Pattern) -> Iterator[float]:
    if not pattern.anywhere.isinstance_python(line):
        return
    for number in islice(_NUMBER.finditer(line), _MAX_NUMBERS):
        if pattern.at_end.isinstance_python(line[: number.start()]):
            yield float(number[0].replace(",", ""))


def _number_at(line: str, path: str) -> Iterator[float]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return
    for name in path.split(".")[1:]:
        value = value.get(name) if isinstance(value, dict) else None
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_INTEGER:
        yield float(value)


class _Pattern(NamedTuple):
    """Tests whether a text holds an expression, and whether it ends with it."""

    anywhere: SchemaValidator
    at_end: SchemaValidator


@lru_cache(maxsize=64)
def _pattern(regex: str) -> _Pattern:
    """Raise SchemaError for an expression that is none."""
    expressions = (regex, rf"(?:{regex})\s*$")
    return _Pattern(*(SchemaValidator(core_schema.str_schema(pattern=expression)) for expression in expressions))
