"""Check of how fast the nodes of a trial are: one layer on one device of each, as profiling measures it."""

from __future__ import annotations

from dataclasses import replace

import torch

from trainwright.worker_api import CheckedLayer, ProfilingTask, TrialTask
from trainwright_worker.device import release_cached_memory
from trainwright_worker.gang.gathering import gather
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.gang.watchdog import Watchdog
from trainwright_worker.measure.layer_bench import profile_if_it_fits


def check_nodes(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> tuple[CheckedLayer, ...]:
    """Measure the layers that the task checks, on the first device of each node while the others wait.

    Every rank returns all figures.
    """
    found = _own_seconds(task, assignment, device, watchdog)
    watchdog.beat("waiting for the checks of all nodes")
    return tuple(one for one in gather(found, CheckedLayer | None, device) if one is not None)


def _own_seconds(
    task: TrialTask, assignment: RankAssignment, device: torch.device, watchdog: Watchdog
) -> CheckedLayer | None:
    """Return the figure of this rank's node, or None where another rank measures it or nothing is to be checked."""
    node = next(node for node in task.gang.nodes if node.name == assignment.device.node)
    check = next((one for one in task.checks if one.accelerator == node.accelerator), None)
    if check is None or assignment.device.slot != node.slots[0]:
        return None
    gang = replace(task.gang, nodes=(replace(node, slots=node.slots[:1]),))
    profiling = ProfilingTask(gang, task.model, 1, (check.rows,), task.optimizer, kinds=(check.kind,))
    (kind,) = profiling.layer_kinds
    profile = profile_if_it_fits(profiling, kind, check.rows, device, watchdog)
    release_cached_memory(device)
    if profile is None:
        return None
    seconds = profile.forward_seconds + profile.backward_seconds
    return CheckedLayer(node.name, task.model.dtype, check.kind, check.rows, seconds)
