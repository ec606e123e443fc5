"""Creation of a gang's objects: the NetworkPolicy that isolates it, then what its pods are created from."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from trainwright_operator.flow.actions import Action, CreateJob, CreateNetworkPolicy
from trainwright_operator.flow.gangs.child_metadata import child_labels, plan_annotations
from trainwright_operator.flow.gangs.failures import GangFailure
from trainwright_operator.flow.gangs.gang_spec import GangSpec
from trainwright_operator.flow.gangs.launchers.launcher import JobApi, Launcher
from trainwright_operator.flow.gangs.launchers.registry import definition_removed
from trainwright_operator.flow.gangs.pod_limits import find_pod_excess
from trainwright_operator.flow.names import GANG_LABEL, LOG_LABEL, PLAN_UID_LABEL, RENDEZVOUS_LABEL
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Reason
from trainwright_operator.flow.snapshot import StoredConfigMap

NETWORK_POLICIES: Final = JobApi("networking.k8s.io", "v1", "networkpolicies")
_UID_LENGTH: Final = 8


def create_missing(
    context: ReconcileContext,
    gang_spec: GangSpec,
    task_map: StoredConfigMap,
    launcher: Launcher,
    present: Collection[str],
) -> tuple[Action, ...] | GangFailure:
    """Return the creation of the gang's objects that are not present, or why there is none to be.

    The NetworkPolicy comes before the pods, so that none of them is open to others.
    """
    manifests = launcher.manifests(context, gang_spec)
    missing = [manifest for manifest in manifests if manifest["metadata"]["name"] not in present]
    own_labels = {*child_labels(context.plan, gang_spec.name), LOG_LABEL, RENDEZVOUS_LABEL}
    own_annotations, rules = plan_annotations(context.plan), context.snapshot.rules
    for manifest in missing:
        for pod in launcher.pods(manifest):
            excess = find_pod_excess(
                pod,
                rules,
                own_labels=own_labels,
                own_annotations=own_annotations,
                own_priority_class=rules.priority_class,
            )
            if excess is not None:  # of a stored job that was modified: the spec's own are looked at before
                return GangFailure.of(Reason.POD_TEMPLATE_NOT_ALLOWED, what=excess.sentence(task_map.name))
    is_isolated = rules.isolates_gangs and missing
    policy = (CreateNetworkPolicy(network_policy(context, task_map)),) if is_isolated else ()
    return (*policy, *map(CreateJob, missing))


def find_refusal(context: ReconcileContext, launcher: Launcher, actions: Collection[Action]) -> GangFailure | None:
    """Return the API server's refusal of one of the objects that are to be created, or None."""
    names = [action.manifest["metadata"]["name"] for action in actions if isinstance(action, CreateJob)]
    words = next((context.snapshot.refusals[name] for name in names if name in context.snapshot.refusals), None)
    if words is None:
        return None
    if words == definition_removed(launcher.kind, context.plan):
        return GangFailure(launcher.missing, words)
    return GangFailure.of(Reason.JOB_REFUSED, kind=launcher.kind, what=words)


def network_policy(context: ReconcileContext, task_map: StoredConfigMap) -> dict[str, Any]:
    """Return the policy that lets only the gang's own pods reach those of the gang that has this task.

    What they send is left open: images and models of the user's may need the network. The task owns the policy, so that
    Kubernetes' garbage collector deletes it with the task, and the operator needs no right to. Its name ends with a part
    of the task's uid, since that of the attempt before may still be there.
    """
    plan = context.plan
    own_pods = {"podSelector": {"matchLabels": {PLAN_UID_LABEL: plan.uid, GANG_LABEL: task_map.gang}}}
    return {
        "apiVersion": f"{NETWORK_POLICIES.group}/{NETWORK_POLICIES.version}",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": f"{context.names.job(task_map.gang, 0)}-{task_map.uid[:_UID_LENGTH]}",
            "namespace": plan.namespace,
            "labels": child_labels(plan, task_map.gang),
            "annotations": plan_annotations(plan),
            "ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": task_map.name, "uid": task_map.uid}],
        },
        "spec": {**own_pods, "policyTypes": ["Ingress"], "ingress": [{"from": [own_pods]}]},
    }
