"""Rebuilt tables of the papers: plans of AMP's appendix, models of table I, strategies under budgets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from trainwright.cost.estimate import estimate_with_context
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Schedule
from trainwright.search import Limits, assuming_process_memory, run
from trainwright.strategy import Sharding
from trainwright_papers import alpa_scaling, amp_settings, galvatron_throughput, tables
from trainwright_papers.amp_methods import with_stage_ends
from trainwright_papers.amp_settings import split_blocks_evenly, split_parameters_evenly
from trainwright_papers.galvatron_balance import blocks_per_stage
from trainwright_papers.galvatron_settings import (
    EIGHT_TITAN,
    MODELS,
    SIXTEEN_A100,
    SIXTY_FOUR_A100,
    BatchSizeSearch,
    galvatron_problem,
    samples_per_second,
)
from trainwright_papers.galvatron_strategies import BASE, BMW, DP, DP_PP, DP_TP, GALVATRON, PP, SDP, STRATEGIES, TP
from trainwright_papers.published import amp_figures, galvatron_figures

SILENT = {"report_progress": lambda _description, _share: None}


@pytest.mark.parametrize(
    "measured", amp_figures().trials, ids=lambda plan: f"{plan.table}-{plan.rows}-{len(plan.cuts)}"
)
def test_measured_plans_fit_and_use_all_sixteen_devices(measured):
    problem = amp_settings.amp_problem(measured.setting)
    plan = amp_settings.amp_plan(measured)
    assert set(plan.devices) == set(problem.cluster.devices)
    assert len(plan.devices) == 16
    assert plan.global_batch_size == problem.global_batch_size
    estimate = estimate_with_context(plan, problem.cost_context)
    # They ran, so what is assumed of a process must leave room for them.
    runtime = assuming_process_memory(problem.runtime, problem.cluster, problem.profiles.origin)
    share = 1 - Limits().leaving_unknown_memory(runtime, problem.cluster).headroom
    memory, process = problem.cost_context.memory_of_node, runtime.constant_bytes_of
    accelerator_of = problem.cost_context.accelerator_of_node
    for device, held in estimate.memory_by_device:
        assert held + process(accelerator_of[device.node]) <= share * memory[device.node]


@pytest.mark.parametrize("table", alpa_scaling.EXPERIMENTS)
def test_models_of_alpa_have_the_parameters_of_their_names(table):
    units = {"M": 1e6, "B": 1e9}
    for scaled in alpa_scaling.EXPERIMENTS[table].models():
        printed = float(scaled.name[:-1]) * units[scaled.name[-1]]
        parameters = Model.of(scaled.family, Dtype.FLOAT16).parameters
        assert parameters == pytest.approx(printed, rel=0.08), scaled.name


def test_amp_plan_cuts_between_the_same_blocks_as_amps_list():
    halves = next(plan for plan in amp_figures().trials if plan.cuts == (0, 15, 30))
    model = amp_settings.amp_problem("homogeneous").model
    assert blocks_per_stage(model, amp_settings.amp_plan(halves)) == (13, 11)  # entries 2-14 and 15-25
    quarters = next(plan for plan in amp_figures().trials if plan.cuts == (0, 12, 44, 48, 56))
    model = amp_settings.amp_problem("mixed_model").model
    assert blocks_per_stage(model, amp_settings.amp_plan(quarters)) == (
        9,
        6,
        4,
        5,
    )  # 3-11 | 12-14, 41-43 | 44-47 | 48-52
    evenly = next(plan for plan in amp_figures().trials if plan.cuts == (0, 9, 41, 47, 56))
    assert blocks_per_stage(model, amp_settings.amp_plan(evenly)) == (6, 6, 6, 6)  # Megatron's


def test_models_have_the_parameters_of_table_i():
    for name, figures in galvatron_figures().models.items():
        model = galvatron_problem(EIGHT_TITAN, name, 8, 8).model
        assert model.family == MODELS[name]
        assert model.parameters == pytest.approx(figures.parameters, rel=0.005)


def test_profiles_store_the_activation_bytes_of_table_i():
    for name, figures in galvatron_figures().models.items():
        problem = galvatron_problem(EIGHT_TITAN, name, 8, 8)
        kept = sum(
            problem.profiles.cost("NVIDIA-TITAN-RTX", kind, 1, 1).activation_bytes for kind in problem.model.layers
        )
        assert kept == pytest.approx(figures.activation_megabytes * 1e6, rel=1e-3)


def test_split_parameters_evenly_finds_the_best_of_all_cuts():
    model = amp_settings.amp_problem("mixed_model").model
    sizes = [model.kind_of(layer).parameters for layer in range(len(model.layers))]
    best = min(
        max(sum(sizes[:a]), sum(sizes[a:b]), sum(sizes[b:]))
        for a in range(1, len(sizes) - 1)
        for b in range(a + 1, len(sizes))
    )
    ends = split_parameters_evenly(model, 3)
    assert ends[-1] == len(sizes)
    assert max(sum(sizes[a:b]) for a, b in zip((0, *ends), ends, strict=False)) == best


def test_split_blocks_evenly_counts_blocks_of_every_kind():
    model = amp_settings.amp_problem("mixed_model").model
    plan = run("amp", amp_settings.amp_problem("mixed_model"), top=1)[0].plan
    stages = len(plan.pipelines[0].stages)
    held = blocks_per_stage(model, with_stage_ends(plan, split_blocks_evenly(model, stages)))
    assert sum(held) == 24
    assert max(held) - min(held) <= 1
    assert split_blocks_evenly(model, 25) is None


def test_uniform_strategies_have_the_degrees_of_their_names():
    problem = galvatron_problem(EIGHT_TITAN, "ViT-Huge-32", 16, 64)
    runs = {name: next(iter(STRATEGIES[name].plans(problem))).pipelines[0].stages for name in (DP, TP, PP, SDP)}
    assert [
        (len(stages), stages[0].layers[0].strategy.data, stages[0].layers[0].strategy.tensor)
        for stages in runs.values()
    ] == [
        (1, 8, 1),
        (1, 1, 8),
        (8, 1, 1),
        (1, 8, 1),
    ]
    assert runs[SDP][0].layers[0].strategy.sharding is Sharding.ZERO3


def test_searched_strategies_stay_inside_their_space():
    problem = galvatron_problem(EIGHT_TITAN, "ViT-Huge-32", 12, 32)
    found = {name: STRATEGIES[name].best(problem).plan for name in (DP_TP, DP_PP, GALVATRON, BASE)}
    runs = {name: [run for stage in plan.pipelines[0].stages for run in stage.layers] for name, plan in found.items()}
    assert len(found[DP_TP].pipelines[0].stages) == 1
    assert all(run.strategy.tensor == 1 for run in runs[DP_PP])
    assert all(
        run.strategy.sharding is Sharding.NONE and not run.strategy.recompute
        for name in (DP_TP, DP_PP)
        for run in runs[name]
    )
    assert not any(run.strategy.recompute for run in runs[GALVATRON])
    assert all(plan.schedule is Schedule.GPIPE for plan in found.values())


def test_larger_batches_fit_when_layers_are_recomputed():
    problem = galvatron_problem(EIGHT_TITAN, "BERT-Huge-32", 12, 64)
    assert STRATEGIES[GALVATRON].best(problem) is None
    best = STRATEGIES[BASE].best(problem)
    assert best.estimate.feasible
    assert any(run.strategy.recompute for stage in best.plan.pipelines[0].stages for run in stage.layers)


def test_xhuge_model_fits_on_64_devices_only_when_it_is_divided():
    fewest = galvatron_problem(SIXTY_FOUR_A100, "BERT-xHuge", 16, STRATEGIES[DP].min_batch(64))
    assert fewest.global_batch_size == 64
    assert [STRATEGIES[name].best(fewest) for name in (DP, SDP)] == [None, None]
    assert STRATEGIES[PP].best(galvatron_problem(SIXTY_FOUR_A100, "BERT-xHuge", 16, 16)).estimate.feasible


class _FakeThroughput:
    """Evaluates batch sizes up to `most` with a throughput given by `rate`."""

    def __init__(self, rate, most):
        self.rate, self.most = rate, most
        problem = galvatron_problem(EIGHT_TITAN, "ViT-Huge-32", 16, 8)
        self.like = STRATEGIES[SDP].best(problem)
        self.asked = []

    def __call__(self, batch):
        self.asked.append(batch)
        if batch > self.most:
            return None
        plan = replace(self.like.plan, global_batch_size=batch, pipelines=_with_batch(self.like.plan, batch))
        seconds = batch / self.rate(batch)
        return replace(self.like, plan=plan, estimate=replace(self.like.estimate, iteration_seconds=seconds))


def _with_batch(plan, batch):
    return tuple(replace(pipeline, micro_batches=batch // pipeline.micro_batch_size) for pipeline in plan.pipelines)


@pytest.mark.parametrize("most", [0, 8, 40, 104, 5000])
def test_batch_size_search_finds_the_largest_fitting_batch_when_throughput_grows(most):
    rates = _FakeThroughput(lambda batch: batch**0.5, most)
    best = BatchSizeSearch(growth=2, bisections=9).best(rates)
    if most < 8:
        assert best is None
    else:
        assert best.plan.global_batch_size == min(most, 1024)


def test_batch_size_search_stops_when_a_larger_batch_is_no_faster():
    rates = _FakeThroughput(lambda batch: min(batch, 32.0), 1000)
    best = BatchSizeSearch().best(rates)
    assert best.plan.global_batch_size == 32
    assert samples_per_second(best) == pytest.approx(32)
    assert max(rates.asked) == 64


@pytest.fixture(scope="module")
def one_column():
    """Table III's A100s with one model and one budget."""
    figures = galvatron_figures().sixteen_a100
    cells = {name: cells[2:3] for name, cells in figures.budgets[8].items()}
    small = replace(figures, models=("ViT-Huge-32",), budgets={8: cells})
    return galvatron_throughput.throughput_table("galvatron-3", {SIXTEEN_A100: small}, **SILENT)


def test_column_has_a_prediction_for_each_published_figure(one_column):
    assert len(one_column.records) == 11
    by_strategy = {record["strategy"]: record for record in one_column.records}
    assert by_strategy[BMW]["published_samples_per_second"] == 697.34
    assert by_strategy[BMW]["published_batch"] == 1152
    predicted = {name: record["predicted_samples_per_second"] or 0.0 for name, record in by_strategy.items()}
    assert predicted[BMW] == max(predicted.values())  # it includes all others
    assert by_strategy[DP]["predicted_out_of_memory"]
    total = one_column.agreement[f"{SIXTEEN_A100.title}, all columns"]
    assert total["cells"] == 11
    assert one_column.grids[0].headings[:3] == ("strategy", "ViT-32", "ours")


def test_comparison_document_is_valid_json(one_column):
    document = json.loads(json.dumps(one_column.document(), allow_nan=False))
    assert document["origin"] == "estimated"
    assert {"table", "title", "agreement", "records", "notes"} <= set(document)
    assert document["records"][0]["plan"] is None or isinstance(document["records"][0]["plan"], str)


def test_progress_never_goes_back():
    shares = []
    comparison = tables.TABLES["amp-3"](report_progress=lambda description, share: shares.append((description, share)))
    assert comparison.name == "amp-3"
    assert [share for _, share in shares] == sorted(share for _, share in shares)
    assert all(0 <= share < 1 for _, share in shares)
