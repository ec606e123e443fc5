"""Everything that the golden tests import from the packages, so that a move or a rename touches one file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trainwright import documents
from trainwright.accelerators import estimate_profiles
from trainwright.cli.schema import DOCUMENTS as PUBLISHED_DOCUMENTS
from trainwright.cluster import Cluster
from trainwright.cost.context import CostContext as CostSubject
from trainwright.cost.estimate import estimate_with_context as estimate
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import Runtime
from trainwright.search import SEARCHES, NoFeasiblePlan
from trainwright.search import run as run_search
from trainwright.search.galvatron import galvatron_model
from trainwright.search.uniform import amp_model
from trainwright.training import Training
from trainwright.worker_api import (
    Cause,
    Failure,
    LinkReport,
    LinkTask,
    ProfilingReport,
    ProfilingTask,
    Progress,
    SeriesPart,
    TrialReport,
    TrialSeriesReport,
    TrialSeriesTask,
    TrialTask,
)
from trainwright_operator import device_resource
from trainwright_operator.api.spec import LauncherKind  # noqa: F401 - for the scenarios
from trainwright_operator.flow import actions
from trainwright_operator.flow.decide import decide
from trainwright_operator.flow.documents.discovered_devices import DiscoveredDevices
from trainwright_operator.flow.documents.outcome import GangOutcome
from trainwright_operator.flow.documents.planned_trials import PlannedTrials
from trainwright_operator.flow.gangs.retries import LostAttempt
from trainwright_operator.flow.gangs.worker_image import WorkerImage
from trainwright_operator.flow.nodes.published_devices import NodeInventory, PublishedDevices
from trainwright_operator.flow.phases.discovery import inspect_nodes
from trainwright_operator.node_resource import node_facts


def read_nodes(node: Any, slices: Iterable[Any], device_classes: Iterable[Any]) -> NodeInventory:
    """Return the inventory of a cluster of one node."""
    classes = device_resource.device_classes(device_classes)
    return NodeInventory.of(
        (node_facts(node),), PublishedDevices.of(device_resource.pool_parts(slices, classes), classes)
    )


amp_seconds = amp_model.estimate_seconds
galvatron_seconds = galvatron_model.estimate_seconds

ACTION_NAMES = {
    actions.CreateConfigMap: "create ConfigMap",
    actions.AnnotateConfigMap: "annotate ConfigMap",
    actions.DeleteConfigMap: "delete ConfigMap",
    actions.CreateNetworkPolicy: "create NetworkPolicy",
    actions.CreateJob: "create PyTorchJob",
    actions.DeleteJob: "delete PyTorchJob",
    actions.PinPod: "pin pod",
    actions.DryRunJob: "dry-run PyTorchJob",
    actions.StartPlanner: "start search",
    actions.SetStatus: "set status",
    actions.EmitEvent: "emit Event",
    actions.DeletePlan: "delete TrainingPlan",
}
"""Names of actions in the traces, whatever their classes are called."""

WIRE_DOCUMENTS = (
    LinkTask,
    ProfilingTask,
    TrialTask,
    TrialSeriesTask,
    LinkReport,
    ProfilingReport,
    TrialReport,
    TrialSeriesReport,
    SeriesPart,
    Progress,
    Failure,
    Cause,
    DiscoveredDevices,
    GangOutcome,
    LostAttempt,
    PlannedTrials,
    WorkerImage,
)
"""Documents that operator and worker exchange, and those that the operator stores for itself."""

__all__ = [
    "ACTION_NAMES",
    "PUBLISHED_DOCUMENTS",
    "SEARCHES",
    "WIRE_DOCUMENTS",
    "Cluster",
    "CostSubject",
    "NoFeasiblePlan",
    "Plan",
    "Profiles",
    "Runtime",
    "Training",
    "amp_seconds",
    "decide",
    "documents",
    "estimate",
    "estimate_profiles",
    "galvatron_seconds",
    "inspect_nodes",
    "read_nodes",
    "run_search",
]
