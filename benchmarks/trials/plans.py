"""Plans to try: candidates of every search, communication-heavy plans, and random ones."""

from __future__ import annotations

from dataclasses import dataclass

from random_plans import random_plan

from trainwright.cluster import Cluster, Device
from trainwright.cost.estimate import Estimate, estimate
from trainwright.plan import Pipeline, Plan, Stage
from trainwright.profiles import Profiles
from trainwright.search import SEARCHES, Limits, NoFeasiblePlan, Problem, run
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
    """Return up to `count` plans of Alpa with stages of shardings of operators, the fastest first."""
    cluster, runtime = surroundings.cluster, surroundings.runtime
    problem = Problem(cluster, setting.model, profiles, setting.batch, runtime=runtime)
    plans = [candidate.plan for candidate in run("alpa", problem, top=None) if candidate.plan.has_operators]
    costs = [estimate(p, model=setting.model, cluster=cluster, profiles=profiles, runtime=runtime) for p in plans]
    return [ChosenPlan("alpa", plan, cost) for plan, cost in zip(plans, costs, strict=True)][:count]


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
