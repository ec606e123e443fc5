"""Plans whose layers are dealt out by memory: a first answer where devices are unequal and memory is short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from trainwright.cluster import Device
from trainwright.cost.estimate import memory_by_device
from trainwright.cost.memory import parameter_bytes
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search.degrees import profiled, tensor_degrees
from trainwright.search.protocol import Problem

_MOST_TENSOR = 16
_ROUNDS = 4
"""How often layers are dealt out anew, by what else than weights the stages turned out to hold."""

Array = NDArray[np.float64]
Group = tuple[Device, ...]


def packed_plans(problem: Problem) -> Iterator[Plan]:
    """One pipeline over all nodes, a tensor group a stage, whose fullest stage is as empty as may be; smallest groups first.

    Groups are all of one size, or those of devices with less memory so much larger that each has about as much. A row
    passes at a time, and everything is computed again: little is held beside weights and their state.
    """
    by_accelerator = degrees_of(problem)
    largest = max(by_accelerator, key=lambda name: _memory(problem, name))
    tried: list[Mapping[str, int]] = []
    for tensor in by_accelerator[largest]:
        enough = tensor * _memory(problem, largest)
        alike = {name: tensor for name, degrees in by_accelerator.items() if tensor in degrees}
        matched = {
            name: next((one for one in degrees if one * _memory(problem, name) >= enough), degrees[-1])
            for name, degrees in by_accelerator.items()
        }
        tried += [one for one in (alike, matched) if one not in tried]
    for degree_of in tried:
        plan = _packed(problem, degree_of)
        if plan is not None:
            yield plan


def degrees_of(problem: Problem) -> dict[str, list[int]]:
    """By accelerator its tensor degrees, ascending."""
    most = min(len(problem.devices), _MOST_TENSOR, problem.limits.max_tensor_degree or _MOST_TENSOR)
    every = tensor_degrees(problem.model, problem.model.max_tensor_degree, most)
    names = dict.fromkeys(problem.cluster.node(node).accelerator for node in problem.nodes)
    return {
        name: [one for one in every if profiled(problem.model, problem.profiles, (name,), one)] or [1] for name in names
    }


def _memory(problem: Problem, accelerator: str) -> int:
    nodes = (name for name in problem.nodes if problem.cluster.node(name).accelerator == accelerator)
    return max(problem.setting.memory_of_node[name] for name in nodes)


def _packed(problem: Problem, degree_of: Mapping[str, int]) -> Plan | None:
    """None where it does not fit."""
    groups, setting = groups_of(problem, degree_of), problem.setting
    if not groups:
        return None
    costs = _costs(problem, groups)
    memory = np.array([setting.memory_of_node[group[0].node] for group in groups], dtype=np.float64)
    room = memory
    for _ in range(_ROUNDS):
        ends = dealt(costs, room)
        plan = plan_of(problem, groups, ends)
        held = dict(memory_by_device(plan, setting))
        fullest = np.array([max(held[device] for device in group) for group in groups], dtype=np.float64)
        if (fullest <= memory).all():
            return plan
        known = [cost[first:end].sum() for cost, first, end in zip(costs, (0, *ends), ends, strict=False)]
        room = memory - (fullest - known)
    return None


def _costs(problem: Problem, groups: Sequence[Group]) -> Array:
    """[group, layer] bytes of a device's part of its state, and of the inputs of micro-batches under way (1F1B)."""
    kept = np.minimum(problem.global_batch_size, np.arange(len(groups), 0, -1))
    held = {size: held_by(problem, size) for size in set(map(len, groups))}
    found: Array = np.array(
        [held[len(group)][0] + count * held[len(group)][1] for group, count in zip(groups, kept, strict=True)]
    )
    return found


def held_by(problem: Problem, tensor: int) -> tuple[Array, Array]:
    """Two of [layer] bytes of one of so many devices: of its state, and of the input of a row."""
    model, layers = problem.model, range(len(problem.model.layers))
    each = parameter_bytes(model, problem.optimizer, problem.runtime.gradient_dtype)
    values = np.array([problem.setting.values_at(model.kind_of(layer), tensor) for layer in layers], dtype=np.float64)
    inputs = np.array([0.0, *(model.output_bytes_per_row(layer) for layer in layers[:-1])])
    return values * each, inputs


def groups_of(problem: Problem, degree_of: Mapping[str, int]) -> list[Group]:
    """Groups inside nodes, where no node is that large over nodes of one accelerator; those with most memory at both ends.

    Where they are more than there may be stages, those with most memory.
    """
    alike: dict[str, list[Device]] = {}
    nodes = [problem.cluster.node(name) for name in problem.nodes]
    roomy = {node.accelerator for node in nodes if node.devices >= degree_of.get(node.accelerator, 1)}
    for device in problem.devices:
        node = problem.cluster.node(device.node)
        if node.accelerator in degree_of:
            alike.setdefault(node.name if node.accelerator in roomy else node.accelerator, []).append(device)
    found: list[Group] = []
    for devices in alike.values():
        size = degree_of[problem.cluster.node(devices[0].node).accelerator]
        found += [tuple(devices[at : at + size]) for at in range(0, len(devices) - size + 1, size)]
    size = len(problem.model.layers)
    most = min(problem.limits.max_pipeline_degree or size, size)
    memory = problem.setting.memory_of_node
    # First and last layers are large, the first stage has most micro-batches under way.
    largest = sorted(found, key=lambda group: -memory[group[0].node] * len(group))[:most]
    roomiest = sorted(largest, key=lambda group: -memory[group[0].node])
    return [*roomiest[:1], *roomiest[2:], *roomiest[1:2]]


def plan_of(problem: Problem, groups: Sequence[Group], ends: Sequence[int]) -> Plan:
    stages = []
    for group, first, end in zip(groups, (0, *ends), ends, strict=False):
        run = LayerRun(first, end - first, len(group), 1, (1,), recompute=True)
        stages.append(Stage(group, (run,)))
    pipeline = Pipeline(problem.global_batch_size, 1, tuple(stages))
    return Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))


def dealt(costs: Array, room: Array) -> tuple[int, ...]:
    """By part the index behind its last item, so that the largest share of a part's room that is taken is least.

    Costs are [part, item], room [part]; what has no room left counts as tiny. Every part has at least one item; there are
    no more parts than items.
    """
    parts, items = costs.shape
    sums = np.concatenate([np.zeros((parts, 1)), np.cumsum(costs, axis=1)], axis=1)
    shares = (sums[:, None, :] - sums[:, :, None]) / np.maximum(room, 1.0)[:, None, None]
    shares[:, ~np.triu(np.ones((items + 1, items + 1), dtype=np.bool_), 1)] = np.inf
    fullest = np.full(items + 1, np.inf)
    fullest[0] = 0.0
    starts = []
    for share in shares:
        through = np.maximum(fullest[:, None], share)
        starts.append(through.argmin(axis=0))
        fullest = through.min(axis=0)
    ends = [items]
    for start in reversed(starts[1:]):
        ends.append(int(start[ends[-1]]))
    return tuple(reversed(ends))
