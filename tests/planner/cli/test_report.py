"""Reports of a plan: the timeline ends with the estimate, and its legend explains every letter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import LayerRun, Pipeline, Plan, Stage, split_rows
from trainwright.report.breakdown import breakdown_table
from trainwright.report.comparison import runner_up
from trainwright.report.explanation import Explanation
from trainwright.report.iteration_chart import Activity, Span, letters, stage_tracks, timeline
from trainwright.report.plan_summary import BATCHES, DEGREES, format_run_lengths, legend
from trainwright.report.tables import add_row, new_table, plans_table
from trainwright.search import SEARCHES, Candidate, Problem, run
from trainwright.strategy import Sharding, Strategy


@pytest.mark.parametrize("planner", list(SEARCHES))
def test_tracks_end_with_the_iteration(planner: str, make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    for candidate in run(planner, problem, top=5):
        tracks = stage_tracks(candidate.plan, problem.cost_context)
        assert len(tracks) == sum(len(pipeline.stages) for pipeline in candidate.plan.pipelines)
        end = max(span.end for track in tracks for span in track.spans)
        assert end == pytest.approx(candidate.estimate.iteration_seconds, rel=1e-6)


@pytest.mark.parametrize(("layers", "data"), [((14,), 1), ((7, 7), 1), ((4, 4, 3, 3), 2)])
def test_track_has_every_forward_and_backward_without_overlap(
    layers: tuple[int, ...], data: int, make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem()
    plan = make_plan(problem, layers, data=data)
    batches = plan.pipelines[0].micro_batches
    for track in stage_tracks(plan, problem.cost_context):
        kinds = [span.activity for span in track.spans]
        assert kinds.count(Activity.FORWARD) == kinds.count(Activity.BACKWARD) == batches
        for before, after in zip(track.spans, track.spans[1:], strict=False):
            assert after.start >= before.end - 1e-12
        busy = sum(s.end - s.start for s in track.spans if s.activity in {Activity.FORWARD, Activity.BACKWARD})
        assert busy == pytest.approx(track.busy_seconds)


def test_figures_stay_when_micro_batches_are_too_many_to_draw(
    make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem(batch=200_000)
    plan = make_plan(problem, (7, 7))
    told = Explanation.of(problem, plan, estimate_with_context(plan, problem.cost_context))
    assert not any(track.spans for track in told.tracks)
    assert "2 stages more, which are not drawn" in timeline(told.tracks, 1.0, 80).plain
    assert any("sets the pace" in sentence for sentence in told.sentences())


def _plan_of_runs(problem: Problem, *runs: tuple[int, int, Sharding]) -> Plan:
    """Return a plan of one stage on four devices, whose runs have (layers, tensor degree, sharding)."""
    found, first = [], 0
    for count, tensor, sharding in runs:
        data = 4 // tensor
        found.append(LayerRun(first, count, Strategy(tensor, data, sharding=sharding), split_rows(4, data)))
        first += count
    return Plan(first, 4, (Pipeline(1, 4, (Stage(problem.devices[:4], tuple(found)),)),))


def test_plans_whose_summaries_read_alike_are_told_layer_by_layer(make_problem: Callable[..., Problem]) -> None:
    problem = make_problem()
    none, zero = Sharding.NONE, Sharding.ZERO1
    plans = [
        _plan_of_runs(problem, (14, 1, none)),
        _plan_of_runs(problem, (1, 4, none), (13, 1, none)),
        _plan_of_runs(problem, (2, 4, none), (12, 1, none)),
        _plan_of_runs(problem, (1, 2, zero), (12, 1, none), (1, 2, none)),
        _plan_of_runs(problem, (1, 2, none), (12, 1, none), (1, 2, zero)),
    ]
    console = Console(width=60)
    with console.capture() as captured:
        console.print(plans_table(plans, problem))
    degrees = [row[6:].strip().split("  ")[0] for row in captured.get().splitlines()]
    assert degrees[2:13] == [
        "pp1 dp4 tp1",
        "pp1 1 × dp1 tp4",
        "13 × dp4 tp1",
        "pp1 2 × dp1 tp4",
        "12 × dp4 tp1",
        "pp1 1 × dp2 tp2 zero1",
        "12 × dp4 tp1",
        "1 × dp2 tp2",
        "pp1 1 × dp2 tp2",
        "12 × dp4 tp1",
        "1 × dp2 tp2 zero1",
    ]


@pytest.mark.parametrize(
    ("stages", "told"), [((2,) * 7, ""), ((1,) * 9 + (5,), "; 9×1 layers by stage: 9 stages of 1 layer")]
)
def test_legend_explains_run_lengths_where_there_are_any(
    stages: tuple[int, ...],
    told: str,
    make_problem: Callable[..., Problem],
    make_plan: Callable[..., Plan],
    make_cluster: Callable[..., Cluster],
) -> None:
    problem = make_problem(make_cluster((("fast", 12),)))
    assert legend([make_plan(problem, stages)], problem.cluster) == f"{DEGREES}; {BATCHES}{told}"


def test_chart_fits_the_terminal_and_names_the_slowest_stage(
    make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem()
    plan = make_plan(problem, (1, 1, 11, 1), data=2)
    estimate = estimate_with_context(plan, problem.cost_context)
    told = Explanation.of(problem, plan, estimate)
    assert told.bottleneck == 2
    assert told.sentences()[1].startswith("Stage 2 (11 layers on 2 × emulated-fast) sets the pace")
    for width in (80, 120):
        lines = timeline(told.tracks, estimate.iteration_seconds, width).plain.splitlines()
        assert len(lines) == 4 + 3
        assert {len(line) for line in lines[:4]} == {width}


def test_explanation_names_the_device_that_lacks_memory(
    make_problem: Callable[..., Problem], make_cluster: Callable[..., object], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem(make_cluster(memory=2**20))
    plan = make_plan(problem, (14,))
    sentences = Explanation.of(problem, plan, estimate_with_context(plan, problem.cost_context)).sentences()
    assert any("it does not fit: device node-1:0 (emulated-fast) lacks" in sentence for sentence in sentences)
    assert "Of the cluster's 8 devices, 7 are not used: 5 × emulated-fast and 2 × emulated-slow." in sentences


def test_the_fullest_device_is_that_with_the_largest_share_of_its_memory(
    make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem()
    fast, slow = problem.cluster.accelerators
    accelerators = (replace(fast, memory_bytes=2**32), replace(slow, memory_bytes=2**36))
    problem = replace(problem, cluster=replace(problem.cluster, accelerators=accelerators))
    plan = make_plan(problem, (2,) * 7)
    estimate = estimate_with_context(plan, problem.cost_context)
    limits = {device: problem.cluster.accelerator_of(device).memory_bytes for device in plan.devices}
    assert len(set(limits.values())) == 2
    fullest, _ = max(estimate.memory_by_device, key=lambda held: held[1] / limits[held[0]])
    sentences = Explanation.of(problem, plan, estimate).sentences()
    assert any(
        sentence.startswith(f"Memory: {fullest} in stage") and "is the fullest" in sentence for sentence in sentences
    )


@pytest.mark.parametrize(("seconds", "shown"), [(-2.776e-17, "0 s 0.0%"), (2e-17, "0 s 0.0%"), (1e-6, "0.001 ms 0.0%")])
def test_part_that_is_zero_up_to_rounding_is_shown_as_zero(
    make_problem: Callable[..., Problem], make_plan: Callable[..., Plan], seconds: float, shown: str
) -> None:
    problem = make_problem()
    plan = make_plan(problem, (7, 7))
    found = estimate_with_context(plan, problem.cost_context)
    rounded = replace(found, breakdown=replace(found.breakdown, gradient_sync_seconds=seconds))
    console = Console(record=True, width=100)
    console.print(breakdown_table(rounded, plan, problem))
    assert f"gradient sync {shown}" in [" ".join(line.split()) for line in console.export_text().splitlines()]


def test_letter_shows_what_fills_most_of_its_cell() -> None:
    spans = [Span(0, 1, Activity.FORWARD), Span(1, 3, Activity.BACKWARD), Span(5, 5.4, Activity.GRADIENTS)]
    assert letters(spans, 8, 8) == "FBB..g.."
    assert letters(spans, 8, 4) == "FBg."
    assert letters(spans, 8, 2) == "B" + "g"
    assert letters([], 0, 3) == "..."


@given(
    edges=st.lists(st.floats(0, 1), min_size=2, max_size=12, unique=True).map(sorted),
    cells=st.integers(1, 100),
)
def test_letters_fill_the_line_exactly(edges: list[float], cells: int) -> None:
    spans = [Span(a, b, Activity.FORWARD) for a, b in zip(edges[::2], edges[1::2], strict=False)]
    picture = letters(spans, 1.0, cells)
    assert len(picture) == cells
    assert set(picture) <= {"F", "f", "."}
    for span in spans:
        if span.end - span.start >= 2 / cells:
            assert picture[min(int((span.start + span.end) / 2 * cells), cells - 1)] == "F"


def test_long_layer_lists_are_abbreviated_with_counts() -> None:
    assert format_run_lengths([3, 3, 3, 1]) == "3 3 3 1"
    assert format_run_lengths([2] * 24 + [1]) == "24×2 1"


def test_runner_up_is_distinguished_from_the_winner(
    make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]
) -> None:
    problem = make_problem()
    plans = (make_plan(problem, (7, 7), rows=2), make_plan(problem, (7, 7)), make_plan(problem, (8, 6)))
    first, batches, layers = (Candidate(plan, estimate_with_context(plan, problem.cost_context)) for plan in plans)
    rows = problem.global_batch_size
    said = runner_up([first, batches]).sentences[0]
    assert f"with 1×{rows} (rows × micro-batches) in place of 2×{rows // 2}, takes" in said
    assert "pp2 dp1 tp1 with layers 8 6, takes" in runner_up([first, layers]).sentences[0]
    assert runner_up([first]).sentences == ()


@given(st.lists(st.integers(1, 12), min_size=4, max_size=4), st.integers(1, 60))
def test_narrow_terminal_shows_every_column_in_tables_that_repeat_the_first(widths: list[int], columns: int) -> None:
    headings, cells = ["planner", "time", "gap", "search"], ["9" * width for width in widths]
    table = new_table([(heading, "right") for heading in headings])
    add_row(table, *cells)
    console = Console(width=columns)
    with console.capture() as told:
        console.print(table, crop=False)
    parts = [part.splitlines() for part in told.get().split("\n\n")]
    for expected, line in ((headings, 0), (cells, 2)):
        shown = [part[line].split() for part in parts]
        assert [cell for _, *others in shown for cell in others] == expected[1:]
        assert {first for first, *_ in shown} == {expected[0]}
    for part in parts:
        assert len(part[0].split()) == 2 or max(map(len, part)) <= columns


def test_narrow_terminal_leaves_out_rows_without_text_and_breaks_long_names() -> None:
    table = new_table([("rank", "right"), ("degrees", "whole"), ("saves by", "left")])
    add_row(table, "1", "pp3 dp4 tp1", "zero1")
    add_row(table, "", "    dp2 tp2", "")
    console = Console(width=20)
    with console.capture() as told:
        console.print(table, crop=False)
    parts = [part.splitlines() for part in told.get().split("\n\n")]
    assert [[line.rstrip() for line in part[2:]] for part in parts] == [
        ["   1  pp3 dp4 tp1", "          dp2 tp2"],
        ["   1  zero1"],
    ]
    add_row(table, "2", "p3.8xlarge-number-1", "")
    with console.capture() as told:
        console.print(table, crop=False)
    assert max(map(len, told.get().splitlines())) <= 20
