"""Starting plans where memory is short: layers balanced by memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from trainwright.cluster import Device
from trainwright.cost.estimate import memory_by_device
from trainwright.cost.layer_sums import Array, layer_values, prefix_sums, span_sums
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage, divisors
from trainwright.search.degrees import is_open
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.problem import Problem
from trainwright.strategy import Strategy

_MAX_ROUNDS = 4
"""Maximum rebalancing rounds, each corrected by the memory that stages actually used."""

Group = tuple[Device, ...]


def memory_balanced_plans(problem: Problem) -> Iterator[Plan]:
    """Yield those of `least_memory_plans` that fit."""
    context = problem.cost_context
    for plan in least_memory_plans(problem):
        if all(
            device_bytes <= context.memory_of_node[device.node]
            for device, device_bytes in memory_by_device(plan, context)
        ):
            yield plan


def least_memory_plans(problem: Problem) -> Iterator[Plan]:
    """Yield single pipelines with one tensor group per stage that minimise the fullest stage, smallest groups first.

    Groups have equal sizes or about equal memory. Stages take one row at a time and recompute everything.
    """
    by_accelerator = tensor_degrees_by_accelerator(problem)
    largest = max(by_accelerator, key=lambda name: _max_memory(problem, name))
    degree_choices: list[Mapping[str, int]] = []
    for tensor in by_accelerator[largest]:
        group_memory = tensor * _max_memory(problem, largest)
        uniform = {name: tensor for name, degrees in by_accelerator.items() if tensor in degrees}
        memory_matched = {
            name: next(
                (degree for degree in degrees if degree * _max_memory(problem, name) >= group_memory), degrees[-1]
            )
            for name, degrees in by_accelerator.items()
        }
        degree_choices += [choice for choice in (uniform, memory_matched) if choice not in degree_choices]
    for degree_of in degree_choices:
        yield from _balance_memory(problem, degree_of)


def tensor_degrees_by_accelerator(problem: Problem) -> dict[str, list[int]]:
    """Return each accelerator's tensor degrees, ascending."""
    possible = [tensor for tensor in divisors(problem.model.max_tensor_degree) if tensor <= len(problem.devices)]
    return {
        name: [tensor for tensor in possible if is_open(problem, Strategy(tensor, 1), (name,))] or [1]
        for name in problem.accelerators
    }


def _max_memory(problem: Problem, accelerator: str) -> int:
    nodes = (name for name in problem.nodes if problem.cluster.node(name).accelerator == accelerator)
    return max(problem.cost_context.memory_of_node[name] for name in nodes)


def _balance_memory(problem: Problem, degree_of: Mapping[str, int]) -> Iterator[Plan]:
    """Yield the memory-balanced plan if there are groups for it: the first that fits, else the last of those tried."""
    groups, context = form_tensor_groups(problem, degree_of), problem.cost_context
    if not groups:
        return
    costs = _layer_bytes(problem, groups)
    memory = np.array([context.memory_of_node[group[0].node] for group in groups], dtype=np.float64)
    free = memory
    for _ in range(_MAX_ROUNDS):
        ends = minimize_fullest_part(costs, free)
        plan = build_single_replica_plan(problem, groups, ends)
        resident = dict(memory_by_device(plan, context))
        fullest = np.array([max(resident[device] for device in group) for group in groups], dtype=np.float64)
        if (fullest <= memory).all():
            break
        expected = [cost[first:end].sum() for cost, first, end in zip(costs, (0, *ends), ends, strict=False)]
        free = memory - (fullest - expected)
    yield plan


def _layer_bytes(problem: Problem, groups: Sequence[Group]) -> Array:
    """Return [group, layer] bytes per device: training state plus in-flight inputs (1F1B)."""
    schedule, batch, count = Schedule.ONE_FORWARD_ONE_BACKWARD, problem.global_batch_size, len(groups)
    chunks = problem.cost_context.chunks_of_equal_stages(batch, count)
    in_flight = [in_flight_micro_batches(schedule, batch, stage, count, chunks) for stage in range(count)]
    resident = {size: state_and_input_bytes(problem, size) for size in set(map(len, groups))}
    layer_bytes: Array = np.array(
        [
            resident[len(group)][0] + count * resident[len(group)][1]
            for group, count in zip(groups, in_flight, strict=True)
        ]
    )
    return layer_bytes


def state_and_input_bytes(problem: Problem, tensor: int) -> tuple[Array, Array]:
    """Return [layer] bytes per device of training state, and of what one row keeps for recompute."""
    context = problem.cost_context
    values = layer_values(problem.model, context.divided_at(tensor).trained_parameters)
    frozen = layer_values(problem.model, lambda kind: kind.frozen_parameters)
    inputs = context.divided_activations.chosen_recomputed_bytes(tensor, 1)
    return context.value_bytes.unsharded_state(values, frozen), inputs


def form_tensor_groups(problem: Problem, degree_of: Mapping[str, int]) -> list[Group]:
    """Form tensor groups inside nodes, or across an accelerator's nodes if none is large enough.

    Groups with most memory come at both ends; only the largest are kept if they exceed the stage limit.
    """
    pools: dict[str, list[Device]] = {}
    nodes = [problem.cluster.node(name) for name in problem.nodes]
    fits_in_node = {node.accelerator for node in nodes if node.devices >= degree_of.get(node.accelerator, 1)}
    for device in problem.devices:
        node = problem.cluster.node(device.node)
        if node.accelerator in degree_of:
            pools.setdefault(node.name if node.accelerator in fits_in_node else node.accelerator, []).append(device)
    groups: list[Group] = []
    for devices in pools.values():
        size = degree_of[problem.cluster.node(devices[0].node).accelerator]
        groups += [tuple(devices[at : at + size]) for at in range(0, len(devices) - size + 1, size)]
    size = len(problem.model.layers)
    max_stages = problem.limits.max_stages(size)
    memory = problem.cost_context.memory_of_node
    # The first and last layers are large, and the first stage has most micro-batches in flight.
    largest = sorted(groups, key=lambda group: -memory[group[0].node] * len(group))[:max_stages]
    roomiest = sorted(largest, key=lambda group: -memory[group[0].node])
    return [*roomiest[:1], *roomiest[2:], *roomiest[1:2]]


def build_single_replica_plan(problem: Problem, groups: Sequence[Group], ends: Sequence[int]) -> Plan:
    stages = []
    for group, first, end in zip(groups, (0, *ends), ends, strict=False):
        run = LayerRun(first, end - first, Strategy(len(group), 1, recompute=True), (1,))
        stages.append(Stage(group, (run,)))
    pipeline = Pipeline(problem.global_batch_size, 1, tuple(stages))
    plan = Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))
    return with_runtime_choices(plan, problem.cost_context)


def minimize_fullest_part(costs: Array, free: Array) -> tuple[int, ...]:
    """Return each part's end index that minimises the largest used share of free memory.

    Costs are [part, item], free memory [part]. Every part gets at least one item.
    """
    items = costs.shape[1]
    shares = span_sums(prefix_sums(costs)) / np.maximum(free, 1.0)[:, None, None]
    shares[:, ~np.triu(np.ones((items + 1, items + 1), dtype=np.bool_), 1)] = np.inf
    fullest = np.full(items + 1, np.inf)
    fullest[0] = 0.0
    starts = []
    for share in shares:
        fullest_with_part = np.maximum(fullest[:, None], share)
        starts.append(fullest_with_part.argmin(axis=0))
        fullest = fullest_with_part.min(axis=0)
    ends = [items]
    for start in reversed(starts[1:]):
        ends.append(int(start[ends[-1]]))
    return tuple(reversed(ends))
