"""Memory of every device against an independent count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.gradient_sync import gradient_reductions
from trainwright.cost.memory import MemoryParts, loss_bytes
from trainwright.cost.memory_terms import in_flight_micro_batches
from trainwright.cost.stage_times import PlanTimes
from trainwright.layer import Dtype, TensorSplit
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.profiles import Profiles
from trainwright.runtime import ProcessBytes, Runtime
from trainwright.search import Problem
from trainwright.search.plan_defaults import with_runtime_choices
from trainwright.search.uniform.plan_space import UniformPlanSpace
from trainwright.strategy import RankOrder, Sharding, Strategy

MakeProblem = Callable[..., Problem]
TOKENS, HIDDEN, VOCABULARY = 64, 124, 1000
ROW = TOKENS * HIDDEN
"""Elements per row of the boundary after an embedding or a block."""
KEPT = {"embedding": 32 * ROW, "block": 32 * ROW, "head": 32}
"""Bytes that the profiles say a layer keeps, per row at tensor degree 1."""
BLOCK = 12 * HIDDEN**2 + 13 * HIDDEN
EMBEDDING = (VOCABULARY + TOKENS) * HIDDEN
HEAD = VOCABULARY * HIDDEN + 2 * HIDDEN


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem) -> Problem:
    """Return a problem of hidden size 4 × 31, which eight ranks do not divide."""
    return make_problem(hidden=HIDDEN)


@pytest.fixture(scope="module")
def divided(problem: Problem) -> Problem:
    """Return the problem profiled by a runtime that splits the vocabulary over the tensor degree."""
    return divide_vocabulary(problem, [accelerator.name for accelerator in problem.cluster.accelerators])


def divide_vocabulary(problem: Problem, accelerators: list[str]) -> Problem:
    more = [
        replace(
            one,
            tensor_degree=tensor,
            forward_seconds=one.forward_seconds / tensor,
            activation_bytes=one.activation_bytes // tensor,
        )
        for one in problem.profiles.layers
        if one.kind in {"embedding", "head"} and one.accelerator in accelerators
        for tensor in (2, 4)
    ]
    return replace(problem, profiles=Profiles((*problem.profiles.layers, *more)))


def parameters(name: str, tensor: int, vocabulary_ranks: int) -> int:
    """Return parameters of one layer on one rank; only products, and the vocabulary where it is divided, are sharded."""
    if name == "block":
        whole = 6 * HIDDEN
        return whole + (BLOCK - whole) // tensor
    rest = TOKENS * HIDDEN if name == "embedding" else 2 * HIDDEN
    return rest + VOCABULARY * HIDDEN // vocabulary_ranks


def division(run: LayerRun, *, divides: bool) -> tuple[object, ...]:
    """Return a key that is equal for runs in which each rank has the same slice of a divided vocabulary."""
    order = run.strategy.order if run.strategy.tensor > 1 and run.strategy.data > 1 else None
    return (run.strategy.tensor, order) if divides else ()


def divided_as(run: LayerRun) -> tuple[object, ...]:
    """Return a key that is equal for runs that shard a weight alike; otherwise every rank keeps it unsharded."""
    order = run.strategy.order if run.strategy.tensor > 1 and run.strategy.data > 1 else None
    return run.strategy.tensor, run.rows, order, run.strategy.sharding


def divided_in_different_ways(holders: list[LayerRun], *, divides: bool) -> set[tuple[object, ...]]:
    """Return the divisions of the vocabulary whose runs shard their slices differently among replicas."""
    ways: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for run in holders:
        ways.setdefault(division(run, divides=divides), set()).add(divided_as(run))
    return {key for key, found in ways.items() if len(found) > 1}


def count(plan: Plan, setting: CostContext, stage_number: int, index: int, *, divides: bool) -> MemoryParts:
    """Return the oracle's bytes, counted layer by layer as documented."""
    pipeline = plan.pipelines[0]
    stages, stage = len(pipeline.stages), pipeline.stages[stage_number]
    names = setting.model.layers
    size = setting.model.dtype.num_bytes
    gradient_size = setting.runtime.gradient_dtype.num_bytes
    kept = in_flight_micro_batches(plan.schedule, pipeline.micro_batches, stage_number, stages)
    holders = [run for run in stage.layers if run.first == 0 or run.first + run.count == len(names)]
    unsharded = divided_in_different_ways(holders, divides=divides)
    whole = sum(VOCABULARY * HIDDEN // (key[0] if divides else 1) for key in unsharded)
    weights, gradients, optimizer = size * whole, gradient_size * whole, whole * (8 + (0 if size == 4 else 4))
    activations = recomputed = 0.0
    gathered = [0]
    tied_seen, whole_layer = set(unsharded), 0
    rows_of_run = []
    for run in stage.layers:
        ranks = run.strategy.tensor if divides else 1
        replica = (
            index // run.strategy.tensor if run.strategy.order is RankOrder.TENSOR_INNER else index % run.strategy.data
        )
        rows = run.rows[replica]
        rows_of_run.append(rows)
        held, biggest = 0, 0
        for layer in range(run.first, run.end):
            own = parameters(names[layer], run.strategy.tensor, ranks)
            biggest = max(biggest, own)
            gathered.append(own if run.strategy.sharding is Sharding.ZERO3 and run.strategy.data > 1 else 0)
            held += own
            if names[layer] in {"embedding", "head"}:
                held -= VOCABULARY * HIDDEN // ranks if division(run, divides=divides) in tied_seen else 0
                tied_seen.add(division(run, divides=divides))
            saved = KEPT[names[layer]] * rows // (run.strategy.tensor if names[layer] == "block" else ranks)
            saved *= setting.runtime.activation_ratio
            if run.strategy.recompute:
                activations += kept * (rows * ROW * size if layer > 0 else 0)
                recomputed = max(recomputed, saved)
            else:
                activations += kept * saved
        part = held if run.strategy.sharding is Sharding.NONE else -(-held // run.strategy.data)
        weights += size * (part if run.strategy.sharding is Sharding.ZERO3 else held)
        at_once = (
            run.strategy.sharding in {Sharding.ZERO2, Sharding.ZERO3}
            and run.strategy.data > 1
            and pipeline.micro_batches == 1
        )
        gradients += gradient_size * (part if at_once else held)
        whole_layer = max(whole_layer, min(held - part, biggest) if at_once else 0)
        optimizer += part * (8 + (0 if size == 4 else 4))
    boundary = 0
    if stage_number > 0:
        boundary += 3 * rows_of_run[0] * ROW * size
    if stage_number < stages - 1:
        boundary += (kept + 3) * rows_of_run[-1] * ROW * size
    loss_bytes_per_logit = 2 * 4 if ranks == 1 else 0 if size == 4 else size / ranks
    loss = round(loss_bytes_per_logit * TOKENS * VOCABULARY * rows_of_run[-1]) if stage_number == stages - 1 else 0
    pairs = [a + b for a, b in pairwise(gathered)]
    accelerator = setting.accelerator_of_node[stage.devices[index].node]
    held = {one.accelerator: one.held_bytes for one in setting.runtime.process_bytes}
    return MemoryParts(
        weights,
        gradients + gradient_size * whole_layer,
        optimizer,
        round(activations + recomputed + boundary),
        max(pairs) * size + loss,
        setting.runtime.constant_bytes + held.get(accelerator, 0),
    )


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> Plan:
    stages = draw(st.sampled_from([1, 2, 4]))
    size = 8 // stages
    ends = [0, *sorted(draw(st.lists(st.integers(1, 13), min_size=stages - 1, max_size=stages - 1, unique=True))), 14]
    made = []
    for number in range(stages):
        cut = draw(st.integers(ends[number], ends[number + 1] - 1))
        runs = []
        for low, high in ((ends[number], cut), (cut, ends[number + 1])):
            if high > low:
                data = draw(st.sampled_from([d for d in (1, 2, 4, 8) if d <= size and size // d <= 4]))
                rows = draw(st.sampled_from([(4, 4), (1, 7), (7, 1)])) if data == 2 else (8 // data,) * data
                runs.append(
                    LayerRun(
                        low,
                        high - low,
                        Strategy(
                            size // data,
                            data,
                            draw(st.sampled_from(RankOrder)),
                            sharding=draw(st.sampled_from(Sharding)),
                            recompute=draw(st.booleans()),
                        ),
                        rows,
                    )
                )
        made.append(Stage(problem.cluster.devices[number * size : (number + 1) * size], tuple(runs)))
    micro_batches = draw(st.integers(1, 5))
    return Plan(14, 8 * micro_batches, (Pipeline(micro_batches, 8, tuple(made)),), draw(st.sampled_from(Schedule)))


@given(
    data=st.data(),
    dtype=st.sampled_from(Dtype),
    gradient_dtype=st.sampled_from([Dtype.FLOAT16, Dtype.FLOAT32]),
    constant=st.sampled_from([0, 10**9]),
    divides=st.booleans(),
)
def test_memory_equals_the_oracles_count(
    *,
    problem: Problem,
    divided: Problem,
    data: st.DataObject,
    dtype: Dtype,
    gradient_dtype: Dtype,
    constant: int,
    divides: bool,
) -> None:
    held = (ProcessBytes("emulated-fast", 5 * constant),)
    runtime = Runtime(gradient_dtype=gradient_dtype, constant_bytes=constant, process_bytes=held)
    setting = replace(
        (divided if divides else problem).cost_context, model=replace(problem.model, dtype=dtype), runtime=runtime
    )
    plan = data.draw(plans(problem))
    found = estimate_with_context(plan, setting)
    expected = [
        count(plan, setting, number, index, divides=divides)
        for number, stage in enumerate(plan.pipelines[0].stages)
        for index in range(len(stage.devices))
    ]
    assert list(found.memory_parts) == expected
    assert [held for _, held in found.memory_by_device] == [part.total_bytes for part in expected]
    assert found.peak_memory_bytes == max(part.total_bytes for part in expected)


def test_vocabulary_is_sharded_when_every_accelerator_was_profiled_so(problem: Problem, divided: Problem) -> None:
    one_of_two = divide_vocabulary(problem, ["emulated-fast"])
    head = problem.model.kind("head")
    for setting, ranks in ((problem.cost_context, 1), (divided.cost_context, 4), (one_of_two.cost_context, 1)):
        assert setting.is_tensor_sharded(head, 4) is (ranks == 4)
        assert setting.divided_at(4).parameters(head) == VOCABULARY * HIDDEN // ranks + 2 * HIDDEN
        assert setting.divided_at(4).tied_parameters(head) == VOCABULARY * HIDDEN // ranks
        whole = problem.profiles.cost("emulated-fast", "head", 1, 2).forward_seconds
        assert setting.layer_cost("emulated-fast", head, TensorSplit(4), 2).forward_seconds == pytest.approx(
            whole / ranks
        )
        assert loss_bytes(setting, setting.divided_at(4), 2) == (2 * 2 * TOKENS * VOCABULARY * 4 if ranks == 1 else 0)
        half = replace(setting, model=replace(setting.model, dtype=Dtype.BFLOAT16))
        assert loss_bytes(half, half.divided_at(4), 2) == (
            2 * 2 * TOKENS * VOCABULARY * 4 if ranks == 1 else TOKENS * VOCABULARY
        )


def test_search_and_estimate_agree_on_a_sharded_vocabulary(divided: Problem) -> None:
    devices = divided.cluster.devices
    stages = (
        Stage(devices[:4], (LayerRun(0, 7, Strategy(4, 1), (2,)),)),
        Stage(devices[4:], (LayerRun(7, 7, Strategy(4, 1), (2,)),)),
    )
    plan = with_runtime_choices(Plan(14, 16, (Pipeline(8, 2, stages),)), divided.cost_context)
    found = estimate_with_context(plan, divided.cost_context)
    needed = UniformPlanSpace.of(divided).tables.required_bytes("emulated-fast", 4, 2, np.array([2.0, 1.0]))
    assert found.memory_by_device[0][1] == needed[0, 0, 7]
    assert found.memory_by_device[4][1] == needed[1, 7, 14]


def test_boundary_that_stays_divided_takes_a_slice(divided: Problem) -> None:
    setting, devices, rows = divided.cost_context, divided.cluster.devices, 2

    def activations(micro_batches: int, tensor: int, *, recompute: bool = False) -> int:
        data = 4 // tensor
        first = LayerRun(0, 7, Strategy(4, 1, recompute=recompute), (rows,))
        stages = (
            Stage(devices[:4], (first,)),
            Stage(devices[4:], (LayerRun(7, 7, Strategy(tensor, data), (rows // data,) * data),)),
        )
        plan = Plan(14, rows * micro_batches, (Pipeline(micro_batches, rows, stages),))
        return estimate_with_context(with_runtime_choices(plan, setting), setting).memory_parts[0].activations_bytes

    boundary = rows * ROW * setting.model.dtype.num_bytes
    layers = [(divided.model.kind("embedding"), 1), (divided.model.kind("block"), 6)]
    saved = sum(
        count * setting.layer_cost("emulated-fast", kind, TensorSplit(4, divides_sequence=True), rows).activation_bytes
        for kind, count in layers
    )
    # Two micro-batches in flight, and three messages ahead.
    assert activations(4, 4) == pytest.approx(2 * saved + (2 + 3) * boundary / 4, abs=1)
    # A neighbour of another tensor degree is sent whole boundaries; a slice of the output is saved besides.
    assert activations(4, 2) == pytest.approx(2 * saved + 2 * boundary / 4 + (2 + 3) * boundary, abs=1)
    one_more = [activations(4, tensor, recompute=True) - activations(1, tensor, recompute=True) for tensor in (4, 2)]
    assert one_more == [pytest.approx(6 * boundary / 4 + part * boundary, abs=1) for part in (1 / 4, 1)]


def test_gradients_of_a_sharded_vocabulary_are_reduced_in_shards(problem: Problem, divided: Problem) -> None:
    """The tied weight over its owners, the rest of its layers among the replicas."""
    devices = problem.cluster.devices
    runs = LayerRun(0, 7, Strategy(2, 2), (1, 1)), LayerRun(7, 7, Strategy(2, 2), (1, 1))
    plan = Plan(14, 16, (Pipeline(8, 2, (Stage(devices[:4], runs[:1]), Stage(devices[4:], runs[1:]))),))
    whole, parts = (
        [sync for sync in gradient_reductions(PlanTimes(plan, one.cost_context)) if sync.is_tied_weight]
        for one in (problem, divided)
    )
    assert len(parts) == len(whole) == 1
    latency = parts[0].latency_seconds
    assert parts[0].seconds - latency == pytest.approx((whole[0].seconds - latency) / 2)


def test_adam_in_half_precision_takes_sixteen_bytes_a_parameter(problem: Problem) -> None:
    """2 for the weight, 2 for the gradient, 4 for the master weight, 8 for Adam (ZeRO, Section 3.1); 16 in float32 too."""
    one = Plan(
        14, 1, (Pipeline(1, 1, (Stage(problem.cluster.devices[:1], (LayerRun(0, 14, Strategy(1, 1), (1,)),)),)),)
    )
    for dtype in Dtype:
        setting = replace(
            problem.cost_context, model=replace(problem.model, dtype=dtype), runtime=Runtime(gradient_dtype=dtype)
        )
        parts = estimate_with_context(one, setting).memory_parts[0]
        state = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes
        assert state == 16 * problem.model.parameters


def test_momentum_takes_four_bytes_fewer(problem: Problem) -> None:
    one = Plan(
        14, 1, (Pipeline(1, 1, (Stage(problem.cluster.devices[:1], (LayerRun(0, 14, Strategy(1, 1), (1,)),)),)),)
    )
    adam, sgd = (estimate_with_context(one, replace(problem.cost_context, optimizer=name)) for name in ("adam", "sgd"))
    assert adam.peak_memory_bytes - sgd.peak_memory_bytes == 4 * problem.model.parameters


def test_a_plan_that_lacks_one_byte_is_infeasible_and_one_that_fits_to_the_byte_is_not(problem: Problem) -> None:
    plan = Plan(
        14, 1, (Pipeline(1, 1, (Stage(problem.cluster.devices[:1], (LayerRun(0, 14, Strategy(1, 1), (1,)),)),)),)
    )
    needed = estimate_with_context(plan, problem.cost_context).peak_memory_bytes
    for spare, feasible in ((0, True), (-1, False)):
        devices = tuple(replace(a, memory_bytes=needed + spare) for a in problem.cluster.accelerators)
        setting = replace(problem.cost_context, cluster=replace(problem.cluster, accelerators=devices))
        found = estimate_with_context(plan, setting)
        assert found.feasible is feasible
        assert (found.reason is None) is feasible
