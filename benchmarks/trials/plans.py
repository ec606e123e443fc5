"""Plans to try: candidates of every search, communication-heavy plans, and random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from random_plans import random_plan

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import Estimate, estimate
from trainwright.cost.operators.meshes import mesh_of
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, divisors, split_rows
from trainwright.profiles import Profiles
from trainwright.search import SEARCHES, Limits, NoFeasiblePlan, Problem, run
from trainwright.search.alpa.intra import IntraOperator
from trainwright.strategy import Strategy
from trials.settings import TENSOR_DEGREES, MeasuredCluster, TrialScenario
from trials.split import predicted_split

OF_EACH = 2
OF_MEGATRON = 4
LONGEST_SECONDS = 5.0
TALKATIVE = 0.3
"""Minimum communication share of a communication-heavy plan."""


@dataclass(frozen=True)
class ChosenPlan:
    """Plan to try and its prediction."""

    source: str
    plan: Plan
    estimate: Estimate

    @property
    def communication_share(self) -> float:
        """Return the share of the critical device's iteration spent in communication, without bubbles."""
        return predicted_split(self.estimate.breakdown).communication / self.estimate.iteration_seconds


def chosen_plans(
    setting: TrialScenario, surroundings: MeasuredCluster, profiles: Profiles, *, count: int, talkative: int
) -> list[ChosenPlan]:
    """Return all searches' candidates and random plans up to `count`, at least `talkative` communication-heavy."""
    found: list[ChosenPlan] = []
    cluster, runtime = surroundings.cluster, surroundings.runtime

    def take(source: str, plan: Plan) -> None:
        cost = estimate(plan, model=setting.model, cluster=cluster, profiles=profiles, runtime=runtime)
        known = any(one.plan == plan for one in found)
        if cost.feasible and not known and cost.iteration_seconds <= LONGEST_SECONDS:
            found.append(ChosenPlan(source, plan, cost))

    limits = Limits(max_tensor_degree=max(TENSOR_DEGREES))
    problem = Problem(cluster, setting.model, profiles, setting.batch, runtime=runtime, limits=limits)
    for planner in SEARCHES:
        if planner == "random":
            continue
        try:
            candidates = run(planner, problem, top=OF_MEGATRON if planner == "megatron" else OF_EACH)
        except NoFeasiblePlan:
            continue
        for candidate in candidates:
            take(planner, candidate.plan)
    seed = 0
    while len(found) < count or sum(one.communication_share >= TALKATIVE for one in found) < talkative:
        plan = _on(random_plan(seed, layers=len(setting.model.layers), tensor_degrees=TENSOR_DEGREES, devices=len(_devices(cluster))), cluster)  # fmt: skip
        seed += 1
        before = len(found)
        take("random", plan)
        if len(found) > before and len(found) > count and found[-1].communication_share < TALKATIVE:
            found.pop()  # only one that communicates much is lacking
    return found


def sharded_plans(
    setting: TrialScenario, surroundings: MeasuredCluster, profiles: Profiles, *, count: int
) -> list[ChosenPlan]:
    """Return up to `count` plans whose stages shard operators, as the integer program does fastest on their meshes.

    Two pipelines of a stage on each node, one stage on every mesh of all devices with several numbers of rows, and the first
    of each mesh with every layer recomputed.
    """
    cluster, runtime = surroundings.cluster, surroundings.runtime
    problem = Problem(cluster, setting.model, profiles, setting.batch, runtime=runtime)
    devices, sizes = problem.cluster.devices, list(reversed(setting.rows[1:]))
    shapes = [(len(devices) // within, within) for within in divisors(len(devices))[1:]]
    whole = [_plan(problem, rows, [devices], shape) for rows in sizes for shape in shapes]
    nodes = [[device for device in devices if device.node == node.name] for node in cluster.nodes]
    staged = [_plan(problem, rows, nodes, (1, len(nodes[0]))) for rows in sizes[1:]]
    recomputed = [plan.map_stages(_recomputed) for plan in whole[: len(shapes)]]
    sources = [("pipeline", staged), ("one stage", whole), ("recomputed stage", recomputed)]
    return [
        ChosenPlan(
            f"{source} of {_meshes(plan)}",
            plan,
            estimate(plan, model=setting.model, cluster=cluster, profiles=profiles, runtime=runtime),
        )
        for source, plans in sources
        for plan in plans
    ][:count]


def _meshes(plan: Plan) -> str:
    """Return `2 × 2`, the shapes of the stages' meshes."""
    shapes = [stage.operators.mesh_shape for stage in plan.stages if stage.operators is not None]
    return ", ".join(" × ".join(map(str, shape)) for shape in shapes)


def _plan(problem: Problem, rows: int, stages: Sequence[Sequence[Device]], shape: tuple[int, int]) -> Plan:
    """Return the pipeline of equally many layers on each stage's devices, all meshes of one shape."""
    layers, program, made = len(problem.model.layers), IntraOperator(problem), list[Stage]()
    for number, devices in enumerate(stages):
        first, end = (layers * cut // len(stages) for cut in (number, number + 1))
        mesh = mesh_of(tuple(device.node for device in devices), shape, problem.cost_context)
        data = math.gcd(rows, len(devices))
        run = LayerRun(first, end - first, Strategy(len(devices) // data, data), split_rows(rows, data))
        made.append(Stage(tuple(devices), (run,), program.spans(mesh, rows).sharding(first, end).specs))
    return Plan(layers, problem.global_batch_size, (Pipeline(problem.global_batch_size // rows, rows, tuple(made)),))


def _recomputed(stage: Stage) -> Stage:
    return replace(stage, layers=tuple(run.with_strategy(recompute=True) for run in stage.layers))


def _devices(cluster: Cluster) -> list[Device]:
    return [Device(node.name, slot) for node in cluster.nodes for slot in range(node.devices)]


def _on(plan: Plan, cluster: Cluster) -> Plan:
    """Return the plan with its devices replaced, in order, by the cluster's."""
    places = dict(zip(plan.devices, _devices(cluster), strict=False))

    def moved(stage: Stage) -> Stage:
        return Stage(tuple(places[device] for device in stage.devices), stage.layers)

    pipelines = tuple(
        Pipeline(one.micro_batches, one.micro_batch_size, tuple(moved(stage) for stage in one.stages))
        for one in plan.pipelines
    )
    return Plan(plan.model_layers, plan.global_batch_size, pipelines, plan.schedule)
