"""Queue of Kueue that a plan's gangs stand in: which nodes it may use, and which labels keep other flavors away.

Kueue admits a gang's pods group by group to a flavor whose labels do not contradict the group's node affinity, then adds
these labels to the pods' node selector. A group whose nodes are alike in all labels that flavors name, and whose affinity
excludes the other values of these labels, gets a flavor that all of its nodes have.

With topology-aware scheduling (a flavor with `topologyName`) Kueue also chooses a node for each pod. So each pod of such a
flavor is a group of its own, whose affinity names its node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

from trainwright_operator.api.spec import TrainingPlanSpec
from trainwright_operator.api.status import NodeExclusion
from trainwright_operator.flow.nodes.device_types import NodeUnusable
from trainwright_operator.flow.phase import ReconcileContext
from trainwright_operator.flow.reasons import Explanation, Reason, explain
from trainwright_operator.flow.snapshot import FlavorFacts, JobFacts, NodeFacts, QueueFacts

API_GROUP: Final = "kueue.x-k8s.io"
QUEUE_LABEL: Final = f"{API_GROUP}/queue-name"
PRIORITY_LABEL: Final = f"{API_GROUP}/priority-class"

MAX_POD_SETS: Final = 18
"""Groups of pods in one object that Kueue takes from 0.19 on (10 before), as its definition of a Workload says."""
TOPOLOGY_ANNOTATION: Final = {f"{API_GROUP}/podset-unconstrained-topology": "true"}
"""Annotation of pods that get a flavor with a topology, beside flavors without, and any nodes that their affinity allows."""

LabelValues = tuple[tuple[str, tuple[str, ...]], ...]
"""Label keys, each with values, in order."""


def queue_labels(spec: TrainingPlanSpec) -> dict[str, str]:
    """Return the labels by which Kueue takes an object into the plan's queue; none without a queue."""
    labels = {QUEUE_LABEL: spec.queue_name, PRIORITY_LABEL: spec.queue_priority_class if spec.queue_name else None}
    return {key: value for key, value in labels.items() if value is not None}


def describe_suspension(spec: TrainingPlanSpec, job: JobFacts) -> str:
    """Return what Kueue says of a suspended job; without a queue in the spec also why the job is suspended, and the way out.

    Kueue takes jobs without a queue where a namespace has a LocalQueue `default`, or by manageJobsWithoutQueueName.
    """
    if spec.queue_name is not None:
        return job.queue_message
    name = f"{job.launcher} {job.name}"
    taken = f"Kueue took {name} into queue {job.queue}" if job.queue else f"{name} is suspended, most often by Kueue"
    return f"{taken}, and the plan has no spec.queueName; create a plan with it: {job.queue_message}"


def not_in(excluded: LabelValues) -> list[dict[str, Any]]:
    """Return the expressions of a node affinity that exclude these values."""
    return [{"key": key, "operator": "NotIn", "values": list(values)} for key, values in excluded]


def explain_problem(context: ReconcileContext) -> Explanation | None:
    """Return why the plan's queue cannot be used now, or None where it can or the plan has none."""
    queue = context.snapshot.queue
    if context.spec.queue_name is None or (queue is not None and queue.is_usable):
        return None
    if queue is not None and not queue.is_installed:
        return explain(Reason.KUEUE_MISSING, queue=queue.name)
    what = queue.problem if queue is not None else "it has not been read yet"
    return explain(Reason.QUEUE_UNUSABLE, queue=context.spec.queue_name, what=what)


@dataclass(frozen=True, slots=True)
class QuotaUse:
    """Quota that the nodes chosen so far take.

    Attributes:
        used: devices by flavor.
        chosen: flavor of the nodes that lack these labels. Kueue gives a group of pods a single one.
        count: number of nodes.
        is_placed: whether Kueue places pods on them: in one gang on all or on none.
    """

    queue: QueueFacts | None
    used: Mapping[str, int] = field(default_factory=dict)
    chosen: Mapping[LabelValues, str] = field(default_factory=dict)
    count: int = 0
    is_placed: bool = False

    def with_node(self, node: NodeFacts, devices: int) -> QuotaUse:
        """Return the use with all devices of a node. Raise NodeUnusable where no quota is left for them."""
        flavors = find_flavors(node, self.queue)
        if flavors is None or self.queue is None:
            return self
        is_placed = flavors[0].topology != ""
        if self.count and is_placed is not self.is_placed:
            # Pods that Kueue places would hold devices while others of their gang wait for theirs.
            raise NodeUnusable(
                NodeExclusion.QUEUE_MISMATCH,
                f"its flavor {flavors[0].name} has {'a' if is_placed else 'no'} topologyName, unlike those of the nodes before; "
                "use flavors of one kind in a queue, or choose nodes with devices.nodeSelector",
            )
        if is_placed and self.count == MAX_POD_SETS:
            raise NodeUnusable(
                NodeExclusion.QUEUE_MISMATCH,
                f"Kueue takes jobs of at most {MAX_POD_SETS} groups of pods, and each node of a flavor with topologyName is one",
            )
        alike = other_labels(node, self.queue)
        possible = [flavor for flavor in flavors if flavor.name == self.chosen.get(alike, flavor.name)]
        best = max(possible, key=self._left)
        if self._left(best) < devices:
            raise NodeUnusable(
                NodeExclusion.QUOTA_EXCEEDED,
                f"its {devices} devices exceed the quota of spec.queueName {self.queue.name}, of which "
                f"{self._left(best):.0f} of flavor {best.name} are left",
            )
        used = {**self.used, best.name: self.used.get(best.name, 0) + devices}
        chosen = {**self.chosen, alike: best.name}
        return replace(self, used=used, chosen=chosen, count=self.count + 1, is_placed=is_placed)

    def _left(self, flavor: FlavorFacts) -> float:
        return inf if flavor.quota is None else flavor.quota - self.used.get(flavor.name, 0)


def find_flavors(node: NodeFacts, queue: QueueFacts | None) -> tuple[FlavorFacts, ...] | None:
    """Return the flavors whose labels the node has, in Kueue's order, or None where no usable queue limits the plan.

    Where some have a topology, only these. Raise NodeUnusable where there is none, or where Kueue does not look at nodes.
    """
    if queue is None or not queue.is_usable:
        return None
    flavors = _flavors_with_labels(node, queue)
    if not flavors:
        names = ", ".join(flavor.name for flavor in queue.flavors)
        words = f"it has the labels of no flavor of spec.queueName {queue.name} ({names})"
        raise NodeUnusable(NodeExclusion.QUEUE_MISMATCH, words)
    placed = tuple(flavor for flavor in flavors if flavor.topology)
    unfit = next((flavor for flavor in placed if not flavor.reaches_nodes), None)
    if unfit is not None:
        raise NodeUnusable(
            NodeExclusion.QUEUE_MISMATCH,
            f"the topology {unfit.topology} of its flavor {unfit.name} does not end with the level kubernetes.io/hostname, so Kueue "
            "places pods without a look at their nodes; add that level",
        )
    return placed or flavors


def has_topology(node: NodeFacts, queue: QueueFacts | None) -> bool:
    """Return whether Kueue chooses the nodes of pods with a flavor of this node."""
    return queue is not None and any(flavor.topology for flavor in _flavors_with_labels(node, queue))


def _flavors_with_labels(node: NodeFacts, queue: QueueFacts) -> tuple[FlavorFacts, ...]:
    return tuple(flavor for flavor in queue.flavors if flavor.node_labels.items() <= node.labels.items())


def other_labels(node: NodeFacts, queue: QueueFacts) -> LabelValues:
    """Return the values, of each label that flavors name, that the node does not have."""
    values: dict[str, set[str]] = {}
    for flavor in queue.flavors:
        for key, value in flavor.node_labels.items():
            values.setdefault(key, set()).add(value)
    others = (
        (key, tuple(sorted(value for value in own if value != node.labels.get(key))))
        for key, own in sorted(values.items())
    )
    return tuple((key, rest) for key, rest in others if rest)


def dump_labels(context: ReconcileContext, node_names: tuple[str, ...]) -> str:
    """Return the excluded labels of a gang's nodes as JSON, which is kept with the gang's task."""
    queue = context.snapshot.queue
    nodes = (context.nodes[name] for name in node_names if name in context.nodes)
    return json.dumps({node.name: dict(other_labels(node, queue)) for node in nodes} if queue is not None else {})


def dump_named_nodes(context: ReconcileContext, node_names: tuple[str, ...]) -> str:
    """Return those of a gang's nodes that its pods have to name as JSON, which is kept with the gang's task."""
    queue = context.snapshot.queue
    nodes = (context.nodes[name] for name in node_names if name in context.nodes)
    return json.dumps([node.name for node in nodes if has_topology(node, queue)])


def parse_named_nodes(text: str) -> frozenset[str]:
    """Parse what `dump_named_nodes` wrote; what somebody modified counts as empty."""
    try:
        return frozenset(map(str, json.loads(text)))
    except (ValueError, TypeError, RecursionError):
        return frozenset()


def parse_labels(text: str) -> Mapping[str, LabelValues]:
    """Parse what `dump_labels` wrote; what somebody modified counts as empty."""
    try:
        labels = json.loads(text)
        return {
            str(node): tuple((str(key), tuple(map(str, values))) for key, values in of_node.items())
            for node, of_node in labels.items()
        }
    except (ValueError, AttributeError, TypeError, RecursionError):
        return {}
