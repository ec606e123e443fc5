"""Messages of replicas: each takes the latency of a ring; gathers by module, and gathers that the next forward hides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from trainwright.cluster import Cluster
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.messages import stage_messages
from trainwright.families import Bert, Gpt, Llama
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.runtime import Messages, Runtime
from trainwright.search import Problem
from trainwright.strategy import Sharding

MakeCluster = Callable[..., Cluster]
MakePlan = Callable[..., Plan]
MakeProblem = Callable[..., Problem]

LATENCY, DEVICES = 1e-3, 4
STEPS = 2 * (DEVICES - 1)
"""Steps of a ring's all-reduce, or of its reduce-scatter and its all-gather."""


@pytest.fixture(scope="module")
def problem(make_problem: MakeProblem, make_cluster: MakeCluster) -> Problem:
    """Four nodes of one device each."""
    return make_problem(make_cluster((("fast", 1),) * DEVICES, between=1e9, latency=LATENCY), batch=16)


@pytest.fixture(scope="module")
def plan(problem: Problem, make_plan: MakePlan) -> Plan:
    return make_plan(problem, [14], data=DEVICES, rows=1)


def seconds(problem: Problem, plan: Plan, sharding: Sharding, **facts: object) -> float:
    runs = tuple(run.with_strategy(sharding=sharding) for stage in plan.stages for run in stage.layers)
    sharded = plan.map_stages(lambda stage: replace(stage, layers=runs))
    runtime = Runtime(**{"overlaps_gradients": False, "messages": Messages.ALL} | facts)  # type: ignore[arg-type]
    return estimate_with_context(sharded, replace(problem.cost_context, runtime=runtime)).iteration_seconds


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO1])
def test_every_tensor_takes_the_latency_of_a_ring(problem: Problem, plan: Plan, sharding: Sharding) -> None:
    tensors = sum(problem.model.kind_of(layer).weight_tensors for layer in range(14))
    together, one_by_one = (seconds(problem, plan, sharding, messages=each) for each in (Messages.ALL, Messages.TENSOR))
    assert one_by_one - together == pytest.approx((tensors - 1) * STEPS * LATENCY)


def test_buckets_take_as_many_latencies_as_they_are(problem: Problem, plan: Plan) -> None:
    fifth = 4 * problem.model.parameters // 5
    together = seconds(problem, plan, Sharding.ZERO1)
    bucketed = seconds(problem, plan, Sharding.ZERO1, messages=Messages.BUCKET, bucket_bytes=fifth)
    assert bucketed - together == pytest.approx(4 * STEPS * LATENCY, rel=0.01)
    one = seconds(problem, plan, Sharding.ZERO1, messages=Messages.BUCKET, bucket_bytes=2**40)
    assert one == together


def test_messages_during_the_backward_are_those_of_a_layer(problem: Problem, plan: Plan) -> None:
    whole, one_by_one = (
        seconds(problem, plan, Sharding.ZERO2, messages=each) for each in (Messages.ALL, Messages.TENSOR)
    )
    assert one_by_one > whole


def test_modules_are_gathered_one_by_one_under_zero3_alone(problem: Problem, plan: Plan) -> None:
    at_once, by_module = (
        {sharding: seconds(problem, plan, sharding, gathers_by_module=each) for sharding in Sharding}
        for each in (False, True)
    )
    assert by_module.pop(Sharding.ZERO3) > at_once.pop(Sharding.ZERO3)
    assert by_module == at_once


def test_the_next_forward_hides_the_gathering_of_weights(problem: Problem, plan: Plan) -> None:
    after, during = (
        seconds(problem, plan, Sharding.ZERO1, overlaps_weight_gathers=each, overlap_slowdown_ratio=1.0)
        for each in (False, True)
    )
    gather = (DEVICES - 1) * (LATENCY + 4 * problem.model.parameters / DEVICES / 1e9)
    assert after - during == pytest.approx(gather)
    assert seconds(problem, plan, Sharding.NONE, overlaps_weight_gathers=True) == seconds(problem, plan, Sharding.NONE)


def test_tables_of_searches_count_tensors_of_mean_size(problem: Problem) -> None:
    context = replace(problem.cost_context, runtime=Runtime(messages=Messages.TENSOR))
    model = problem.model
    kinds = [model.kind_of(layer) for layer in range(len(model.layers))]
    values = np.array([float(sum(kind.parameters for kind in kinds)), 1.0])
    found = stage_messages(values, 4 * values, context)
    assert list(found) == pytest.approx([sum(kind.weight_tensors for kind in kinds), 1.0])  # type: ignore[arg-type]
    assert stage_messages(values, 4 * values, problem.cost_context) == 1


@pytest.mark.parametrize(
    ("family", "tensors"),
    [
        (Gpt(2, 64, 4, 16, 100), 12),  # two norms and four products, all with biases
        (Llama(2, 64, 4, 16, 100), 6),  # two norms and four products without: queries with keys, gate with up
        (Llama(2, 64, 4, 16, 100, query_key_norm=True), 8),  # and one weight each for queries and keys
        (Bert(2, 64, 4, sequence_length=16), 12),
    ],
)
def test_tensors_of_a_block_are_those_of_its_modules(family: Gpt | Llama | Bert, tensors: int) -> None:
    assert Model.of(family, Dtype.FLOAT32).kind("block").weight_tensors == tensors


@pytest.mark.parametrize(
    ("facts", "refusal"),
    [
        ({"messages": Messages.BUCKET}, "bucket_bytes must be given"),
        ({"bucket_bytes": -1}, "bucket_bytes must be at least 0"),
        ({"product_ratio": 0.0}, "product_ratio must be above 0"),
        ({"update_bytes_per_parameter": -1.0}, "update_bytes_per_parameter must be at least 0"),
    ],
)
def test_impossible_facts_are_refused(facts: dict[str, object], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        Runtime(**facts)  # type: ignore[arg-type]
