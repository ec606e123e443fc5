"""Rebalancing of layers over a plan's stages by their devices' speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.boundary_terms import boundary_terms
from trainwright.cost.layer_sums import Array, span_sums
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.problem import Problem
from trainwright.search.uniform.layer_partition import partition, with_messages
from trainwright.strategy import Sharding, Strategy


@dataclass(frozen=True, slots=True)
class LayerStrategy:
    """Strategy of one layer, and the rows of its replicas; a single replica is not sharded.

    What the runtime decides is left open: moves change the degrees that it depends on.
    """

    rows: tuple[int, ...]
    strategy: Strategy

    @classmethod
    def of(cls, run: LayerRun) -> LayerStrategy:
        return cls(run.rows, run.strategy.without_runtime_choices)

    def to_layer_run(self, first: int, count: int) -> LayerRun:
        return LayerRun(first, count, self.strategy.with_replicas(len(self.rows)), self.rows)

    def with_strategy(self, **changes: Any) -> LayerStrategy:
        """Return the layer with some fields of its strategy changed."""
        return replace(self, strategy=self.strategy.replace(**changes))

    def with_tensor_degree(self, tensor: int, devices: int, rows: int) -> LayerStrategy:
        """Return the strategy at another tensor degree, with even rows."""
        data = devices // tensor
        return LayerStrategy(scale_rows((1,) * data, rows), self.strategy.replace(tensor=tensor, data=data))


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Devices of a stage and the strategy of every layer."""

    devices: tuple[Device, ...]
    layers: tuple[LayerStrategy, ...]

    @classmethod
    def of(cls, stage: Stage) -> StageConfig:
        layers: list[LayerStrategy] = []
        for run in stage.layers:
            layers += [LayerStrategy.of(run)] * run.count
        return cls(stage.devices, tuple(layers))

    def to_stage(self, first: int) -> Stage:
        """Build the stage from layer `first`, merging equal neighbours into runs."""
        runs = []
        for strategy, alike in groupby(self.layers):
            count = len(list(alike))
            runs.append(strategy.to_layer_run(first, count))
            first += count
        return Stage(self.devices, tuple(runs))

    def map_layers(self, change: Callable[[LayerStrategy], LayerStrategy]) -> StageConfig:
        """Apply `change` to every layer."""
        changed = {layer: change(layer) for layer in dict.fromkeys(self.layers)}
        return replace(self, layers=tuple(changed[layer] for layer in self.layers))

    def map_some_layers(
        self, layer_numbers: Container[int], change: Callable[[LayerStrategy], LayerStrategy]
    ) -> StageConfig:
        """Apply `change` to the layers at these stage-relative indices."""
        return replace(
            self,
            layers=tuple(
                change(strategy) if number in layer_numbers else strategy for number, strategy in enumerate(self.layers)
            ),
        )

    def with_rows(self, rows: int) -> StageConfig:
        """Scale the replicas' rows to a micro-batch of `rows`."""
        return self.map_layers(lambda layer: replace(layer, rows=scale_rows(layer.rows, rows)))

    def with_tensor_degree(self, tensor: int, rows: int) -> StageConfig:
        """Return the stage at another tensor degree, with even rows."""
        return self.map_layers(lambda layer: layer.with_tensor_degree(tensor, len(self.devices), rows))

    def with_devices(self, devices: tuple[Device, ...], rows: int) -> StageConfig:
        """Move the stage to other devices, keeping each node's row proportions.

        The tensor degree becomes 1 where it does not divide the device count.
        """

        def change(layer: LayerStrategy) -> LayerStrategy:
            tensor = layer.strategy.tensor if len(devices) % layer.strategy.tensor == 0 else 1
            data = len(devices) // tensor
            rows_by_node: dict[str, list[int]] = {}
            for share, node in zip(layer.rows, _replica_nodes(layer, self.devices), strict=True):
                rows_by_node.setdefault(node, []).append(share)
            changed = LayerStrategy((1,) * data, layer.strategy.replace(tensor=tensor, data=data))
            mean, seen_by_node, proportions = sum(layer.rows) // len(layer.rows), Counter[str](), []
            for node in _replica_nodes(changed, devices):
                proportions.append(
                    rows_by_node[node][seen_by_node[node] % len(rows_by_node[node])] if node in rows_by_node else mean
                )
                seen_by_node[node] += 1
            return replace(changed, rows=scale_rows(proportions, rows))

        return replace(self.map_layers(change), devices=devices)

    @property
    def max_data_degree(self) -> int:
        return max(layer.strategy.data for layer in self.layers)

    @property
    def max_tensor_degree(self) -> int:
        return max(layer.strategy.tensor for layer in self.layers)


def _replica_nodes(layer: LayerStrategy, devices: tuple[Device, ...]) -> Iterator[str]:
    """Yield the node of each replica's first device."""
    return (group[0].node for group in layer.strategy.tensor_groups(devices))


def with_sharding(plan: Plan, sharding: Sharding) -> Plan:
    """Apply one sharding to all layers."""
    for index, pipeline in enumerate(plan.pipelines):
        stages = [
            stage.map_layers(lambda layer: layer.with_strategy(sharding=sharding)) for stage in stage_configs(pipeline)
        ]
        plan = with_stage_configs(plan, index, stages)
    return plan


def stage_configs(pipeline: Pipeline) -> tuple[StageConfig, ...]:
    """Convert the pipeline's stages to editable configurations."""
    return tuple(StageConfig.of(stage) for stage in pipeline.stages)


def with_stage_configs(
    plan: Plan, index: int, configs: Sequence[StageConfig], micro_batches: int | None = None
) -> Plan:
    """Replace one pipeline's stages (and micro-batch count)."""
    first, built_stages = 0, []
    for setup in configs:
        built_stages.append(setup.to_stage(first))
        first += len(setup.layers)
    count = plan.pipelines[index].micro_batches if micro_batches is None else micro_batches
    pipeline = Pipeline(count, sum(configs[0].layers[0].rows), tuple(built_stages))
    return replace(plan, pipelines=(*plan.pipelines[:index], pipeline, *plan.pipelines[index + 1 :]))


def scale_rows(rows: Sequence[int], total: int) -> tuple[int, ...]:
    """Scale rows to another sum, at least one each (largest remainders).

    Raises:
        ValueError: `total` is less than the number of replicas.
    """
    if total < len(rows):
        raise ValueError(f"cannot split {total} rows over {len(rows)} replicas: each needs at least one row")
    whole = sum(rows)
    scaled = [max(count * total // whole, 1) for count in rows]
    order = sorted(range(len(rows)), key=lambda replica: (-(rows[replica] * total % whole), replica))
    position = 0
    while sum(scaled) < total:
        scaled[order[position % len(rows)]] += 1
        position += 1
    while sum(scaled) > total:
        scaled[scaled.index(max(scaled))] -= 1
    return tuple(scaled)


_CACHE_BYTES, _MIN_CACHED_TABLES = 2**26, 16
"""Cache size in bytes, and minimum number of cached stage tables; successive plans share most stages."""


class LayerRebalancer:
    """Rebalancer for the plans of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        cuts = len(problem.model.layers) + 1
        self._replica_tables = ReplicaTables(problem, cuts)
        self._cached_replica_seconds = lru_cache(max(_CACHE_BYTES // (8 * cuts**2), _MIN_CACHED_TABLES))(
            self._replica_seconds
        )

    def rebalance(self, plan: Plan) -> Plan:
        """Return the plan with layer cuts optimal by AMP Eq. 5, each stage at its most common layer strategy.

        Each stage keeps its recompute ratio; moved layers copy the strategy next to them. Weight collectives and memory
        limits are ignored. A pipeline keeps its cuts if a layer has no profile at a stage's degree.
        """
        for index, pipeline in enumerate(plan.pipelines):
            configs = stage_configs(pipeline)
            if len(configs) > 1:
                try:
                    times = np.stack([self._stage_seconds(stage) for stage in configs])
                except ValueError:  # a layer without a profile
                    continue
                messages = self._boundary_seconds(configs, pipeline.micro_batch_size)
                if not self.problem.runtime.hides_transfers:
                    times, messages = with_messages(times, messages), np.zeros_like(messages)
                ends = partition(times, messages, pipeline.micro_batches)
                if ends is not None:
                    plan = with_stage_configs(plan, index, _with_ends(configs, ends))
        return plan

    def _stage_seconds(self, stage: StageConfig) -> Array:
        """Return [first, end] micro-batch seconds of the slowest replica."""
        most_common, _ = Counter(stage.layers).most_common(1)[0]
        recompute_ratio = sum(layer.strategy.recompute for layer in stage.layers) / len(stage.layers)
        groups = most_common.strategy.tensor_groups(stage.devices)
        replicas = tuple(tuple(device.node for device in group) for group in groups)
        return self._cached_replica_seconds(replicas, most_common.rows, recompute_ratio)

    def _replica_seconds(
        self, replicas: tuple[tuple[str, ...], ...], rows_of: tuple[int, ...], recompute_ratio: float
    ) -> Array:
        """Return [first, end] micro-batch seconds of the slowest replica, given its nodes, rows and recompute ratio."""
        groups = dict.fromkeys(zip(replicas, rows_of, strict=True))
        forward, backward, _, _ = self._replica_tables.prefix_sums(
            [(self._replica_tables.tensor_group(group), rows) for group, rows in groups]
        )
        passes = (1 + recompute_ratio) * forward + backward
        seconds: Array = span_sums(passes).max(axis=0)
        seconds[np.tril_indices(len(seconds))] = np.inf
        return seconds

    def _boundary_seconds(self, stages: tuple[StageConfig, ...], rows: int) -> Array:
        """Return [stage, end] seconds of both messages between a stage's last device and the next one's first."""
        context = self.problem.cost_context
        first, last = (
            np.array([context.node_numbers[stage.devices[end].node] for stage in stages], dtype=np.intp)
            for end in (0, -1)
        )
        per_byte = boundary_terms(last[:-1], first[1:], context).send_seconds_per_byte.sum(axis=0)
        exchanged: Array = per_byte[:, None] * (rows * self._replica_tables.stage_tables.row_bytes)
        return exchanged


def _with_ends(stages: tuple[StageConfig, ...], ends: tuple[int, ...]) -> list[StageConfig]:
    """Move the stages' layer ends."""
    configs, first, start = [], 0, 0
    for stage, end in zip(stages, ends, strict=True):
        size = len(stage.layers)
        layers = tuple(stage.layers[min(max(layer - first, 0), size - 1)] for layer in range(start, end))
        configs.append(StageConfig(stage.devices, layers))
        first, start = first + size, end
    return configs
