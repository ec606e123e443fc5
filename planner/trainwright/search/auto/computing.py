"""Compute estimate: seconds if all devices computed all the time, at their rates for the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainwright.cost.network import link_matrices
from trainwright.cost.time_terms import TensorGroupClass
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.problem import Problem

_MAX_ROWS = 64
"""Maximum concurrent rows when measuring a device's rate."""


@dataclass
class ComputeEstimate:
    """Compute estimate of one problem; loose where rows are few.

    No bound, since unequal devices may specialise in layers: `cost.work_bound` has the bound that answers show.
    """

    problem: Problem

    def seconds(self, nodes: Iterable[str], max_devices_per_node: int | None = None) -> float:
        """Return the estimate in seconds on these nodes; 0 if profiles report no time."""
        used = [self.problem.cluster.node(name) for name in nodes]
        devices = [min(node.devices, max_devices_per_node or node.devices) for node in used]
        rates = (self._rows_per_second[node.accelerator] * count for node, count in zip(used, devices, strict=True))
        return self.problem.global_batch_size / sum(rates)

    @cached_property
    def cluster_seconds(self) -> float:
        """Return the estimate in seconds on all nodes."""
        return self.seconds(self.problem.nodes)

    @cached_property
    def _rows_per_second(self) -> dict[str, float]:
        """Return each accelerator's best rows per second through the model."""
        problem, replica_tables = self.problem, ReplicaTables(self.problem, 2)
        nodes = {problem.cluster.node(name).accelerator: name for name in problem.nodes}
        return {
            name: max(_rates_by_rows(problem, replica_tables, replica_tables.tensor_group((node,))))
            for name, node in nodes.items()
        }


def _rates_by_rows(problem: Problem, replica_tables: ReplicaTables, group: TensorGroupClass) -> Iterable[float]:
    """Yield rows per second at each profiled row count; extrapolated times could reach 0."""
    profiled = {layer.rows for layer in problem.profiles.layers if layer.accelerator in group.accelerators}
    for rows in {1, *(count for count in profiled if count <= min(problem.global_batch_size, _MAX_ROWS))}:
        seconds = replica_tables.total_seconds(group, rows)
        yield rows / seconds if seconds > 0 else np.inf


def tied_weight_sync_seconds(problem: Problem) -> float:
    """Return seconds to sum tied weights over the best inter-node link; 0 for one node."""
    kinds = [kind for kind in problem.model.kinds if kind.shared_weight is not None]
    bandwidth, numbers = link_matrices(problem.cluster).bandwidth, problem.node_numbers
    inter_node = bandwidth[np.ix_(numbers, numbers)][~np.eye(len(numbers), dtype=np.bool_)]
    if not kinds or not inter_node.size:
        return 0.0
    size = max(kind.shared_parameters for kind in kinds) * problem.cost_context.gradient_dtype.num_bytes
    return size / float(inter_node.max())
