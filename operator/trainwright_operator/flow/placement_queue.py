"""Queue of the gangs of all plans that wait for nodes: which of them may start next.

The gang of higher priority comes first, then the one whose task was created first; a gang with some pods placed comes
before all others, so that it is completed. A gang waits where the gangs before it need devices that it would get.

A gang is not waited for while it lacks devices that another workload has or whose node is gone, which may last for
days. It is while it lacks devices of other plans, whose gangs end soon; small gangs could otherwise overtake a large one
for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime

from trainwright import documents
from trainwright.worker_api import WorkerTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow import scheduling
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.gangs.launchers.launcher import assigned_pods
from trainwright_operator.flow.gangs.launchers.registry import launcher_of
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.gangs.worker_log import NeedsNewerVersion, parse_strict
from trainwright_operator.flow.reasons import LACKS, Reason
from trainwright_operator.flow.snapshot import GangClaim, NodeFacts, Snapshot


def gang_claims(snapshot: Snapshot) -> tuple[GangClaim, ...]:
    """Return the devices that each gang of the plan holds and waits for; unreadable tasks are left out."""
    plan = snapshot.plan
    if plan.spec is None:
        return ()
    names = snapshot.names(plan.spec)
    claims = []
    for stored in snapshot.stored:
        if stored.role != StoredRole.TASK or stored.terminating or not names.owns(stored.name):
            continue
        try:
            task: WorkerTask = parse_strict(stored.data.get(TASK_FILE, ""), WorkerTask, stored.name)
        except (documents.DocumentError, NeedsNewerVersion):
            continue
        held, wanted = Counter[str](), Counter[str]()
        places = launcher_of(stored).places(names, stored.gang, task.gang)
        for pod, node in assigned_pods(places, snapshot.pods_of(stored.gang)):
            if pod is not None and scheduling.is_gated(pod):
                wanted[node.name] += len(node.slots)
            elif pod is not None and pod.phase not in ("Succeeded", "Failed"):
                held[node.name] += len(node.slots)
        claims.append(
            GangClaim(
                plan_uid=plan.uid,
                gang=stored.gang,
                priority=plan.spec.priority,
                since=stored.created_at,
                resource_name=plan.spec.devices.resource_name,
                held=dict(held),
                wanted=dict(wanted),
            )
        )
    return tuple(claim for claim in claims if claim.held or claim.wanted)


def respected_claims(snapshot: Snapshot) -> tuple[GangClaim, ...]:
    """Return the claims of the plan that the gangs of others respect.

    Gangs of a plan that is not accepted any more hold their devices and no place in the queue.
    """
    plan, claims = snapshot.plan, gang_claims(snapshot)
    stuck = any(
        one.type is ConditionType.ACCEPTED and (one.reason in LACKS or one.reason == Reason.PLAN_LIMIT_REACHED)
        for one in plan.status.conditions
    )
    if not stuck and not plan.hidden_fields:
        return claims
    return tuple(replace(claim, wanted={}) for claim in claims if claim.held)


def gangs_ahead(snapshot: Snapshot, gang: str) -> int:
    """Return how many gangs come before the plan's gang and need devices that it would otherwise get."""
    own_claims = gang_claims(snapshot)
    own = next((claim for claim in own_claims if claim.gang == gang), None)
    if own is None:
        return 0
    claims = [claim for claim in (*own_claims, *snapshot.other_claims) if claim.resource_name == own.resource_name]
    shares = _devices_for_plans(snapshot, claims, own.resource_name)
    earlier = [
        claim
        for claim in claims
        if _order(claim) < _order(own)
        and not claim.wanted.keys().isdisjoint(own.wanted)
        and all(shares.get(node, 0) >= devices for node, devices in claim.wanted.items())
    ]
    needed = Counter(own.wanted)
    for claim in claims:
        needed.update(claim.held)
    for claim in earlier:
        needed.update(claim.wanted)
    return len(earlier) if any(needed[node] > shares.get(node, 0) for node in own.wanted) else 0


def queue_position(snapshot: Snapshot) -> int | None:
    """Return the place of the plan's next gang in the queue for its nodes, from 1, or None where no gang waits."""
    waiting = [claim.gang for claim in gang_claims(snapshot) if claim.wanted]
    return min((gangs_ahead(snapshot, gang) + 1 for gang in waiting), default=None)


def next_in_line(claims: Iterable[GangClaim]) -> Iterator[GangClaim]:
    """Iterate over the waiting gangs that no earlier gang's nodes overlap with."""
    taken: set[str] = set()
    for claim in sorted(claims, key=_order):
        if claim.wanted and taken.isdisjoint(claim.wanted):
            yield claim
        taken.update(claim.wanted)


def _order(claim: GangClaim) -> tuple[bool, int, datetime, str, str]:
    return not (claim.held and claim.wanted), -claim.priority, claim.since, claim.plan_uid, claim.gang


def _devices_for_plans(snapshot: Snapshot, claims: Iterable[GangClaim], resource_name: str) -> Mapping[str, int]:
    """Return the devices of each node that no other workload holds."""
    held = Counter[str]()
    for claim in claims:
        held.update(claim.held)
    return {
        node.name: _usable_devices(node, resource_name)
        - max(snapshot.used_devices.get(node.name, 0) - held[node.name], 0)
        for node in snapshot.nodes
    }


def _usable_devices(node: NodeFacts, resource_name: str) -> int:
    return node.devices(resource_name) if node.ready and node.schedulable else 0
