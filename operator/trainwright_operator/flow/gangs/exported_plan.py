"""Files with which a user's job runs a plan: those of `trainwright export`, for devices as its pods see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportFile, ExportRequest
from trainwright.exports.torchrun import PLAN_FILE, plan_file
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.worker_api import GangNode
from trainwright_operator.api.spec import TrainingPlanSpec

_ANY_PLAN: Final = "torchrun"


def export_files(spec: TrainingPlanSpec, model: Model, plan: Plan, nodes: Iterable[GangNode]) -> tuple[ExportFile, ...]:
    """Return the files for the trainer of search.expressibleBy, else for torchrun, and the plan."""
    target = TARGETS[spec.search.expressible_by.target if spec.search.expressible_by is not None else _ANY_PLAN]
    request = ExportRequest(
        replace(_in_pods(plan, nodes), dtype=model.dtype),
        model,
        spec.training.optimizer,
        (f"For {target.software}.", target.remark),
    )
    files = target.files(request)
    return files if any(file.name == PLAN_FILE for file in files) else (*files, plan_file(request))


def _in_pods(plan: Plan, nodes: Iterable[GangNode]) -> Plan:
    """Return the plan with the devices of each node numbered as its pod, which has no others, sees them."""
    seen = {
        Device(node.name, slot): Device(node.name, number) for node in nodes for number, slot in enumerate(node.slots)
    }
    return plan.map_stages(lambda stage: replace(stage, devices=tuple(seen[device] for device in stage.devices)))
