"""Snapshot of a plan on this machine, the input of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from trainwright_operator.api.installation import InstallationRules, PodTemplateRule
from trainwright_operator.flow.gangs.launchers.local import LOCAL_GANG
from trainwright_operator.flow.snapshot import PlanFacts, Snapshot
from trainwright_operator.local.tuned_plan import NAMESPACE, TunedPlan

_RULES: Final = InstallationRules(isolates_gangs=False, pod_template=PodTemplateRule.ANY)


def observe(plan: TunedPlan, now: datetime, *, is_machine_taken: bool = False) -> Snapshot:
    """Return what is observed. `is_machine_taken`: whether another plan measures on this machine."""
    for gang in plan.gangs.values():
        gang.observe(now)
    spec = plan.manifest.spec
    return Snapshot(
        plan=PlanFacts(
            name=plan.manifest.name,
            namespace=NAMESPACE,
            uid=plan.identity.uid,
            generation=plan.identity.generation,
            created_at=plan.identity.created_at,
            spec=spec.model_copy(update={"suspend": True}) if plan.is_suspended else spec,
            status=plan.status,
            image="local",
            annotations=plan.manifest.annotations,
        ),
        nodes=plan.machine.nodes,
        jobs=tuple(gang.job for gang in plan.gangs.values()),
        pods=tuple(pod for gang in plan.gangs.values() for pod in gang.pods),
        stored=plan.maps.all(),
        used_devices=_used_devices(plan, is_machine_taken=is_machine_taken),
        dry_run=plan.dry_run,
        planner=plan.search.facts,
        rules=_RULES,
        measurements=plan.kept.all(),
        launchers=(LOCAL_GANG,),
    )


def _used_devices(plan: TunedPlan, *, is_machine_taken: bool) -> Mapping[str, int]:
    """Return the devices of each node that are in use: all of them beside a running gang, which would disturb another."""
    is_used = is_machine_taken or bool(plan.running)
    resource = plan.manifest.spec.devices.resource_name
    return {node.name: node.devices(resource) for node in plan.machine.nodes} if is_used else {}
