"""A memory term that changes in its one place changes the exact estimate and the tables of every search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from trainwright.cost import memory_terms
from trainwright.cost.estimate import memory_by_device
from trainwright.cost.memory_terms import ValueBytes
from trainwright.plan import Plan
from trainwright.runtime import CollectiveRatios, Runtime
from trainwright.search import Problem
from trainwright.search.alpa.degree_options import DegreeOptions
from trainwright.search.alpa.layer_clusters import cluster_spans
from trainwright.search.alpa.operator_options import OperatorOptions
from trainwright.search.alpa.submeshes import RepresentativeDevices, Submesh, node_blocks
from trainwright.search.auto.replica_tables import ReplicaTables
from trainwright.search.auto.stage_options import StageOptions
from trainwright.search.galvatron.galvatron_model import StageGroupCosts
from trainwright.search.galvatron.layer_classes import layer_sequence
from trainwright.search.galvatron.strategy_tables import GroupTables, StageTable
from trainwright.search.uniform.plan_space import UniformPlanSpace

LAYERS, CUT, IN_FLIGHT = 6, 3, 2
"""The stage is the first of two, on one device, with one row at a time."""


@pytest.fixture
def plan_and_problem(make_problem: Callable[..., Problem], make_plan: Callable[..., Plan]) -> tuple[Plan, Problem]:
    """Return a plan, and its problem with as much memory as its first stage needs."""
    problem = make_problem(layers=LAYERS - 2)
    plan = make_plan(problem, (CUT, LAYERS - CUT))
    return plan, with_memory(problem, exact_bytes(problem, plan))


def with_memory(problem: Problem, size: int) -> Problem:
    accelerators = tuple(replace(one, memory_bytes=size) for one in problem.cluster.accelerators)
    return replace(problem, cluster=replace(problem.cluster, accelerators=accelerators))


def exact_bytes(problem: Problem, plan: Plan) -> int:
    return memory_by_device(plan, problem.cost_context)[0][1]


def table_bytes(problem: Problem) -> dict[str, float]:
    """Return the bytes of the stage by the tables of AMP, Alpa and Galvatron."""
    device, batch = problem.cluster.devices[0], problem.global_batch_size
    accelerator = problem.cluster.accelerator_of(device).name
    amp = UniformPlanSpace.of(problem).tables.required_bytes(accelerator, 1, 1, np.array([float(IN_FLIGHT)]))
    found = {"amp": float(amp[0, 0, CUT])}
    spans = cluster_spans(problem.model)
    submesh = Submesh(((node_blocks(problem)[0], 0),), 1)
    for one in (DegreeOptions, OperatorOptions):
        options = one(problem, spans, RepresentativeDevices(problem)).options(submesh, 1, batch)
        assert options is not None
        kept = options.state_bytes + IN_FLIGHT * options.activation_bytes
        found[one.__name__] = float(kept[0, 0, CUT])
    group = GroupTables(problem, layer_sequence(problem.model), StageGroupCosts((device,), problem.cost_context), 1)
    whole = next(number for number, run in enumerate(group.runs) if not run.strategy.recompute)
    choices = StageTable(group, IN_FLIGHT).choices(0, CUT, 1.0, np.inf)
    found["galvatron"] = float(choices.forward_bytes[:, whole].sum()) + problem.runtime.constant_bytes_of(accelerator)
    return found


def fits_auto(problem: Problem) -> bool:
    """Return whether the stage fits by the tables of `auto`, without recompute."""
    tables = ReplicaTables(problem, LAYERS + 1)
    alone = tables.replica_set(((tables.tensor_group((problem.cluster.devices[0].node,)), 1),), 0.0, CollectiveRatios())
    options = StageOptions(tables, [alone], 1, problem.global_batch_size)
    span = list(zip(*options.spans, strict=True)).index((0, CUT))
    return bool(options.costs(IN_FLIGHT).recompute_ratio[0, 0, span] <= 0.0)


def another_byte_per_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what a parameter takes."""
    of = ValueBytes.of
    monkeypatch.setattr(ValueBytes, "of", lambda *given: of(*given)._replace(optimizer=of(*given).optimizer + 1))


def another_boundary_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change how many boundary tensors are in transit."""
    monkeypatch.setattr(memory_terms, "_PREFETCHED_BOUNDARIES", memory_terms._PREFETCHED_BOUNDARIES + 1)


def other_process_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change what a process holds on a device of any accelerator."""
    monkeypatch.setattr(Runtime, "constant_bytes_of", lambda _, *accelerators: 1000 * len(accelerators))


@pytest.mark.parametrize("change", [another_byte_per_parameter, another_boundary_buffer, other_process_bytes])
def test_a_memory_term_changes_everywhere(
    plan_and_problem: tuple[Plan, Problem],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plan, problem = plan_and_problem
    exact, tables = exact_bytes(problem, plan), table_bytes(problem)
    assert exact == tables["amp"] == tables["galvatron"]
    assert fits_auto(problem)
    change(monkeypatch)
    problem = replace(problem)
    more = exact_bytes(problem, plan) - exact
    assert more > 0
    changed = table_bytes(problem)
    assert {name: changed[name] - tables[name] for name in tables} == pytest.approx(dict.fromkeys(tables, more))
    assert not fits_auto(problem)
    enough = with_memory(problem, exact + more)
    assert fits_auto(enough)
