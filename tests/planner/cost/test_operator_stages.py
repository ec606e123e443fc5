"""Stages with shardings of operators cost what Alpa's integer program adds up, and the exact replay takes it as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.operators.meshes import mesh_of
from trainwright.cost.operators.stage_costs import operator_stage_costs
from trainwright.families import T5, Bert, Family, Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.operator_shardings import OperatorSpecs, SpanSpecs
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.report.explanation import Explanation
from trainwright.runtime import Runtime
from trainwright.search import Problem
from trainwright.search.alpa.intra import IntraOperator, Rewriting, SpanCosts
from trainwright.search.candidates import candidate_of
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.plan_variants import fastest_variant
from trainwright.search.preference.candidate_order import with_even_rows
from trainwright.search.preference.plan_adaptation import adapt_plan
from trainwright.strategy import Strategy

BATCH, LAYERS = 32, 6
FAMILIES = {
    "gpt": Gpt(4, 1024, 16, 512, 51200),
    "llama": Llama(4, 1024, 16, 512, 32000, key_value_heads=4),
    "t5": T5(1, 1024, 16, 512, 32128, decoder_layers=2, decoder_sequence_length=128, gated=True),
}


@lru_cache(maxsize=8)
def problem(family: Family, dtype: Dtype = Dtype.FLOAT16) -> Problem:
    model, cluster = Model.of(family, dtype), cluster_of({"p3.8xlarge": 2})
    names = [accelerator.name for accelerator in cluster.accelerators]
    profiles = estimate_profiles(model, names, tensor_degrees=[1, 2], rows=[1, 2, 4, 8])
    return Problem(cluster, model, profiles, BATCH)


def stage_of(of: Problem, specs: SpanSpecs, rows: int, devices: slice = slice(None)) -> Stage:
    """Return the stage with degrees that share the rows as far as they go."""
    some = of.cluster.devices[devices]
    data = int(np.gcd(rows, len(some)))
    run = LayerRun(specs.first, specs.end - specs.first, Strategy(len(some) // data, data), split_rows(rows, data))
    return Stage(some, (run,), specs)


def options_of(of: Problem, shape: tuple[int, int], rows: int, **others: Any) -> Iterator[SpanCosts]:
    mesh = mesh_of(tuple(device.node for device in of.cluster.devices), shape, of.cost_context)
    yield from IntraOperator(of, **others).options(mesh, rows)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("shape", "rows", "others"),
    [
        ((2, 4), 1, {}),
        ((2, 4), 8, {}),
        ((1, 8), 8, {}),
        ((4, 2), 8, {"divides_sequences": True}),
        ((2, 4), 4, {"rewriting": Rewriting(gradients=False)}),
        ((2, 4), 4, {"rewriting": Rewriting(activations=True)}),
    ],
)
def test_shardings_in_a_plan_cost_what_the_search_says(
    name: str, shape: tuple[int, int], rows: int, others: dict[str, Any]
) -> None:
    of = problem(FAMILIES[name], Dtype.FLOAT32)
    for costs in options_of(of, shape, rows, **others):
        for first, end in ((0, LAYERS), (1, 4), (3, LAYERS)):
            if np.isfinite(costs.seconds[first, end]):
                given = operator_stage_costs(stage_of(of, costs.sharding(first, end).specs, rows), of.cost_context)
                total = given.total
                assert total.seconds == pytest.approx(costs.seconds[first, end], rel=1e-9)
                assert total.iteration_seconds == pytest.approx(costs.iteration_seconds[first, end], rel=1e-9)
                assert total.state_bytes == pytest.approx(costs.state_bytes[first, end], rel=1e-9)
                assert total.activation_bytes == pytest.approx(costs.activation_bytes[first, end], rel=1e-9)
                # A tied weight whose layers divide it differently has two parts, of which the program counts one.
                assert given.state.total >= total.state_bytes * (1 - 1e-9)
                if (first, end) == (0, LAYERS):  # inside the pipeline boundaries are converted, too
                    assert given.forward.seconds + given.backward.seconds <= total.seconds * (1 + 1e-9)
                assert given.update_seconds > 0


UNTIED = replace(FAMILIES["gpt"], tied_embeddings=False)


def whole_plan(of: Problem, specs: SpanSpecs, rows: int, **strategy: Any) -> Plan:
    """Return the plan of one stage, whose layer runs have some fields of their strategies changed."""
    stage = stage_of(of, specs, rows)
    stage = replace(stage, layers=tuple(run.with_strategy(**strategy) for run in stage.layers))
    return Plan(LAYERS, BATCH, (Pipeline(BATCH // rows, rows, (stage,)),))


def test_iteration_is_that_of_the_integer_program_when_overlap_hides_nothing() -> None:
    """One stage without neighbours: its micro-batches one after the other, then its reductions and its update."""
    of, rows = replace(problem(UNTIED), runtime=Runtime(overlap_slowdown_ratio=2.0)), 8
    costs = next(options_of(of, (2, 4), rows))
    plan = whole_plan(of, costs.sharding(0, LAYERS).specs, rows)
    estimate = estimate_with_context(plan, of.cost_context)
    seconds = BATCH // rows * costs.seconds[0, LAYERS] + costs.iteration_seconds[0, LAYERS]
    assert estimate.iteration_seconds == pytest.approx(seconds, rel=1e-9)
    (memory,) = set(estimate.memory_parts)
    held = memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.activations_bytes
    assert held == pytest.approx(costs.state_bytes[0, LAYERS] + costs.activation_bytes[0, LAYERS], rel=1e-6)


def test_backward_hides_reductions_and_next_gathers_when_it_computes() -> None:
    of, rows = problem(UNTIED), 8
    specs = next(options_of(of, (8, 1), rows)).sharding(0, LAYERS).specs
    plan = whole_plan(of, specs, rows)
    usual, nothing = (
        estimate_with_context(plan, replace(of, runtime=Runtime(overlap_slowdown_ratio=ratio)).cost_context)
        for ratio in (1.0, 2.0)
    )
    costs = operator_stage_costs(plan.stages[0], of.cost_context)
    hidden = nothing.iteration_seconds - usual.iteration_seconds
    assert 0 < hidden <= costs.weights.reduce_seconds
    assert usual.breakdown.gradient_sync_seconds == pytest.approx(nothing.breakdown.gradient_sync_seconds - hidden)


def test_recomputed_layers_compute_twice_and_keep_their_inputs() -> None:
    of, rows = problem(UNTIED), 8
    specs = next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs
    plain, again = (
        operator_stage_costs(whole_plan(of, specs, rows, recompute=recompute).stages[0], of.cost_context)
        for recompute in (False, True)
    )
    assert again.forward == plain.forward
    for name in ("compute_seconds", "sync_seconds", "redistribution_seconds"):
        added = getattr(again.backward, name) - getattr(plain.backward, name)
        assert added == pytest.approx(getattr(plain.forward, name))
    assert (again.weights, again.shared) == (plain.weights, plain.shared)
    assert plain.activations.once == 0
    boundaries = (LAYERS - 1) * rows * of.cost_context.row_bytes[1]
    assert boundaries / 8 <= again.activations.per_micro_batch <= boundaries
    assert 0 < again.activations.once < plain.activations.per_micro_batch


def test_tied_weight_counts_once_when_its_layers_hold_the_same_part() -> None:
    of, rows = problem(FAMILIES["gpt"]), 1
    specs = next(options_of(of, (8, 1), rows)).sharding(0, LAYERS).specs
    alike = changed(specs, 0, "tokens", algorithm="entries→0", weight="S0 R")  # as the head divides its products
    given = operator_stage_costs(stage_of(of, alike, rows), of.cost_context)
    values = FAMILIES["gpt"].vocabulary_size * FAMILIES["gpt"].hidden_size
    assert given.shared.state.weights == pytest.approx(2 * values / 8)
    assert given.shared.reduce_seconds == 0
    assert given.state.total == pytest.approx(given.total.state_bytes)


def test_tied_weight_is_summed_whole_when_its_layers_hold_different_parts() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    specs = next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs
    parts = {each.name: each.weight for _, each in specs.operators() if each.name in {"tokens", "projection"}}
    assert parts["tokens"] != parts["projection"]
    nodes = tuple(device.node for device in of.cluster.devices)
    values = FAMILIES["gpt"].vocabulary_size * FAMILIES["gpt"].hidden_size
    ring = of.cost_context.collectives.all_reduce((nodes,))
    given = operator_stage_costs(stage_of(of, specs, rows), of.cost_context)
    assert given.shared.reduce_seconds > 0.5 * ring.seconds(values * of.cost_context.gradient_dtype.num_bytes)


def test_stages_with_and_without_shardings_make_one_pipeline() -> None:
    of, rows = problem(FAMILIES["gpt"]), 4
    mesh = mesh_of(tuple(device.node for device in of.cluster.devices[:4]), (2, 2), of.cost_context)
    specs = IntraOperator(of).spans(mesh, rows).sharding(0, 3).specs
    plain = Stage(of.cluster.devices[4:], (LayerRun(3, 3, Strategy(2, 2), (2, 2)),))
    stages = (stage_of(of, specs, rows, slice(0, 4)), plain)
    plan = Plan(LAYERS, BATCH, (Pipeline(BATCH // rows, rows, stages),))
    estimate = estimate_with_context(plan, of.cost_context)
    degrees = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(replace(stages[0], operators=None), plain)),))
    other = estimate_with_context(degrees, of.cost_context)
    assert estimate.memory_by_device[4:] == other.memory_by_device[4:]
    assert estimate.iteration_seconds != other.iteration_seconds
    assert estimate.iteration_seconds > BATCH // rows * operator_stage_costs(stages[0], of.cost_context).forward.seconds


def test_pipelines_reduce_gradients_over_equal_meshes() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    mesh = mesh_of(tuple(device.node for device in of.cluster.devices[:4]), (2, 2), of.cost_context)
    specs = IntraOperator(of).spans(mesh, rows).sharding(0, LAYERS).specs
    first, second = (stage_of(of, specs, rows, devices) for devices in (slice(0, 4), slice(4, 8)))
    pipelines = [Pipeline(2, rows, (stage,)) for stage in (first, second)]
    one = estimate_with_context(Plan(LAYERS, 2 * rows, (pipelines[0],)), of.cost_context)
    two = estimate_with_context(Plan(LAYERS, 4 * rows, tuple(pipelines)), of.cost_context)
    costs = operator_stage_costs(first, of.cost_context)
    values = costs.weights.updated_values + costs.shared.updated_values
    rings = tuple(zip(*([device.node for device in stage.devices] for stage in (first, second)), strict=True))
    num_bytes = values * of.cost_context.gradient_dtype.num_bytes
    added = of.cost_context.collectives.all_reduce(rings).seconds(num_bytes)
    assert two.iteration_seconds == pytest.approx(one.iteration_seconds + added, rel=1e-9)
    assert [memory for _, memory in two.memory_by_device] == 2 * [memory for _, memory in one.memory_by_device]
    embedding = 51200 * 1024  # whose two layers have different parts
    assert values == pytest.approx((of.model.parameters + embedding) / 4, rel=0.01)


def test_pipelines_with_other_meshes_have_no_cost() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    stages = []
    for shape, devices in (((2, 2), slice(0, 4)), ((1, 4), slice(4, 8))):
        mesh = mesh_of(tuple(device.node for device in of.cluster.devices[devices]), shape, of.cost_context)
        stages.append(stage_of(of, IntraOperator(of).spans(mesh, rows).sharding(0, LAYERS).specs, rows, devices))
    plan = Plan(LAYERS, 4 * rows, tuple(Pipeline(2, rows, (stage,)) for stage in stages))
    with pytest.raises(
        ValueError, match="stage 0: operators: expected those of pipeline 0 in every pipeline, got others in"
    ):
        estimate_with_context(plan, of.cost_context)


def changed(specs: SpanSpecs, layer: int, operator: str, **changes: Any) -> SpanSpecs:
    def of(each: OperatorSpecs) -> OperatorSpecs:
        return replace(each, **changes) if each.name == operator else each

    layers = [replace(each, layer=number, count=1) for number, each in specs.each_layer()]
    own = layers[layer - specs.first]
    layers[layer - specs.first] = replace(own, operators=tuple(map(of, own.operators)))
    return replace(specs, layers=tuple(layers))


@pytest.mark.parametrize(
    ("layer", "operator", "changes", "message"),
    [
        (2, "attention", {"algorithm": "heads→01"}, None),
        (
            2,
            "attention",
            {"algorithm": "in→0"},
            "layer 2, operator attention: a mesh of 2 × 4 cannot shard it in→0; its loops",
        ),
        (2, "attention", {"algorithm": "batch→01"}, None),
        (2, "activation", {"algorithm": "batch→0"}, "layer 2, operator activation: "),
        (
            2,
            "feed_forward_in",
            {"weight": "S0 S1"},
            "layer 2, operator feed_forward_in: weight: expected .*, got S0 S1",
        ),
        (2, "feed_forward_in", {"name": "other"}, "layer 2: operators: expected .*, got "),
    ],
)
def test_shardings_that_contradict_the_model_are_refused_by_layer_and_operator(
    layer: int, operator: str, changes: dict[str, Any], message: str | None
) -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    specs = next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs
    wrong = changed(specs, layer, operator, **changes)
    with pytest.raises(ValueError, match=message or f"layer {layer}, operator {operator}: "):
        operator_stage_costs(stage_of(of, wrong, rows), of.cost_context)


def test_kind_of_another_layer_is_refused() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    specs = next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs
    wrong = replace(specs, layers=(replace(specs.layers[0], kind="head"), *specs.layers[1:]))
    with pytest.raises(ValueError, match="layer 0: operators: expected those of kind embedding, got head"):
        operator_stage_costs(stage_of(of, wrong, rows), of.cost_context)
    *others, block, _ = specs.layers
    wrong = replace(specs, layers=(*others, replace(block, count=block.count + 1)))
    with pytest.raises(ValueError, match=f"layer {LAYERS - 1}: operators: expected those of kind head, got block"):
        operator_stage_costs(stage_of(of, wrong, rows), of.cost_context)


def test_searches_change_no_stage_with_shardings() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    stage = stage_of(of, next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs, rows)
    plan = Plan(LAYERS, BATCH, (Pipeline(BATCH // rows, rows, (stage,)),))
    found = candidate_of(of, plan)
    assert fastest_variant(found, of) is found
    assert with_runtime_choices(plan, of.cost_context) is plan
    assert with_even_rows(plan) is plan


def test_running_plan_keeps_its_shardings_on_its_devices_and_in_equal_pipelines() -> None:
    of, rows = problem(FAMILIES["gpt"]), 4
    mesh = mesh_of(tuple(device.node for device in of.cluster.devices[:4]), (2, 2), of.cost_context)
    specs = IntraOperator(of).spans(mesh, rows).sharding(0, LAYERS).specs
    plan = Plan(LAYERS, BATCH, (Pipeline(BATCH // rows, rows, (stage_of(of, specs, rows, slice(0, 4)),)),))
    kept, *others = adapt_plan(plan, of)
    assert kept == plan
    assert {other.has_operators for other in others} == {True, False}  # on the free devices, too
    assert all(len(other.pipelines) == 2 for other in others if other.has_operators)


def test_explanation_names_the_meshes() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    stage = stage_of(of, next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs, rows)
    plan = Plan(LAYERS, BATCH, (Pipeline(BATCH // rows, rows, (stage,)),))
    sentences = Explanation.of(of, plan, candidate_of(of, plan).estimate).sentences()
    assert (
        "Operators have shardings of their own (stage 0 on a mesh of 2 × 4); the degrees come nearest to them."
        in sentences
    )


def test_plans_whose_degrees_say_what_has_no_cost_are_refused() -> None:
    of, rows = problem(FAMILIES["gpt"]), 8
    specs = next(options_of(of, (2, 4), rows)).sharding(0, LAYERS).specs
    with pytest.raises(ValueError, match=r"stage 0, layers 0…5: sequence parallelism .* are of degrees"):
        estimate_with_context(whole_plan(of, specs, rows, sequence_parallel=True), of.cost_context)


@pytest.mark.parametrize(
    ("family", "layer", "operator"),
    [
        (Bert(2, 256, 4, 64, 32), -1, "projection"),  # whose transform is larger than the table of so few entries
        (T5(1, 256, 4, 64, 512, gated=True, tied_embeddings=False), 1, "position_biases"),
    ],
)
def test_tied_weight_is_that_of_its_size_when_others_are_larger(family: Family, layer: int, operator: str) -> None:
    of = problem(family)
    mesh = mesh_of(tuple(device.node for device in of.cluster.devices), (2, 4), of.cost_context)
    pricing, kind = IntraOperator(of).pricing(layer, mesh, 8), of.model.kind(of.model.layers[layer])
    index = pricing.operator_with_weight(kind.shared_parameters)
    assert index is not None
    assert pricing.algorithms.graph.operations[index].name == operator
