"""Parts of the spec about training jobs of the user's: as trials, and with the winner."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import ConfigDict, Field

from trainwright_operator.api.base import PLAIN_LINE, PLAIN_LINES, VALIDATIONS, ApiModel, Rule, rules, without_default
from trainwright_operator.api.pods import PodTemplate

_REGEX = Annotated[
    str,
    Field(
        min_length=1,
        max_length=256,
        # A regular expression that is none makes the rule fail, whatever it is matched with.
        json_schema_extra={
            VALIDATIONS: [
                *rules(("''.matches(self) in [true, false]", "this is no regular expression of RE2; mend it"))[
                    VALIDATIONS
                ],
                *PLAIN_LINES[VALIDATIONS],
            ]
        },
    ),
]
_JSON_PATH = Annotated[str, Field(min_length=2, max_length=256, pattern=r"^(\.[A-Za-z0-9_/-]+)+$")]


class Apply(StrEnum):
    """Handing over of the winner: never, as a suspended job, or as one that runs."""

    NEVER = "Never"
    SUSPENDED = "Suspended"
    RUN = "Run"


class TimeUnit(StrEnum):
    """Unit of the step times in a log."""

    SECONDS = "Seconds"
    MILLISECONDS = "Milliseconds"
    TOKENS_PER_SECOND = "TokensPerSecondPerDevice"


class MemoryUnit(StrEnum):
    """Unit of the memory in a log."""

    BYTES = "Bytes"
    MIB = "MiB"
    GIB = "GiB"

    @property
    def size(self) -> int:
        """Bytes of one."""
        return {self.BYTES: 1, self.MIB: 1 << 20, self.GIB: 1 << 30}[self]


class JobSpec(ApiModel):
    """Training job of yours."""

    image: Annotated[str, Field(min_length=1, max_length=512, json_schema_extra=PLAIN_LINE)]
    """Image of the job's pods, with the framework."""
    command: Annotated[
        tuple[Annotated[str, Field(max_length=4096, json_schema_extra=PLAIN_LINES)], ...],
        Field(min_length=1, max_length=64),
    ]
    """What every pod runs, for example [bash, /etc/trainwright/launch.sh]. /etc/trainwright holds the plan (plan.json) and the
    files of `trainwright export` for the trainer of search.expressibleBy, else those for torchrun. NODE, MASTER_ADDR and
    MASTER_PORT are set as launch.sh needs them; in trials TRAINWRIGHT_ITERATIONS is the number of iterations to run, and a
    job that runs more is stopped."""
    pod_template: Annotated[PodTemplate, Field(json_schema_extra=without_default)] = PodTemplate()
    """Fields that are merged into the job's pods, for example volumes with the data set. It replaces worker.podTemplate, of
    which only the tolerations are kept, since nodes are chosen by them."""


ONE_STEP_TIME: Final = Rule(
    "has(self.stepTimeRegex) != has(self.stepTimeJsonPath)",
    "framework needs exactly one of stepTimeRegex and stepTimeJsonPath, which find the step times in its log; set one",
)
ONE_MEMORY_AT_MOST: Final = Rule(
    "!has(self.memoryRegex) || !has(self.memoryJsonPath)",
    "framework takes one of memoryRegex and memoryJsonPath; leave one out",
)


class FrameworkSpec(JobSpec):
    """Training job of yours that a trial runs."""

    model_config = ConfigDict(json_schema_extra=rules(ONE_STEP_TIME, ONE_MEMORY_AT_MOST))

    step_time_regex: _REGEX | None = None
    """Text right before the step time in a line of the log, for example `elapsed time per iteration \\(ms\\):`."""
    step_time_json_path: _JSON_PATH | None = None
    """Field of the step time in those lines of the log that are JSON objects, for example .metrics.step_seconds."""
    step_time_unit: Annotated[TimeUnit, Field(json_schema_extra=without_default)] = TimeUnit.SECONDS
    """Unit of the step time: Seconds (the default), Milliseconds, or TokensPerSecondPerDevice, from which it is computed."""
    memory_regex: _REGEX | None = None
    """Text right before the peak memory in a line of the log. The most that a pod states counts for its first rank."""
    memory_json_path: _JSON_PATH | None = None
    """Field of the peak memory in lines that are JSON objects."""
    memory_unit: Annotated[MemoryUnit, Field(json_schema_extra=without_default)] = MemoryUnit.BYTES
    """Unit of the peak memory: Bytes (the default), MiB or GiB."""
