"""Layers that do not fit into an accelerator's memory: a result of profiling, which the search respects."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from flow_reports import report_of
from flow_world import World, node, spec_of

from trainwright import documents
from trainwright.plan import Plan
from trainwright.profiles import LayerTooLarge, Profiles
from trainwright.runtime import ProcessBytes, Runtime
from trainwright.worker_api import ProfilingReport, ProfilingTask

BOTH = (node("n1"), node("n2", "emulated-t4"))


def world_lacking(*lacking: LayerTooLarge, nodes=BOTH) -> World:
    """Return a world whose workers report that these layers, from these rows on, exceed a device's memory."""

    def report(order):
        found = report_of(order)
        if not isinstance(order, ProfilingTask):
            return found
        here = [
            one
            for one in lacking
            if one.accelerator == order.gang.nodes[0].accelerator and one.tensor_degree == order.tensor_degree
        ]
        rows = {one.kind: one.rows for one in here}
        kept = (layer for layer in found.layers if layer.rows < rows.get(layer.kind, layer.rows + 1))
        return ProfilingReport(tuple(kept), tuple(here))

    trials = {"topK": 2}
    return World(spec=spec_of(search={"planner": "Amp"}, trials=trials), nodes=nodes, report=report)


def on_t4(kind: str, rows: int, degree: int = 1) -> LayerTooLarge:
    return LayerTooLarge("emulated-t4", kind, degree, rows)


def plans_of(world: World) -> list[Plan]:
    text = world.stored[world.status.candidates_ref.config_map].data["document.json"]
    candidates = json.loads(text)["trials"]
    return [documents.parse(trial["plan"], Plan) for trial in candidates]


def test_too_large_layers_are_stored_reported_and_avoided() -> None:
    lacking = (on_t4("block", 2), on_t4("block", 4, degree=2))
    world = world_lacking(*lacking)
    world.run()
    assert world.succeeded == "True"
    kept = documents.loads(world.stored[world.status.profiles_ref.config_map].data["document.json"], Profiles)
    assert kept.too_large == lacking
    assert world.condition("Profiled").message.endswith(
        "; out of memory: block on emulated-t4 from 2 rows at tensor degree 1, "
        "block on emulated-t4 from 4 rows at tensor degree 2"
    )
    for plan in plans_of(world):
        for stage in plan.pipelines[0].stages:
            if any(device.node == "n2" for device in stage.devices):
                blocks = [run for run in stage.layers if run.first <= 4 and run.end > 1]
                assert all(max(run.rows) < {1: 2, 2: 4}.get(run.strategy.tensor, 1000) for run in blocks)


def test_process_bytes_of_profiles_become_the_runtimes() -> None:
    def report(order):
        found = report_of(order)
        if not isinstance(order, ProfilingTask) or "t4" not in order.gang.nodes[0].accelerator:
            return found
        return replace(found, process_bytes=order.tensor_degree * 2**20)

    world = World(spec=spec_of(search={"planner": "Amp"}), nodes=BOTH, report=report)
    world.run()
    stored = world.stored[world.status.cluster_ref.config_map].data["runtime.json"]
    assert documents.loads(stored, Runtime).process_bytes == (ProcessBytes("emulated-t4", 4 * 2**20),)


@pytest.mark.parametrize(
    ("found", "clause"),
    [
        ({"attention": ("math",)}, "attention of block stores all scores on emulated-t4"),
        ({"submission_seconds": 1e3}, "the host, not the GPU, bounds block on emulated-t4"),
    ],
)
def test_condition_names_layers_of_slow_attention_and_those_that_the_host_bounds(found: dict, clause: str) -> None:
    def report(order):
        measured = report_of(order)
        if not isinstance(order, ProfilingTask) or "t4" not in order.gang.nodes[0].accelerator:
            return measured
        layers = tuple(replace(layer, **found) if layer.kind == "block" else layer for layer in measured.layers)
        return replace(measured, layers=layers)

    world = World(spec=spec_of(search={"planner": "Amp"}), nodes=BOTH, report=report)
    world.run(until=lambda: world.status.profiles_ref is not None)
    assert world.condition("Profiled").message.endswith(f"; {clause}")


def test_accelerator_is_omitted_when_a_layer_does_not_fit() -> None:
    world = world_lacking(*(on_t4("head", 1, degree) for degree in (1, 2, 4)))
    status = world.run()
    assert world.succeeded == "True"
    assert world.condition("Profiled").message.endswith("tensor degree 4, so no plan uses emulated-t4")
    assert {device.node for plan in plans_of(world) for device in plan.devices} == {"n1"}
    assert status.winner is not None


def test_plan_fails_with_a_message_when_a_layer_fits_no_accelerator() -> None:
    world = world_lacking(on_t4("head", 1), on_t4("head", 1, degree=2), nodes=(node("n2", "emulated-t4"),))
    world.run()
    condition = world.condition("Planned")
    assert (condition.status, condition.reason) == ("False", "NoFeasiblePlan")
    assert "too large: head on emulated-t4" in condition.message


def test_profiling_report_without_any_fitting_layer_is_valid() -> None:
    kinds = ("embedding", "block", "head")
    lacking = [on_t4(kind, 1) for kind in kinds] + [on_t4("block", 1, degree) for degree in (2, 4)]
    world = world_lacking(*lacking)
    world.run()
    assert world.succeeded == "True"
    assert {device.node for plan in plans_of(world) for device in plan.devices} == {"n1"}
    assert "and 2 more, so no plan uses emulated-t4" in world.condition("Profiled").message


def test_layer_is_divided_when_it_only_fits_divided() -> None:
    world = world_lacking(on_t4("block", 1), replace(on_t4("block", 1), accelerator="emulated-v100"))
    world.run()
    assert world.succeeded == "True"
    runs = [run for plan in plans_of(world) for stage in plan.pipelines[0].stages for run in stage.layers]
    assert {run.strategy.tensor for run in runs} <= {2, 4}


def test_condition_omits_memory_when_all_layers_fit() -> None:
    world = world_lacking()
    world.run(until=lambda: world.status.profiles_ref is not None)
    assert world.condition("Profiled").message.endswith("measured on emulated-v100, emulated-t4")
