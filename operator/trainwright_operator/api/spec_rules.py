"""CEL rules of the definition in Python, for specs that no API server has checked.

Rules about edits are left out, since there is nothing to compare with; those of model families are checked where the model is made.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from trainwright_operator.api import MAX_NAME_LENGTH
from trainwright_operator.api.frameworks import Apply
from trainwright_operator.api.spec import LauncherKind, Objective, TrainingPlanSpec

_RESOURCE: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_PLACING: Final = ("nodeName", "nodeSelector", "affinity", "schedulingGates")


class SpecRule(NamedTuple):
    """Rule of the definition.

    Attributes:
        place: path of the part that has it, from `spec`.
        cel: as the definition states it.
        holds: the same in Python.
    """

    place: str
    cel: str
    holds: Callable[[TrainingPlanSpec], bool]


RULES: Final = (
    SpecRule(
        "",
        "self.search.objective != 'Cost' || (has(self.devices.pricesPerHour) && self.devices.pricesPerHour.size() > 0)",
        lambda spec: spec.search.objective is not Objective.COST or bool(spec.devices.prices_per_hour),
    ),
    SpecRule(
        "",
        "self.search.objective != 'Cost' || !has(self.trials.stopWhenRegretBelow)",
        lambda spec: spec.search.objective is not Objective.COST or spec.trials.stop_when_regret_below is None,
    ),
    SpecRule(
        "",
        "!has(self.trials.framework) || (self.trials.perGang == 1 && !self.trials.timeline)",
        lambda spec: spec.trials.framework is None or (spec.trials.per_gang == 1 and not spec.trials.timeline),
    ),
    SpecRule(
        "",
        "!has(self.apply) || self.apply == 'Never' || has(self.job)",
        lambda spec: spec.apply is Apply.NEVER or spec.job is not None,
    ),
    SpecRule(
        "",
        "!has(self.queueName) || !has(self.launcher) || self.launcher == 'JobSet'",
        lambda spec: spec.queue_name is None or spec.launcher in (None, LauncherKind.JOB_SET),
    ),
    SpecRule(
        "",
        "has(self.queueName) || !has(self.queuePriorityClass)",
        lambda spec: spec.queue_name is not None or spec.queue_priority_class is None,
    ),
    SpecRule(
        "devices",
        "self.resourceName.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$')",
        lambda spec: _RESOURCE.fullmatch(spec.devices.resource_name) is not None,
    ),
    SpecRule("search", "self.tolerance <= 0.5", lambda spec: spec.search.tolerance <= 0.5),
    SpecRule("search.effort", "self >= 0.1", lambda spec: spec.search.effort >= 0.1),
    SpecRule(
        "trials",
        "self.topK == 0 || double(self.runDeadlineSeconds) <= self.maxDeviceHours * 3600.0",
        lambda spec: spec.trials.top_k == 0 or spec.trials.run_deadline_seconds <= spec.trials.max_device_hours * 3600,
    ),
    SpecRule(
        "trials.framework",
        "has(self.stepTimeRegex) != has(self.stepTimeJsonPath)",
        lambda spec: (
            spec.trials.framework is None
            or (spec.trials.framework.step_time_regex is None) != (spec.trials.framework.step_time_json_path is None)
        ),
    ),
    SpecRule(
        "trials.framework",
        "!has(self.memoryRegex) || !has(self.memoryJsonPath)",
        lambda spec: (
            spec.trials.framework is None
            or spec.trials.framework.memory_regex is None
            or spec.trials.framework.memory_json_path is None
        ),
    ),
    SpecRule(
        "worker.podTemplate.spec",
        "!has(self.nodeName) && !has(self.nodeSelector) && !has(self.affinity) && !has(self.schedulingGates)",
        lambda spec: not any(field in spec.worker.pod_template.spec for field in _PLACING),
    ),
    SpecRule(
        "worker.podTemplate.spec",
        "!has(self.restartPolicy)",
        lambda spec: "restartPolicy" not in spec.worker.pod_template.spec,
    ),
)


def check_rules(spec: TrainingPlanSpec, schema: dict[str, Any]) -> None:
    """Raise ValueError, in the definition's words, for the first rule that a spec breaks. `schema`: of the spec."""
    for rule in RULES:
        if not rule.holds(spec):
            raise ValueError(f"spec{'.' * bool(rule.place)}{rule.place}: {message_of(rule, schema)}")


def message_of(rule: SpecRule, schema: dict[str, Any]) -> str:
    """Return the definition's words for a rule. `schema`: of the spec."""
    part = schema
    for name in filter(None, rule.place.split(".")):
        part = part["properties"][name]
    return next(str(stated["message"]) for stated in part["x-kubernetes-validations"] if stated["rule"] == rule.cel)


def check_name(name: object) -> None:
    """Raise ValueError for a name that the definition refuses."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"metadata.name: expected a lower-case letter, then lower-case letters, digits and hyphens, got {name!r}"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"metadata.name: may have {MAX_NAME_LENGTH} characters at most, got {len(name)}")
