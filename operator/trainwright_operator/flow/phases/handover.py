"""Handing the winner over as a job, once: `spec.apply`, and who owns it: `handover.allow` of the installation.

The ConfigMap that the job's pods mount is the record: with it the job's objects are decided, and stored beside the plan's
files. So a pass that is interrupted is repeated with the same objects, whatever an edit asks for meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from trainwright.documents import DocumentError
from trainwright.exports import ExportFile
from trainwright.worker_api import GangNode
from trainwright_operator.api.frameworks import Apply, JobSpec
from trainwright_operator.api.handed_over import HandedOverJob
from trainwright_operator.api.installation import HandoverRule, InstallationRules
from trainwright_operator.api.spec import LauncherKind
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import (
    AnnotateConfigMap,
    CreateConfigMap,
    DeleteConfigMap,
    DryRunJob,
    HandOverJob,
    StoredRole,
)
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.planned_trials import PlannedTrial
from trainwright_operator.flow.gangs import pod_template
from trainwright_operator.flow.gangs.child_metadata import owner_reference, plan_label
from trainwright_operator.flow.gangs.exported_plan import export_files
from trainwright_operator.flow.gangs.gang_network import asked_network
from trainwright_operator.flow.gangs.kueue import (
    MAX_POD_SETS,
    QUEUE_LABEL,
    TOPOLOGY_ANNOTATION,
    explain_problem,
    has_topology,
    not_in,
    other_labels,
    queue_labels,
)
from trainwright_operator.flow.gangs.launchers.launcher import ABANDONED_SECONDS, HandedOver
from trainwright_operator.flow.gangs.launchers.registry import LAUNCHERS, job_launchers
from trainwright_operator.flow.gangs.pod_limits import find_pod_excess
from trainwright_operator.flow.names import (
    HANDED_OVER_ANNOTATION,
    HANDED_OVER_LABEL,
    JOBS_CREATED_ANNOTATION,
    OWNED_ANNOTATION,
    handover_name,
)
from trainwright_operator.flow.nodes.network_devices import Amounts
from trainwright_operator.flow.phase import ReconcileContext, Waiting
from trainwright_operator.flow.reasons import Reason, explain
from trainwright_operator.flow.snapshot import StoredConfigMap
from trainwright_operator.flow.trials.trial_gangs import places
from trainwright_operator.flow.winner_job.held_job import job_of, keep_job
from trainwright_operator.flow.winner_job.job_record import MANIFESTS_KEY, JobRecord


def hand_over(
    context: ReconcileContext, discovery: DiscoveredDevices, winner: PlannedTrial, status: TrainingPlanStatus
) -> Waiting | HandedOverJob | None:
    """Return the job once it is created, None where nothing is to be handed over, else what is done towards it.

    `status`: what a wait shows. A dry run tries the job first; what the API server refuses later is tried again.
    """
    name = handover_name(context.plan.name, context.plan.uid)
    stored, upkeep = context.snapshot.find(name), keep_job(context)
    if upkeep.is_clearing:
        return Waiting(explain(Reason.RUNNING, what=f"ending the job {name}"), status=status)
    if upkeep.job is not None and (stored is None or JobRecord(stored).is_created):
        return upkeep.job
    creating = explain(Reason.RUNNING, what=f"handing the winner over as the job {name}")
    if stored is None:
        return _record(context, discovery, winner, Waiting(creating, status=status))
    manifests, record = _stored_manifests(stored, context.snapshot.rules), JobRecord(stored)
    if record.is_created:
        return job_of(record)
    if record.rule is not context.snapshot.rules.handover.rule and not context.snapshot.handed_over:
        # The installation's rule changed before anything was created: it holds for this job too.
        return Waiting(creating, status=status, actions=(DeleteConfigMap(name),))
    created = AnnotateConfigMap(name, {JOBS_CREATED_ANNOTATION: context.now.isoformat()})
    status = status.model_copy(update={"job": job_of(record)})  # what is created of it exists already
    return Waiting(creating, status=status, actions=(*map(HandOverJob, manifests), created))


def _record(
    context: ReconcileContext, discovery: DiscoveredDevices, winner: PlannedTrial, creating: Waiting
) -> Waiting | None:
    """Return what is done until the record of the job is stored; None where there is to be no job."""
    job, rule = context.spec.job, context.snapshot.rules.handover.rule
    if context.spec.apply is Apply.NEVER or job is None or rule is HandoverRule.NEVER:
        return None
    files, decided = _decide(context, discovery, winner, job)
    waiting = _try_job(context, decided[0])
    if waiting is not None:
        return replace(waiting, status=creating.status)
    name = handover_name(context.plan.name, context.plan.uid)
    data = {file.name: file.text for file in files} | {MANIFESTS_KEY: json.dumps(decided)}
    record = CreateConfigMap(name, StoredRole.HANDOVER, data)
    return replace(creating, actions=(record,))


def _try_job(context: ReconcileContext, manifest: dict[str, Any]) -> Waiting | None:
    """Return what is done until the API server accepts the job in a dry run, or None once it has.

    What it refuses later can no longer be edited.
    """
    problem = explain_problem(context)
    if problem is not None:  # the queue's flavors, which the pods' affinities name, are not known now
        return Waiting(problem, is_lacking=True)
    pod_sets = len(manifest["spec"].get("replicatedJobs", ()))
    if QUEUE_LABEL in manifest["metadata"]["labels"] and pod_sets > MAX_POD_SETS:
        what = f"a queue of Kueue takes jobs of at most {MAX_POD_SETS} nodes, the winner has {pod_sets}; set apply: Suspended"
        return Waiting(explain(Reason.JOB_REFUSED, kind=manifest["kind"], what=what), is_lacking=True)
    key = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    tried, (again, due_at) = context.snapshot.dry_run, DryRunJob(key, manifest).repeated(context.now)
    if tried is None or not tried.key.startswith(key):
        return Waiting(explain(Reason.RUNNING, what="trying the job that trains by the winner"), actions=(again,))
    if not tried.reason:
        return None
    return Waiting(
        explain(Reason.JOB_REFUSED, kind=manifest["kind"], what=f"{tried.message}; edit spec.job, or set apply: Never"),
        actions=() if tried.key == again.key else (again,),
        is_lacking=True,
        again_at=due_at,
    )


def _stored_manifests(stored: StoredConfigMap, rules: InstallationRules) -> list[dict[str, Any]]:
    """Return the objects that were decided. Raise DocumentError if the ConfigMap was modified.

    Whoever may write ConfigMaps could let the operator create any pods, but for the rules.
    """
    problem = f"{MANIFESTS_KEY} is no list of jobs"
    try:
        manifests: list[dict[str, Any]] = json.loads(stored.data.get(MANIFESTS_KEY, ""))
        pods = [pod for manifest in manifests for pod in LAUNCHERS[LauncherKind(manifest["kind"])].pods(manifest)]
        excesses = (find_pod_excess(pod, rules, own_labels=(HANDED_OVER_LABEL,)) for pod in pods)
        excess = next((excess for excess in excesses if excess is not None), None)
        is_valid = bool(pods) and all(manifest["metadata"]["name"] for manifest in manifests)
        if is_valid and excess is None:
            return manifests
        if excess is not None:
            problem = excess.sentence("template")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise DocumentError(f"{stored.name}: {problem}")


def _decide(
    context: ReconcileContext, discovery: DiscoveredDevices, winner: PlannedTrial, job: JobSpec
) -> tuple[tuple[ExportFile, ...], tuple[dict[str, Any], ...]]:
    """Return the files that the pods mount, and the job's objects."""
    spec, queue = context.spec, queue_labels(context.spec) if context.spec.apply is Apply.RUN else {}
    nodes = discovery.make_gang(places([winner.plan]), run_seconds=1.0).nodes
    is_owned, limit = (
        context.snapshot.rules.handover.rule is HandoverRule.OWNED,
        context.snapshot.rules.handover.max_seconds,
    )
    handed_over = HandedOver(
        name=handover_name(context.plan.name, context.plan.uid),
        namespace=context.plan.namespace,
        labels={HANDED_OVER_LABEL: plan_label(context.plan), **queue},
        annotations={HANDED_OVER_ANNOTATION: context.plan.uid} | ({OWNED_ANNOTATION: "true"} if is_owned else {}),
        nodes=nodes,
        pod=partial(_pod, context, job, asked_network(discovery, nodes, job.pod_template)),
        suspended=bool(queue) or spec.apply is Apply.SUSPENDED,  # Kueue resumes what is in its queue
        owners=(owner_reference(context.plan),) if is_owned else (),
        # The operator ends it sooner. This ends a job that lost its plan, which whoever deletes it may have orphaned.
        ends_after_seconds=math.ceil(limit) + ABANDONED_SECONDS if is_owned and limit is not None else None,
    )
    files = export_files(spec, model_from_spec(spec, winner.dtype), winner.plan, nodes)
    return files, job_launchers(context.plan)[0].handed_over(handed_over)


def _pod(
    context: ReconcileContext, job: JobSpec, network: Mapping[str, Amounts], node: GangNode, master: str
) -> dict[str, Any]:
    rendered = pod_template.render(
        image=job.image,
        task_map=handover_name(context.plan.name, context.plan.uid),
        resource_name=context.spec.devices.resource_name,
        devices=len(node.slots),
        network=network.get(node.name, {}),
        labels={HANDED_OVER_LABEL: plan_label(context.plan)},
        template=pod_template.template_of_job(job, context.spec.worker.pod_template),
        container=pod_template.job_container(job, master),
    )
    queue, facts = context.snapshot.queue, context.nodes.get(node.name)
    if queue is None or facts is None:
        return pod_template.on_node(rendered, node.name, ())
    if has_topology(facts, queue):
        rendered["metadata"]["annotations"] |= TOPOLOGY_ANNOTATION
    return pod_template.on_node(rendered, node.name, not_in(other_labels(facts, queue)))
