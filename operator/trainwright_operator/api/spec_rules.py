"""CEL rules of the definition in Python, for specs that no API server has checked.

Rules about edits are left out, since there is nothing to compare with; those of model families are checked where the model is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from trainwright_operator.api import MAX_NAME_LENGTH, NAME_PATTERN
from trainwright_operator.api.base import Rule
from trainwright_operator.api.frameworks import ONE_MEMORY_AT_MOST, ONE_STEP_TIME, Apply
from trainwright_operator.api.pods import NO_PLACING, NO_RESTART_POLICY, PLACING_FIELDS
from trainwright_operator.api.spec import (
    APPLY_NEEDS_JOB,
    COST_NEEDS_PRICES,
    EXTENDED_RESOURCE,
    FRAMEWORK_RUNS_ALONE,
    HOURS_FOR_ONE_RUN,
    LARGEST_TOLERANCE,
    LEAST_EFFORT,
    PRIORITY_CLASS_NEEDS_QUEUE,
    QUEUE_NEEDS_JOB_SET,
    REGRET_WEIGHS_SECONDS,
    RESOURCE_PATTERN,
    LauncherKind,
    Objective,
    TrainingPlanSpec,
)


class SpecRule(NamedTuple):
    """Rule of the definition.

    Attributes:
        place: path of the part that has it, from `spec`.
        stated: as the definition has it.
        holds: the same in Python.
    """

    place: str
    stated: Rule
    holds: Callable[[TrainingPlanSpec], bool]


RULES: Final = (
    SpecRule(
        "",
        COST_NEEDS_PRICES,
        lambda spec: spec.search.objective is not Objective.COST or bool(spec.devices.prices_per_hour),
    ),
    SpecRule(
        "",
        REGRET_WEIGHS_SECONDS,
        lambda spec: spec.search.objective is not Objective.COST or spec.trials.stop_when_regret_below is None,
    ),
    SpecRule(
        "",
        FRAMEWORK_RUNS_ALONE,
        lambda spec: spec.trials.framework is None or (spec.trials.per_gang == 1 and not spec.trials.timeline),
    ),
    SpecRule(
        "",
        APPLY_NEEDS_JOB,
        lambda spec: spec.apply is Apply.NEVER or spec.job is not None,
    ),
    SpecRule(
        "",
        QUEUE_NEEDS_JOB_SET,
        lambda spec: spec.queue_name is None or spec.launcher in (None, LauncherKind.JOB_SET),
    ),
    SpecRule(
        "",
        PRIORITY_CLASS_NEEDS_QUEUE,
        lambda spec: spec.queue_name is not None or spec.queue_priority_class is None,
    ),
    SpecRule(
        "devices",
        EXTENDED_RESOURCE,
        lambda spec: re.fullmatch(RESOURCE_PATTERN, spec.devices.resource_name) is not None,
    ),
    SpecRule("search", LARGEST_TOLERANCE, lambda spec: spec.search.tolerance <= 0.5),
    SpecRule("search.effort", LEAST_EFFORT, lambda spec: spec.search.effort >= 0.1),
    SpecRule(
        "trials",
        HOURS_FOR_ONE_RUN,
        lambda spec: spec.trials.top_k == 0 or spec.trials.run_deadline_seconds <= spec.trials.max_device_hours * 3600,
    ),
    SpecRule(
        "trials.framework",
        ONE_STEP_TIME,
        lambda spec: (
            spec.trials.framework is None
            or (spec.trials.framework.step_time_regex is None) != (spec.trials.framework.step_time_json_path is None)
        ),
    ),
    SpecRule(
        "trials.framework",
        ONE_MEMORY_AT_MOST,
        lambda spec: (
            spec.trials.framework is None
            or spec.trials.framework.memory_regex is None
            or spec.trials.framework.memory_json_path is None
        ),
    ),
    SpecRule(
        "worker.podTemplate.spec",
        NO_PLACING,
        lambda spec: not any(field in spec.worker.pod_template.spec for field in PLACING_FIELDS),
    ),
    SpecRule(
        "worker.podTemplate.spec",
        NO_RESTART_POLICY,
        lambda spec: "restartPolicy" not in spec.worker.pod_template.spec,
    ),
)


def check_rules(spec: TrainingPlanSpec) -> None:
    """Raise ValueError, in the definition's words, for the first rule that a spec breaks."""
    for rule in RULES:
        if not rule.holds(spec):
            raise ValueError(f"spec{'.' * bool(rule.place)}{rule.place}: {rule.stated.message}")


def check_name(name: object) -> None:
    """Raise ValueError for a name that the definition refuses."""
    if not isinstance(name, str) or not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            f"metadata.name: expected a lower-case letter, then lower-case letters, digits and hyphens, got {name!r}"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"metadata.name: may have {MAX_NAME_LENGTH} characters at most, got {len(name)}")
