"""Queue of the gangs of all plans that wait for nodes: which of them may start next.

The gang of higher priority comes first. Among those of one priority namespaces take turns, a gang each: first the one that
had its last turn longest ago; within a namespace the gang whose task was created first. A gang with some pods placed comes
before all others, so that it is completed. A gang waits where the gangs before it need devices that it would get.

Turns are read from what the cluster holds, the times of placed gangs and of results, so that a restart knows them. They are
not saved up: a namespace that asked for nothing has one turn before the others, not many.

A gang is not waited for while it lacks devices that another workload has or whose node is gone, which may last for
days. It is while it lacks devices of other plans, whose gangs end soon; small gangs could otherwise overtake a large one
for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import takewhile
from operator import itemgetter

from trainwright import documents
from trainwright.worker_api import WorkerTask
from trainwright_operator.api.conditions import ConditionType
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.documents.outcome import REUSED_KEY
from trainwright_operator.flow.documents.stored_documents import NeedsNewerVersion, parse_strict, stored_time
from trainwright_operator.flow.gangs import scheduling
from trainwright_operator.flow.gangs.child_metadata import plan_label
from trainwright_operator.flow.gangs.launchers.launcher import assigned_pods
from trainwright_operator.flow.gangs.launchers.registry import launcher_of
from trainwright_operator.flow.gangs.pod_template import TASK_FILE
from trainwright_operator.flow.names import PINNED_ANNOTATION, PLACED_ANNOTATION
from trainwright_operator.flow.reasons import NEEDS_ACTION, Reason
from trainwright_operator.flow.snapshot import GangClaim, NodeFacts, Snapshot


def gang_claims(snapshot: Snapshot) -> tuple[GangClaim, ...]:
    """Return the devices that each gang of the plan holds and waits for; unreadable tasks are left out."""
    plan = snapshot.plan
    if plan.spec is None:
        return ()
    names = snapshot.names()
    claims = []
    for stored in snapshot.stored:
        if stored.role != StoredRole.TASK or stored.terminating or not names.owns(stored.name):
            continue
        pods = snapshot.pods_of(stored.gang)
        if not pods:  # only these hold devices or wait for them, and reading the task takes longer than all else here
            continue
        try:
            task: WorkerTask = parse_strict(stored.data.get(TASK_FILE, ""), WorkerTask, stored.name)
        except (documents.DocumentError, NeedsNewerVersion):
            continue
        in_use, requested = Counter[str](), Counter[str]()
        places = launcher_of(stored).places(names, stored.gang, task.gang)
        for pod, node in assigned_pods(places, pods):
            if pod is not None and scheduling.is_gated(pod):
                requested[node.name] += len(node.slots)
            elif pod is not None and pod.phase not in ("Succeeded", "Failed"):
                in_use[node.name] += len(node.slots)
        claims.append(
            GangClaim(
                namespace=plan.namespace,
                plan_name=plan_label(plan),
                plan_uid=plan.uid,
                gang=stored.gang,
                priority=plan.spec.priority,
                since=stored.created_at,
                resource_name=plan.spec.devices.resource_name,
                held=dict(in_use),
                wanted=dict(requested),
            )
        )
    return tuple(claim for claim in claims if claim.held or claim.wanted)


def respected_claims(snapshot: Snapshot) -> tuple[GangClaim, ...]:
    """Return the claims of the plan that the gangs of others respect.

    Gangs of a plan that is not accepted any more hold their devices and no place in the queue, and so does a gang whose
    pods may not be assigned to their nodes.
    """
    unassigned = {pod.gang for pod in snapshot.pods if pod.name in snapshot.refusals}
    plan = snapshot.plan
    all_claims = (replace(claim, wanted={}) if claim.gang in unassigned else claim for claim in gang_claims(snapshot))
    claims = tuple(claim for claim in all_claims if claim.held or claim.wanted)
    accepted = plan.status.condition(ConditionType.ACCEPTED)
    is_stuck = accepted is not None and accepted.reason in NEEDS_ACTION | {Reason.PLAN_LIMIT_REACHED}
    if not is_stuck and not plan.hidden_fields:
        return claims
    return tuple(replace(claim, wanted={}) for claim in claims if claim.held)


def last_turn(snapshot: Snapshot) -> datetime | None:
    """Return when a gang of the plan was last placed, or ended after that; None if the cluster holds no sign of one."""
    times: list[datetime] = []
    for stored in snapshot.stored:
        if stored.role == StoredRole.RESULT and REUSED_KEY not in stored.data:
            times.append(stored.created_at)
        elif stored.role == StoredRole.TASK:
            texts = (stored.annotations.get(key) for key in (PINNED_ANNOTATION, PLACED_ANNOTATION))
            times += [time for text in texts if text and (time := stored_time(text)) is not None]
    return max(times, default=None)


def gangs_ahead(snapshot: Snapshot, gang: str) -> tuple[GangClaim, ...]:
    """Return the gangs that come before the plan's gang and need devices that it would otherwise get, in their order."""
    return _gangs_ahead(snapshot, [gang])[0]


def queue_position(snapshot: Snapshot) -> int | None:
    """Return the place of the plan's next gang in the queue for its nodes, from 1, or None where no gang waits."""
    waiting = [claim.gang for claim in gang_claims(snapshot) if claim.wanted]
    return min((len(ahead) + 1 for ahead in _gangs_ahead(snapshot, waiting)), default=None)


def _gangs_ahead(snapshot: Snapshot, gangs: Sequence[str]) -> list[tuple[GangClaim, ...]]:
    own_claims = {claim.gang: claim for claim in gang_claims(snapshot)}
    all_claims = (*own_claims.values(), *snapshot.other_claims)
    queue = in_order(all_claims, snapshot.last_turns)
    ahead = []
    for gang in gangs:
        own = own_claims.get(gang)
        ahead.append(_needing_the_same(snapshot, all_claims, queue, own) if own is not None and own.wanted else ())
    return ahead


def _needing_the_same(
    snapshot: Snapshot, all_claims: Iterable[GangClaim], queue: Iterable[GangClaim], own: GangClaim
) -> tuple[GangClaim, ...]:
    claims = [claim for claim in all_claims if claim.resource_name == own.resource_name]
    shares = _devices_for_plans(snapshot, claims, own.resource_name)
    earlier = tuple(
        claim
        for claim in takewhile(lambda claim: claim is not own, queue)
        if claim.resource_name == own.resource_name
        and not claim.wanted.keys().isdisjoint(own.wanted)
        and all(shares.get(node, 0) >= devices for node, devices in claim.wanted.items())
    )
    needed = Counter(own.wanted)
    for claim in claims:
        needed.update(claim.held)
    for claim in earlier:
        needed.update(claim.wanted)
    return earlier if any(needed[node] > shares.get(node, 0) for node in own.wanted) else ()


def next_in_line(claims: Iterable[GangClaim], last_turns: Mapping[str, datetime]) -> Iterator[GangClaim]:
    """Iterate over the waiting gangs that no earlier gang's nodes overlap with."""
    taken: set[str] = set()
    for claim in in_order(claims, last_turns):
        if taken.isdisjoint(claim.wanted):
            yield claim
        taken.update(claim.wanted)


def in_order(claims: Iterable[GangClaim], last_turns: Mapping[str, datetime]) -> list[GangClaim]:
    """Return the gangs that wait in the order of the queue, which depends on nothing else."""
    turns = Counter[tuple[int, str]]()
    arrivals: dict[str, datetime] = {}
    keyed: list[tuple[tuple[object, ...], GangClaim]] = []
    for claim in sorted((claim for claim in claims if claim.wanted), key=_age):
        # A namespace that never had a turn takes its place as of when it began to wait: newcomers do not pass the others.
        served = last_turns.get(claim.namespace)
        waits_since = served or arrivals.setdefault(claim.namespace, claim.since), served is not None
        is_begun, queue = bool(claim.held), (claim.priority, claim.namespace)
        number = 0 if is_begun else turns[queue]
        turns[queue] += not is_begun
        keyed.append(((not is_begun, -claim.priority, number, *waits_since, *_age(claim)), claim))
    keyed.sort(key=itemgetter(0))
    return [claim for _, claim in keyed]


def _age(claim: GangClaim) -> tuple[datetime, str, str]:
    return claim.since, claim.plan_uid, claim.gang


def _devices_for_plans(snapshot: Snapshot, claims: Iterable[GangClaim], resource_name: str) -> Mapping[str, int]:
    """Return the devices of each node that no other workload holds."""
    in_use = Counter[str]()
    for claim in claims:
        in_use.update(claim.held)
    return {
        node.name: _usable_devices(node, resource_name)
        - max(snapshot.used_devices.get(node.name, 0) - in_use[node.name], 0)
        for node in snapshot.nodes
    }


def _usable_devices(node: NodeFacts, resource_name: str) -> int:
    return node.devices(resource_name) if node.ready and node.schedulable else 0
