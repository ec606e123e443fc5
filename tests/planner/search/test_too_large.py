"""Layers that did not fit into an accelerator's memory during profiling: no search uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trainwright import documents
from trainwright.cli import app
from trainwright.cluster import Accelerator, Cluster, Link, Node
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.profiles import LayerProfile, LayerTooLarge, Profiles
from trainwright.search import SEARCHES, Problem, SearchControl, run
from trainwright.strategy import Strategy

MODEL = Model.of(Gpt(4, 64, 4, 64, 512))
LINKS = tuple(Link(one, other, 1e-4, 1e8) for one in ("n1", "n2") for other in ("n1", "n2"))
CLUSTER = Cluster(
    (Accelerator("fast", 16 * 2**30), Accelerator("slow", 16 * 2**30)),
    (Node("n1", "fast", 2), Node("n2", "slow", 2)),
    LINKS,
)
BATCH = 8


def profiles(*too_large: LayerTooLarge) -> Profiles:
    """Return profiles as a worker reports them: too large rows, and all above, were not measured."""
    least = {(one.accelerator, one.kind, one.tensor_degree): one.rows for one in too_large}
    measured = tuple(
        LayerProfile(
            accelerator, kind.name, degree, rows,
            (0.01 * rows / degree + 0.001) * times, (0.02 * rows / degree + 0.001) * times, 0.001,
            1000 * rows, 4 * kind.parameters // degree,
        )
        for accelerator, times in (("fast", 1.0), ("slow", 2.0))
        for kind in MODEL.kinds
        for degree in ((1, 2, 4) if kind.is_tensor_parallel else (1,))
        for rows in (1, 2, 4, 8)
        if rows < least.get((accelerator, kind.name, degree), rows + 1)
    )  # fmt: skip
    return Profiles(measured, too_large=too_large)


def computed(plan: Plan) -> Iterator[tuple[str, str, int, int]]:
    """Accelerator, kind, tensor degree and rows of every layer on every device."""
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for run_ in stage.layers:
                groups = run_.strategy.tensor_groups(stage.devices)
                for group, rows in zip(groups, run_.rows, strict=True):
                    for layer in range(run_.first, run_.end):
                        kind = MODEL.kind_of(layer)
                        degree = run_.strategy.tensor if kind.is_tensor_parallel else 1
                        for device in group:
                            yield CLUSTER.accelerator_of(device).name, kind.name, degree, rows


LACKING = {
    "four rows of a block": (LayerTooLarge("slow", "block", 1, 4), LayerTooLarge("slow", "block", 2, 4)),
    "two rows of a head": (LayerTooLarge("fast", "head", 1, 2), LayerTooLarge("slow", "head", 1, 2)),
    "a whole block": (LayerTooLarge("slow", "block", 1, 1),),
    "a whole block anywhere": (LayerTooLarge("slow", "block", 1, 1), LayerTooLarge("fast", "block", 1, 1)),
}


@pytest.mark.parametrize("lacking", LACKING)
@pytest.mark.parametrize("planner", SEARCHES)
def test_no_search_makes_a_plan_with_a_layer_that_did_not_fit(planner: str, lacking: str) -> None:
    too_large = LACKING[lacking]
    problem = Problem(CLUSTER, MODEL, profiles(*too_large), BATCH)
    found = run(planner, problem, top=3, control=SearchControl.with_budget(5))
    assert found
    least = {(one.accelerator, one.kind, one.tensor_degree): one.rows for one in too_large}
    for candidate in found:
        assert candidate.estimate.feasible
        for accelerator, kind, degree, rows in computed(candidate.plan):
            assert rows < least.get((accelerator, kind, degree), rows + 1)


def plan(rows: int) -> Plan:
    devices = CLUSTER.devices
    halves = (LayerRun(0, 3, Strategy(1, 2), (rows, rows)), LayerRun(3, 3, Strategy(1, 2), (rows, rows)))
    stages = tuple(Stage(devices[2 * number : 2 * number + 2], (half,)) for number, half in enumerate(halves))
    return Plan(6, BATCH, (Pipeline(BATCH // (2 * rows), 2 * rows, stages),))


def test_given_plan_is_infeasible_from_the_failed_row_count() -> None:
    setting = Problem(CLUSTER, MODEL, profiles(LayerTooLarge("slow", "block", 1, 4)), BATCH).cost_context
    assert estimate_with_context(plan(2), setting).feasible
    refused = estimate_with_context(plan(4), setting)
    assert not refused.feasible
    assert "n2:0 (slow) lacks" in (refused.reason or "")
    assert refused.iteration_seconds == pytest.approx(
        estimate_with_context(plan(4), Problem(CLUSTER, MODEL, profiles(), BATCH).cost_context).iteration_seconds
    )


def test_estimate_is_unchanged_below_the_failed_row_count() -> None:
    plain, lacking = profiles(), profiles(LayerTooLarge("slow", "block", 1, 8))
    for rows in range(1, 8):
        assert plain.cost("slow", "block", 1, rows) == lacking.cost("slow", "block", 1, rows)
    both = replace(lacking, too_large=(*lacking.too_large, LayerTooLarge("slow", "block", 1, 4)))
    assert both.cost("slow", "block", 1, 4).activation_bytes > 2**40, "the least counts"


def test_a_kind_that_fits_nowhere_is_named_by_accelerator() -> None:
    found = profiles(LayerTooLarge("slow", "head", 1, 1), LayerTooLarge("fast", "block", 1, 1))
    assert found.accelerators_without_memory() == {"slow": "head"}
    with pytest.raises(ValueError, match="no profile of layer kind head on slow at tensor degree 1"):
        found.cost("slow", "head", 1, 1)


def test_documents_and_merging_keep_too_large_points(tmp_path: Path) -> None:
    one = profiles(LayerTooLarge("slow", "block", 1, 4))
    assert documents.loads(documents.dumps(one), Profiles) == one
    assert documents.loads(documents.dumps(profiles()), Profiles) == profiles()
    other = Profiles((), too_large=(LayerTooLarge("fast", "head", 1, 16), *one.too_large))
    assert merged(tmp_path, one, other).too_large == (*one.too_large, other.too_large[0])


def merged(folder: Path, *given: Profiles) -> Profiles:
    files = [folder / f"{number}.json" for number in range(len(given))]
    for file, document in zip(files, given, strict=True):
        file.write_text(documents.dumps(document))
    done = CliRunner().invoke(app, ["profiles", "merge", *map(str, files)])
    assert done.exit_code == 0, done.output
    return documents.loads(done.stdout, Profiles)


def test_first_merged_profile_decides_whether_a_point_fits(tmp_path: Path) -> None:
    fitted, lacking = profiles(), profiles(LayerTooLarge("slow", "block", 1, 4))
    found = merged(tmp_path, fitted, lacking)
    assert found == fitted
    assert found.cost("slow", "block", 1, 8) == fitted.cost("slow", "block", 1, 8)
    back = merged(tmp_path, lacking, fitted)
    assert back.too_large == lacking.too_large
    assert back.cost("slow", "block", 1, 4).activation_bytes > 2**40
    # An estimate has not tried whether anything fits.
    assert merged(tmp_path, replace(fitted, origin="estimated"), lacking).too_large == lacking.too_large
    elsewhere = tuple(LayerTooLarge(*where, 4) for where in (("new", "block", 1), ("slow", "block", 8)))
    assert merged(tmp_path, fitted, Profiles((), too_large=elsewhere)).too_large == elsewhere
