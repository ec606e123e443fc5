"""Bytes of every device, against a count made for this test alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_in
from trainwright.cost.memory import MemoryParts, in_flight
from trainwright.cost.setting import Setting
from trainwright.layer import Dtype
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Sharding, Stage
from trainwright.runtime import Runtime
from trainwright.search import Problem

MakeCluster = Callable[..., Cluster]
MakeProblem = Callable[..., Problem]
BLOCKS = 12
TOKENS, HIDDEN, VOCABULARY = 64, 128, 1000
ROW = TOKENS * HIDDEN
"""Values of the boundary behind an embedding or a block, per row."""
KEPT = {"embedding": 32 * ROW, "block": 32 * ROW, "head": 32}
"""Bytes that the profiles say a layer keeps, per row at tensor degree 1."""
BLOCK = 12 * HIDDEN**2 + 13 * HIDDEN
EMBEDDING = (VOCABULARY + TOKENS) * HIDDEN
HEAD = VOCABULARY * HIDDEN + 2 * HIDDEN


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem) -> Problem:
    return make_problem()


def parameters(name: str, tensor: int) -> int:
    """Values of one layer on one rank: normalisations and the biases behind row-split products are not divided."""
    if name == "block":
        whole = 6 * HIDDEN
        return whole + (BLOCK - whole) // tensor
    return EMBEDDING if name == "embedding" else HEAD


def count(plan: Plan, setting: Setting, stage_number: int, index: int) -> MemoryParts:
    """The oracle: layer by layer, as the model's documentation says."""
    pipeline = plan.pipelines[0]
    stages, stage = len(pipeline.stages), pipeline.stages[stage_number]
    names = setting.model.layers
    size = setting.model.dtype.num_bytes
    gradient_size = setting.runtime.gradient_dtype.num_bytes
    kept = in_flight(plan.schedule, pipeline.micro_batches, stage_number, stages)
    weights = gradients = optimizer = 0
    activations = recomputed = 0.0
    gathered = [0]
    tied_seen = False
    rows_of_run = []
    for run in stage.layers:
        replica = index // run.tensor
        rows = run.rows[replica]
        rows_of_run.append(rows)
        held, biggest = 0, 0
        for layer in range(run.first, run.first + run.count):
            own = parameters(names[layer], run.tensor)
            biggest = max(biggest, own)
            gathered.append(own if run.sharding is Sharding.ZERO3 and run.data > 1 else 0)
            held += own
            if names[layer] in {"embedding", "head"}:
                held -= VOCABULARY * HIDDEN if tied_seen else 0
                tied_seen = True
            saved = KEPT[names[layer]] * rows // (run.tensor if names[layer] == "block" else 1)
            saved *= setting.runtime.activation_ratio
            if run.recompute:
                activations += kept * (rows * ROW * size if layer > 0 else 0)
                recomputed = max(recomputed, saved)
            else:
                activations += kept * saved
        part = held if run.sharding is Sharding.NONE else -(-held // run.data)
        weights += size * (part if run.sharding is Sharding.ZERO3 else held)
        at_once = run.sharding in {Sharding.ZERO2, Sharding.ZERO3} and run.data > 1 and pipeline.micro_batches == 1
        gradients += gradient_size * (min(held, part + biggest) if at_once else held)
        optimizer += part * (8 + (0 if size == 4 else 4))
    boundary = 0
    if stage_number > 0:
        boundary += 3 * rows_of_run[0] * ROW * size
    if stage_number < stages - 1:
        boundary += (kept + 3) * rows_of_run[-1] * ROW * size
    loss = 2 * TOKENS * VOCABULARY * size * rows_of_run[-1] if stage_number == stages - 1 else 0
    pairs = [a + b for a, b in pairwise(gathered)]
    return MemoryParts(
        weights,
        gradients,
        optimizer,
        round(activations + recomputed + boundary),
        max(pairs) * size + loss,
        setting.runtime.constant_bytes,
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
                rows = (8 // data,) * data
                runs.append(
                    LayerRun(
                        low,
                        high - low,
                        size // data,
                        data,
                        rows,
                        sharding=draw(st.sampled_from(Sharding)),
                        recompute=draw(st.booleans()),
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
)
def test_every_device_holds_what_the_count_says(
    problem: Problem, data: st.DataObject, dtype: Dtype, gradient_dtype: Dtype, constant: int
) -> None:
    runtime = Runtime(gradient_dtype=gradient_dtype, constant_bytes=constant)
    setting = replace(problem.setting, model=replace(problem.model, dtype=dtype), runtime=runtime)
    plan = data.draw(plans(problem))
    found = estimate_in(plan, setting)
    expected = [
        count(plan, setting, number, index)
        for number, stage in enumerate(plan.pipelines[0].stages)
        for index in range(len(stage.devices))
    ]
    assert list(found.memory_parts) == expected
    assert [held for _, held in found.memory_by_device] == [part.total_bytes for part in expected]
    assert found.peak_memory_bytes == max(part.total_bytes for part in expected)


def test_adam_in_half_precision_takes_sixteen_bytes_a_parameter(problem: Problem) -> None:
    """2 for the weight, 2 for the gradient, 4 for the master weight, 8 for Adam (ZeRO, Section 3.1); 16 in float32 too."""
    one = Plan(14, 1, (Pipeline(1, 1, (Stage(problem.cluster.devices[:1], (LayerRun(0, 14, 1, 1, (1,)),)),)),))
    for dtype in Dtype:
        setting = replace(
            problem.setting, model=replace(problem.model, dtype=dtype), runtime=Runtime(gradient_dtype=dtype)
        )
        parts = estimate_in(one, setting).memory_parts[0]
        state = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes
        assert state == 16 * problem.model.parameters


def test_momentum_takes_four_bytes_fewer(problem: Problem) -> None:
    one = Plan(14, 1, (Pipeline(1, 1, (Stage(problem.cluster.devices[:1], (LayerRun(0, 14, 1, 1, (1,)),)),)),))
    adam, sgd = (estimate_in(one, replace(problem.setting, optimizer=name)) for name in ("adam", "sgd"))
    assert adam.peak_memory_bytes - sgd.peak_memory_bytes == 4 * problem.model.parameters


def test_a_plan_that_lacks_one_byte_is_infeasible_and_one_that_fits_to_the_byte_is_not(problem: Problem) -> None:
    plan = Plan(14, 1, (Pipeline(1, 1, (Stage(problem.cluster.devices[:1], (LayerRun(0, 14, 1, 1, (1,)),)),)),))
    needed = estimate_in(plan, problem.setting).peak_memory_bytes
    for spare, feasible in ((0, True), (-1, False)):
        devices = tuple(replace(a, memory_bytes=needed + spare) for a in problem.cluster.accelerators)
        setting = replace(problem.setting, cluster=replace(problem.cluster, accelerators=devices))
        found = estimate_in(plan, setting)
        assert found.feasible is feasible
        assert (found.reason is None) is feasible
