"""The CustomResourceDefinition, made from the models. `python -m trainwright_operator.api.crd` prints it."""

from __future__ import annotations

import sys
from typing import Any, Final

import yaml

from trainwright_operator.api import GROUP, KIND, MAX_NAME_LENGTH, NAME_PATTERN, PLURAL, SHORT_NAME, SINGULAR, VERSION
from trainwright_operator.api.base import rules
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.api.structural_schema import structural

HEADER: Final = "# Generated from the pydantic models by `python -m trainwright_operator.api.crd`; change those.\n"

_NAME_RULES = rules(
    (
        f"size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        f"metadata.name may have {MAX_NAME_LENGTH} characters at most, since jobs and pods are named after it; shorten it",
    ),
    (
        f"self.metadata.name.matches('^{NAME_PATTERN}$')",
        (
            "metadata.name must start with a lower-case letter and hold lower-case letters, digits and hyphens alone, "
            "since jobs and services are named after it; rename it"
        ),
    ),
)


def _column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": 1} if wide else column


def _succeeded(field: str) -> str:
    return f'.status.conditions[?(@.type=="{ConditionType.SUCCEEDED}")].{field}'


_COLUMNS = [
    _column("Phase", "string", ".status.phase", "Where the plan stands."),
    _column("Progress", "string", ".status.progress.text", "How far the present phase is."),
    _column("Best s/iter", "number", ".status.winner.measuredSeconds", "The winner's measured seconds per iteration."),
    _column("Speed-up", "number", ".status.winner.speedupOverBaseline", "The baseline's seconds by the winner's."),
    # Never wide: a time that was not measured on real devices says so wherever it is shown.
    _column("Emulated", "boolean", ".status.cluster.emulated", "Whether devices' speed is emulated."),
    # Never wide either: whoever looks at the plans sees which of them hold devices for training.
    _column(
        "Job", "string", ".status.heldJob.text", "The job of the plan's own that trains, and the devices it holds."
    ),
    _column("Reason", "string", _succeeded("reason"), "Why the plan succeeded or failed, or what it waits for."),
    _column("Age", "date", ".metadata.creationTimestamp", "Time since the plan was created."),
    _column("Winner", "string", ".status.winner.summary", "The winner's degrees, micro-batch and layers.", wide=True),
    _column("Predicted", "number", ".status.winner.predictedSeconds", "The winner's predicted seconds.", wide=True),
    _column(
        "Baseline", "string", ".status.winner.baselineAccelerator", "The baseline's only type of device.", wide=True
    ),
    _column("Planner", "string", ".spec.search.planner", "The search that made the candidates.", wide=True),
    _column("Devices", "integer", ".status.cluster.devices", "Devices that were found.", wide=True),
]


def openapi_schema() -> dict[str, Any]:
    """Return the structural schema of the whole resource."""
    return {
        "description": (
            "A TrainingPlan asks which placement and which parallel degrees train a model fastest on the devices of this "
            "cluster. The answer is measured, and stands in status.winner."
        ),
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(TrainingPlanSpec.model_json_schema()),
            # Serialization mode includes the text fields that are computed from others.
            "status": structural(TrainingPlanStatus.model_json_schema(mode="serialization")),
        },
        **_NAME_RULES,
    }


def crd_manifest() -> dict[str, Any]:
    """Return the CustomResourceDefinition as plain data."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["all", "ml"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": _COLUMNS,
                    "schema": {"openAPIV3Schema": openapi_schema()},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    """YAML dumper without aliases, which are hard to read in a manifest."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class gives the name
        return True


def crd_yaml() -> str:
    """Return the CustomResourceDefinition as YAML."""
    return HEADER + yaml.dump(crd_manifest(), Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    sys.stdout.write(crd_yaml())
