"""Reference of migration bytes, counted slice by slice, and of a plan under every renaming of its devices."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

from trainwright.cluster import Device
from trainwright.cost.context import CostContext
from trainwright.cost.network import node_classes
from trainwright.plan import LayerRun, Plan, Stage
from trainwright.search import Problem
from trainwright.strategy import RankOrder, Sharding

UNITS = 2 * 2 * 3 * 4
"""Equal slices of a layer's parameters: every degree and share in these tests is a whole number of them."""

Unit = tuple[str, str, bool, int]
"""Weights or optimizer, of which weight, whether of the values that tensor groups divide, and the part's number."""


def held_units(plan: Plan, setting: CostContext) -> dict[Device, set[Unit]]:
    """Return every device's resident slices."""
    found: dict[Device, set[Unit]] = {}
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for index, device in enumerate(stage.devices):
            for name, flag, divided, run_ in named_values(stage, setting):
                inner = run_.strategy.order is RankOrder.TENSOR_INNER
                replica, part = (
                    divmod(index, run_.strategy.tensor)
                    if inner
                    else (index % run_.strategy.data, index // run_.strategy.data)
                )
                for state, shards in (
                    ("weights", run_.strategy.sharding is Sharding.ZERO3),
                    ("optimizer", run_.strategy.sharding is not Sharding.NONE),
                ):
                    size = UNITS // run_.strategy.tensor if divided else UNITS
                    start = part * size if divided else 0
                    if shards:
                        size //= run_.strategy.data
                        start += replica * size
                    held = found.setdefault(device, set())
                    held |= {(state, name, flag, unit) for unit in range(start, start + size)}
    return found


def named_values(stage: Stage, setting: CostContext) -> list[tuple[str, bool, bool, LayerRun]]:
    """Return the stage's weights: name, whether they can be sharded, whether they are sharded here."""
    found = []
    owned: set[str] = set()
    for run_ in stage.layers:
        for layer in range(run_.first, run_.end):
            kind = setting.model.kind_of(layer)
            found.append((f"layer {layer}", False, False, run_))
            if kind.is_tensor_parallel:
                found.append((f"layer {layer}", True, True, run_))
            if kind.shared_weight and kind.shared_weight not in owned:
                owned.add(kind.shared_weight)
                found.append((kind.shared_weight, False, setting.is_tensor_sharded(kind, run_.strategy.tensor), run_))
    return found


def units_to_bytes(units: set[Unit], setting: CostContext) -> float:
    model = setting.model
    per_value = {
        "weights": setting.value_bytes.weight,
        "optimizer": setting.value_bytes.optimizer,
    }
    total = 0.0
    for state, name, divided, _ in units:
        if name.startswith("layer "):
            kind = model.kind_of(int(name.removeprefix("layer ")))
            own = kind.parameters - (kind.shared_parameters if kind.shared_weight else 0)
            split = min(kind.split_parameters, own) if kind.is_tensor_parallel else 0
            values = split if divided else own - split
        else:
            values = next(kind.shared_parameters for kind in model.kinds if kind.shared_weight == name)
        total += per_value[state] * values / UNITS
    return total


def renamed(plan: Plan, problem: Problem) -> list[Plan]:
    """Return the plan under every renaming of interchangeable two-device nodes, and of their slots."""
    cluster = problem.cluster
    classes = node_classes(cluster)
    names = [node.name for node in cluster.nodes]
    found = []
    for order in permutations(range(len(names))):
        if any(classes[a] != classes[b] for a, b in enumerate(order)):
            continue
        for swapped in range(2 ** len(names)):
            name = {
                Device(names[a], slot): Device(names[b], slot ^ (swapped >> a & 1))
                for a, b in enumerate(order)
                for slot in range(2)
            }
            stages = tuple(
                replace(stage, devices=tuple(name[device] for device in stage.devices))
                for stage in plan.pipelines[0].stages
            )
            found.append(replace(plan, pipelines=(replace(plan.pipelines[0], stages=stages),)))
    return found
