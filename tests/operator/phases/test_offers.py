"""Offers of a TrainingPlan: the planner can plan them and the worker accepts them."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest
from flow_reports import report_of
from flow_world import World, spec_of
from pydantic import ValidationError

from trainwright import documents, families
from trainwright.cluster import Cluster, PricedBy
from trainwright.exports import TARGETS
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.search import SEARCHES, Candidate, Objective, Problem, SearchControl, run
from trainwright.worker_api import TrialTask, WorkerTask
from trainwright_operator import search_process
from trainwright_operator.api import spec as api
from trainwright_operator.api.model import ModelSpec
from trainwright_operator.flow.documents.number_formats import model_from_spec
from trainwright_operator.flow.documents.planned_trials import PlannedTrials
from trainwright_worker import validation

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 4, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512},
    "llama": {"layers": 2, "hiddenSize": 64, "heads": 4, "sequenceLength": 16, "rotaryBase": 5e5, "normEpsilon": 1e-5},
    "bert": {"layers": 2, "hiddenSize": 64, "heads": 4, "sequenceLength": 16, "nextSentence": False},
    "vit": {"layers": 2, "hiddenSize": 64, "heads": 4, "imageSize": 32, "patchSize": 8, "classes": 10},
    "swin": {"layers": [1, 1], "hiddenSize": 32, "heads": [2, 4], "imageSize": 32, "patchSize": 2, "windowSize": 4},
    "t5": {"layers": 2, "hiddenSize": 64, "heads": 4, "decoderSequenceLength": 8, "positionBuckets": 8},
    "moe": {"layers": 2, "hiddenSize": 64, "heads": 4, "sequenceLength": 16, "experts": 4, "expertEvery": 2},
    "wideResNet": {"depth": 50, "baseChannels": 4, "imageSize": 32, "widened": "second"},
    "transGan": {"layers": [1, 0, 1], "hiddenSize": 64, "bottomWidth": 4, "latentSize": 16},
    "custom": {
        "entrypoint": "models.resnet:resnet18",
        "kinds": [
            {
                "name": name,
                "parameters": 9536,
                "forwardFlopsPerRow": 2e6,
                "outputElementsPerRow": 64,
                "savedElementsPerRow": 200,
            }
            for name in ("Stem", "Head")
        ],
        "layers": ["Stem", "Stem", "Head"],
    },
}


def answered(spec: api.TrainingPlanSpec, report: Callable[[WorkerTask], Any] = report_of) -> World:
    """Return a world whose plan has its answer, after checking that the worker would accept every task."""
    orders: list[WorkerTask] = []

    def checked(order: WorkerTask) -> None:
        validation.check_task(order)
        orders.append(order)

    world = World(spec=spec, log=checked, report=report)
    world.run()
    assert world.succeeded == "True", world.status.dump()["conditions"]
    assert {order.kind for order in orders} == {"links", "profile", "trial"}
    return world


def planned_in(world: World) -> PlannedTrials:
    assert world.status.candidates_ref is not None
    text = world.stored[world.status.candidates_ref.config_map].data["document.json"]
    found: PlannedTrials = documents.loads(text, PlannedTrials)
    return found


def test_crd_offers_every_search_by_name() -> None:
    assert {planner.search for planner in api.Planner} == set(SEARCHES)
    assert api.SearchSpec().planner.search == "auto"
    assert {objective.search for objective in api.Objective} < {objective.value for objective in Objective}


def test_crd_offers_every_trainer_that_plans_can_be_exported_to() -> None:
    trainers = {name for name, target in TARGETS.items() if not target.capabilities.every_plan}
    assert {trainer.target for trainer in api.Trainer} == trainers


@pytest.mark.parametrize("planner", api.Planner)
def test_every_search_finds_a_winner_with_valid_worker_tasks(planner: api.Planner) -> None:
    world = answered(spec_of(search={"planner": planner.value, "effort": 0.1}, trials={"topK": 2}))
    assert planned_in(world).planner == planner.search
    assert planner.search in world.condition("Planned").message


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_a_winner_with_valid_worker_tasks(name: str) -> None:
    spec = spec_of(model={name: MODELS[name]}, training={"globalBatchSize": 4, "dtype": "bfloat16"})
    assert answered(spec).status.winner is not None
    family = model_from_spec(spec).family
    assert model_from_spec(spec) == Model.of(family, model_from_spec(spec).dtype)
    given = [
        tuple(value) if isinstance(value, list) else value for key, value in MODELS[name].items() if key != "kinds"
    ]
    assert set(given) <= {value for key, value in dataclasses.asdict(family).items() if key != "kinds"}


def test_crd_offers_every_family_with_its_fields_and_defaults() -> None:
    for noun, offered in zip(families.FAMILIES.values(), ModelSpec.model_fields.values(), strict=True):
        part = get_args(offered.annotation)[0]
        assert part.noun is noun
        fields = {one.name: one for one in dataclasses.fields(part.noun)}
        # The worker's layers have no dropout, and PyTorch's own GELU.
        assert set(fields) - {"family", "dropout", "fused_gelu"} == set(part.model_fields)
        for name, one in part.model_fields.items():
            expected = fields[name].default
            assert one.is_required() == (expected is dataclasses.MISSING), f"{part.__name__}.{name}"
            assert one.is_required() or one.default == expected, f"{part.__name__}.{name}"


@pytest.mark.parametrize(
    ("checks", "told"),
    [
        (None, "; the description of models.resnet:resnet18 was not checked, .*"),
        (
            {"uncheckedKinds": ["Stem", "Head"]},
            "; the description of models.resnet:resnet18 left out the values of Stem and of 1 more kinds of layers, which profiling checks first",
        ),
        ({}, ""),
    ],
)
def test_custom_model_that_was_not_checked_is_accepted_with_a_warning(checks: object, told: str) -> None:
    world = World(spec=spec_of(model={"custom": {**MODELS["custom"], "checks": checks}}))
    world.run(until=lambda: world.condition("Accepted").status == "True")
    assert re.fullmatch(f"the spec is valid{told}", world.condition("Accepted").message)


def test_inconsistent_custom_model_is_rejected_with_a_message() -> None:
    world = World(spec=spec_of(model={"custom": {**MODELS["custom"], "layers": ["Stem", "Stem"]}}))
    world.run()
    assert world.condition("Accepted").reason == "SpecInvalid"
    assert "custom.kinds gives Head, but no layer is of that kind" in world.condition("Accepted").message


def test_model_has_exactly_one_family() -> None:
    for model in ({}, {"gpt": MODELS["gpt"], "vit": MODELS["vit"]}):
        with pytest.raises(ValueError, match=r"model needs exactly one family, got [02]; set one of gpt, llama"):
            assert spec_of(model=model).model.family


def test_inconsistent_sizes_are_rejected_with_field_names_of_the_resource() -> None:
    world = World(spec=spec_of(model={"swin": {**MODELS["swin"], "windowSize": 5}}))
    world.run()
    assert world.condition("Accepted").reason == "SpecInvalid"
    assert "windows of 5 patches do not tile stage 0" in world.condition("Accepted").message
    assert "swin.imageSize" in world.condition("Accepted").message


@pytest.mark.parametrize("planner", ["Auto", "Amp"])
def test_search_answers_and_reports_when_its_budget_ends(monkeypatch: pytest.MonkeyPatch, planner: str) -> None:
    budgets = []

    def spent(budget_seconds: float, *, effort: float, report: Any) -> SearchControl:
        del report
        budgets.append((budget_seconds, effort))
        return SearchControl(deadline_seconds=time.monotonic())

    monkeypatch.setattr(SearchControl, "with_budget", spent)
    world = World(
        spec=spec_of(search={"planner": planner, "effort": 0.5, "budgetSeconds": 7}), search=search_process.search
    )
    world.run(until=lambda: world.status.candidates_ref is not None)
    assert budgets == [(7, 0.5)]
    assert planned_in(world).stopped_by_budget
    assert "stopped by search.budgetSeconds" in world.condition("Planned").message


def test_plans_beyond_one_config_map_are_omitted_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_process, "MAX_PLANS_BYTES", 1)
    world = World(spec=spec_of(trials={"topK": 3}), search=search_process.search)
    world.run(until=lambda: world.condition("Planned").status == "True")
    planned = planned_in(world)
    assert len(planned.trials) == 1
    assert planned.without_room >= 2
    assert f"({planned.without_room} more do not fit into the ConfigMap)" in world.condition("Planned").message


PRICES = {"n1": 2.0, "n2": 2.0, "n3": 1.0}
BY_ACCELERATOR = {"emulated-v100": 2.0, "emulated-t4": 1.0}
"""The faster accelerator costs twice as much, so that neither is ruled out."""


def price_per_hour(plan: Plan) -> float:
    return sum(PRICES[device.node] for device in plan.devices)


def dear_plans_are_faster(order: WorkerTask) -> Any:
    found = report_of(order)
    if not isinstance(order, TrialTask):
        return found
    return replace(found, iteration_seconds=(1 / math.sqrt(price_per_hour(order.plan)),) * 2)


@pytest.mark.parametrize(("objective", "sense"), [("Cost", min), ("Time", max)])
def test_cheapest_measured_plan_wins_when_cost_is_the_objective(objective: str, sense) -> None:
    spec = spec_of(
        search={"planner": "Amp", "objective": objective},
        devices={"pricesPerHour": BY_ACCELERATOR},
        trials={"topK": 6},
    )
    world = answered(spec, report=dear_plans_are_faster)
    winner, cluster_ref = world.status.winner, world.status.cluster_ref
    cluster = documents.loads(world.stored[cluster_ref.config_map].data["document.json"], Cluster)
    assert {one.name: one.price_per_hour for one in cluster.accelerators} == BY_ACCELERATOR
    prices = {one.name: price_per_hour(one.plan) for one in planned_in(world).trials}
    assert objective == "Time" or len(set(prices.values())) > 1  # else this could not fail
    assert prices[winner.trial] == sense(prices.values())
    expected = prices[winner.trial] / 3600 * winner.measured_seconds / spec.training.global_batch_size
    assert winner.price_per_sample == pytest.approx(expected, rel=1e-3)
    assert f"{winner.price_per_sample:.3g}"[:4] in world.condition("Succeeded").message


@pytest.mark.parametrize(
    ("stated", "priced_by", "words"),
    [({}, PricedBy.NODE, "of whole nodes"), ({"pricedBy": "Device"}, PricedBy.DEVICE, "of the devices")],
)
def test_plan_pays_for_whole_nodes_unless_the_spec_says_devices(stated, priced_by: PricedBy, words: str) -> None:
    spec = spec_of(search={"planner": "Amp", "objective": "Cost"}, devices={"pricesPerHour": BY_ACCELERATOR, **stated})
    world = answered(spec)
    winner = world.status.winner
    cluster = documents.loads(world.stored[world.status.cluster_ref.config_map].data["document.json"], Cluster)
    assert cluster.priced_by is priced_by
    used = documents.parse(winner.plan, Plan).devices
    of_device = sum(PRICES[device.node] for device in used)
    of_node = sum(PRICES[node.name] * node.devices for node in cluster.nodes if node.name in {one.node for one in used})
    price = of_node if priced_by is PricedBy.NODE else of_device
    per_sample = price / 3600 * winner.measured_seconds / spec.training.global_batch_size
    assert winner.price_per_sample == pytest.approx(per_sample, rel=1e-3)
    assert f"per sample by the price {words}" in world.condition("Succeeded").message


def test_plan_fails_before_measuring_when_a_price_is_missing() -> None:
    spec = spec_of(search={"objective": "Cost"}, devices={"pricesPerHour": {"emulated-v100": 3.0}})
    world = World(spec=spec)
    world.run()
    assert world.condition("Succeeded").reason == "SpecInvalid"
    assert "no price for emulated-t4, but search.objective is Cost" in world.condition("Succeeded").message
    assert not world.jobs


@pytest.mark.parametrize("tolerance", [-0.1, 1.5])
def test_tolerance_is_at_most_half(tolerance: float) -> None:
    with pytest.raises(ValidationError, match=r"search\.tolerance"):
        spec_of(search={"tolerance": tolerance})


@pytest.mark.parametrize(("given", "tolerance"), [({}, 0.03), ({"tolerance": 0}, 0.0), ({"tolerance": 0.1}, 0.1)])
def test_tolerance_applies_to_the_planner_and_not_to_baselines(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, float], tolerance: float
) -> None:
    asked = {}

    def spied(planner: str, problem: Problem, **how: Any) -> list[Candidate]:
        asked.setdefault(planner, problem.preference.tolerance)  # what nodes are worth is asked later, without one
        return run(planner, problem, **how)

    for place in ("composition", "baselines"):
        monkeypatch.setattr(f"trainwright.answer.{place}.run", spied)
    world = World(spec=spec_of(search={"planner": "Amp", **given}), search=search_process.search)
    world.run(until=lambda: world.status.candidates_ref is not None)
    assert asked == {"amp": tolerance, "megatron": 0.0}
