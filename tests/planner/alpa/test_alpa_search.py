"""The search `alpa`: whole answers on equal and unequal devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright.accelerators import cluster_of, estimate_profiles
from trainwright.cli import app
from trainwright.cluster import Cluster
from trainwright.documents import dumps, parse
from trainwright.exports import Capabilities
from trainwright.families import (
    T5,
    Bert,
    Custom,
    CustomKind,
    CustomProduct,
    Family,
    Gpt,
    Moe,
    TransGan,
    Vit,
    WideResnet,
)
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.operator_shardings import SpanSpecs
from trainwright.plan import Plan, Stage
from trainwright.search import SEARCHES, Limits, NoFeasiblePlan, Problem, Search, SearchControl, run
from trainwright.search.alpa.search import alpa, alpa_of_degrees, brief_alpa
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.strategy import Sharding
from trainwright.training import RequestedDtype, Training
from trainwright.worker_api.operator_support import operators_refusal

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]


def sheet_problem(family: Family, machines: dict[str, int], batch: int, dtype: Dtype = Dtype.FLOAT16) -> Problem:
    """Problem on machines by name, with estimated profiles."""
    model, cluster = Model.of(family, dtype), cluster_of(machines)
    tensors = [degree for degree in (1, 2, 4, 8) if model.max_tensor_degree % degree == 0]
    names = [accelerator.name for accelerator in cluster.accelerators]
    profiles = estimate_profiles(model, names, tensor_degrees=tensors, rows=(1, 2, 4, 8))
    return Problem(cluster, model, profiles, batch)


def stages_of(plan: Plan) -> tuple[Stage, ...]:
    (pipeline,) = plan.pipelines
    return pipeline.stages


def test_alpa_is_registered() -> None:
    assert "alpa" in SEARCHES


def test_alpa_is_no_worse_than_megatron_on_equal_devices(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    for between, memory in ((5e6, None), (1e8, None), (5e6, 24 * 2**20)):
        problem = make_problem(make_cluster((("fast", 4),) * 2, between=between, memory=memory), layers=10)
        best, baseline = (run(name, problem, top=1)[0].estimate.iteration_seconds for name in ("alpa", "megatron"))
        assert best <= baseline * (1 + 1e-9)


def test_brief_search_stops_when_larger_micro_batches_stop_helping(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = make_problem(make_cluster((("fast", 4),) * 2, between=5e6), layers=8, batch=32)
    bests: dict[Search, list[float | None]] = {alpa_of_degrees: [], brief_alpa: []}
    answers = {
        search: search(problem, SearchControl(report=lambda one, into=into: into.append(one.best_seconds)), None)
        for search, into in bests.items()
    }
    whole, brief = bests.values()
    assert brief[:-1] == whole[: len(brief) - 1]
    assert all(one is None or behind < one for one, behind in pairwise(brief[:-1]))
    assert answers[brief_alpa][0].estimate.iteration_seconds == brief[-1]
    assert len(brief) < len(whole)


def test_slow_devices_get_fewer_layers(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2)), between=5e6), layers=12, batch=32)
    plan = run("alpa", problem)[0].plan
    layers = {"node-1": 0, "node-2": 0}
    for stage in stages_of(plan):
        (node,) = {device.node for device in stage.devices}
        layers[node] += stage.end - stage.first
    assert layers["node-2"] < layers["node-1"]
    assert run("alpa", problem)[0].estimate.iteration_seconds < run("megatron", problem)[0].estimate.iteration_seconds


def test_stages_may_differ_in_their_devices(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    problem = make_problem(make_cluster((("fast", 4),) * 2), layers=7, batch=16)
    sizes = [tuple(len(stage.devices) for stage in stages_of(one.plan)) for one in run("alpa", problem)]
    assert any(len(set(some)) > 1 for some in sizes)
    assert all(sum(some) == 8 for some in sizes)


def test_device_types_stay_apart_unless_mixed_by_whole_nodes(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("slow", 2), ("fast", 2))), layers=6)
    mixed = 0
    for candidate in run("alpa", problem):
        for stage in stages_of(candidate.plan):
            nodes = {device.node for device in stage.devices}
            if "node-2" in nodes and len(nodes) > 1:
                mixed += 1
                assert sum(device.node == "node-2" for device in stage.devices) == 2
    only = replace(problem, limits=replace(problem.limits, max_pipeline_degree=1))
    assert all(len(stages_of(one.plan)) == 1 for one in run("alpa", only))


def test_scarce_memory_leads_to_sharding_recompute_or_more_stages() -> None:
    family = Gpt(8, 1024, 16, 512, 8000)
    roomy = sheet_problem(family, {"p3.8xlarge": 1}, 64, Dtype.FLOAT32)
    needed = run("alpa", roomy)[0].estimate.peak_memory_bytes
    accelerators = tuple(replace(one, memory_bytes=int(0.5 * needed)) for one in roomy.cluster.accelerators)
    tight = replace(roomy, cluster=replace(roomy.cluster, accelerators=accelerators))
    best = run("alpa", tight)[0]
    assert best.estimate.peak_memory_bytes <= 0.5 * needed
    assert best.estimate.iteration_seconds >= run("alpa", roomy)[0].estimate.iteration_seconds


def test_weight_update_is_sharded_when_there_are_replicas(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    """The paper achieves this by rewriting all-reduces (§4.2)."""
    problem = make_problem(make_cluster((("fast", 4),)), layers=6)
    for candidate in alpa_of_degrees(problem, SearchControl(), None):
        for stage in stages_of(candidate.plan):
            for layers in stage.layers:
                assert candidate.operators or (layers.strategy.data > 1) == (
                    layers.strategy.sharding is not Sharding.NONE
                )


def test_models_with_more_layers_than_clusters_are_cut_between_clusters(
    make_problem: MakeProblem, make_cluster: MakeCluster
) -> None:
    problem = make_problem(make_cluster((("fast", 2), ("fast", 2))), layers=90, batch=4, hidden=32)
    best = run("alpa", problem)[0]
    assert stages_of(best.plan)[-1].end == 92
    assert best.estimate.iteration_seconds <= 1.1 * run("amp", problem, top=1)[0].estimate.iteration_seconds


FAMILIES: tuple[tuple[Family, Dtype], ...] = (
    (Moe(4, 512, 8, 256, 4000, experts=8, experts_per_token=2, expert_every=2), Dtype.FLOAT16),
    (WideResnet(50, 2), Dtype.FLOAT32),
    (T5(2, 512, 8, 256, 4000), Dtype.FLOAT16),
)


@pytest.mark.parametrize(("family", "dtype"), FAMILIES, ids=["moe", "wide_resnet", "t5"])
def test_families_are_planned_on_unequal_machines(family: Family, dtype: Dtype) -> None:
    problem = sheet_problem(family, {"p3.8xlarge": 1, "g4dn.12xlarge": 1}, 8, dtype)
    candidates = run("alpa", problem)
    assert all(one.estimate.feasible for one in candidates)
    assert all(sorted(one.plan.devices) == sorted(problem.devices) for one in candidates)


PRODUCTS = (
    CustomProduct("matmul", 64, 2.0**20, 4_096, 4_096, calls=4),
    CustomProduct("convolution", 64, 2.0**20, 4_096, 4_096),
    CustomProduct("attention", 64, 2.0**20, 12_288, 4_096, is_causal=True),
    CustomProduct("batched_matmul", 64, 2.0**19, 8_192, 4_096, calls=2),
)


@pytest.mark.parametrize("planner", ["alpa", "auto"])
@pytest.mark.parametrize("products", [(), PRODUCTS])
def test_custom_model_may_begin_without_a_matmul(planner: str, products: tuple[CustomProduct, ...]) -> None:
    kinds = (
        CustomKind("Embedding", 36_864, 0, 4_096, 0, 512),
        CustomKind("Block", 49_984, 7_340_032, 4_096, 73_984, products=products),
        CustomKind("Head", 520, 1_024, 1, 4_168, 8),
    )
    family = Custom("encoder:encoder", kinds, ("Embedding", "Block", "Block", "Block", "Block", "Head"))
    best = run(planner, sheet_problem(family, {"p3.8xlarge": 1}, 16))[0]
    assert {part.strategy.tensor for stage in stages_of(best.plan) for part in stage.layers} == {1}


NOT_RUN = TransGan((5, 4, 4), 1024, bottom_width=16, fused_gelu=False)
"""Model whose shardings of operators the worker does not run."""


def test_candidates_carry_the_operator_shardings_of_their_stages() -> None:
    problem = sheet_problem(NOT_RUN, {"p3.8xlarge": 1}, 32)
    given = [one for one in run("alpa", problem) if one.operators]
    assert given
    for candidate in given:
        stages = stages_of(candidate.plan)
        assert len(candidate.operators) == len(stages)
        for stage, specs in zip(stages, candidate.operators, strict=True):
            if specs is not None:
                assert isinstance(specs, SpanSpecs)
                assert (specs.first, specs.end) == (stage.first, stage.end)
                assert len(stage.devices) == specs.mesh_shape[0] * specs.mesh_shape[1]
                assert '"algorithm"' in dumps(specs)


GPT = Gpt(4, 1024, 16, 512, 51200)


@pytest.mark.parametrize(
    "family",
    [GPT, Bert(4, 1024, 16, 512), Vit(12, 768, 12), FAMILIES[2][0], Moe(4, 1024, 16, 512, 4000)],
    ids=lambda family: str(family.family),
)
def test_plans_hold_shardings_that_the_worker_runs_and_their_degrees_are_candidates_too(family: Family) -> None:
    problem = sheet_problem(family, {"p3.8xlarge": 1}, 16)
    candidates = alpa(problem, SearchControl(), None)
    plans = [candidate.plan for candidate in candidates]
    sharded = [plan for plan in plans if plan.has_operators]
    assert sharded
    assert not any(candidate.operators for candidate in candidates)
    degrees = {with_runtime_choices(plan.without_operators, problem.cost_context) for plan in sharded}
    assert degrees <= {with_runtime_choices(plan, problem.cost_context) for plan in plans}
    assert all(operators_refusal(plan, problem.model) is None for plan in sharded)


@pytest.mark.parametrize("planner", [alpa_of_degrees, brief_alpa])
def test_alpa_within_auto_has_plans_of_degrees_alone(planner: Search) -> None:
    problem = sheet_problem(GPT, {"p3.8xlarge": 1}, 16)
    assert not any(one.plan.has_operators for one in planner(problem, SearchControl(), None))


@pytest.mark.parametrize("limits", [Limits(max_tensor_degree=2), Limits(expressible_by=Capabilities(every_plan=True))])
def test_limits_leave_no_shardings_of_operators(limits: Limits) -> None:
    problem = replace(sheet_problem(GPT, {"p3.8xlarge": 1}, 16), limits=limits)
    whole = len(problem.devices)
    for candidate in alpa(problem, SearchControl(), None):
        assert all(stage.operators is None or len(stage.devices) < whole for stage in candidate.plan.stages)
        assert limits.allows_plan(candidate.plan)


@pytest.mark.parametrize("top", [2, 3])
def test_first_candidates_are_of_both_sorts(top: int) -> None:
    given = run("alpa", sheet_problem(GPT, {"p3.8xlarge": 1}, 16), top=top)
    assert {one.plan.has_operators for one in given} == {True, False}
    assert len(given) == top


def test_closest_plan_is_reported_when_nothing_fits(make_problem: MakeProblem, make_cluster: MakeCluster) -> None:
    with pytest.raises(NoFeasiblePlan, match=r"no plan fits into memory; the closest is pp.*lacks .* MiB"):
        run("alpa", make_problem(make_cluster(memory=2**20)))
    with pytest.raises(NoFeasiblePlan, match="no plan uses all 7 devices with 4 layers, a global batch of 3 rows"):
        run("alpa", make_problem(make_cluster((("fast", 7),)), layers=2, batch=3))


def test_the_command_line_plans_with_it_and_exports_the_operators(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(dumps(cluster_of({"p3.8xlarge": 1})))
    (tmp_path / "model.yaml").write_text(dumps(Training(32, trans_gan=NOT_RUN, dtype=RequestedDtype.FLOAT16)))  # type: ignore[arg-type]
    inputs = ["--cluster", str(tmp_path / "cluster.yaml"), "--model", str(tmp_path / "model.yaml")]
    result = CliRunner().invoke(app, ["plan", *inputs, "--planner", "alpa", "--top", "50", "--output", "json"])
    assert result.exit_code == 0, result.output
    candidates = json.loads(result.stdout)["candidates"]
    assert [one["rank"] for one in candidates] == list(range(1, len(candidates) + 1))
    given = [one for one in candidates if "operators" in one]
    assert given
    specs = [specs for one in given for specs in one["operators"] if specs is not None]
    assert all(one["document"] == "SpanSpecs" for one in specs)
    assert parse(specs[0], SpanSpecs).layers
