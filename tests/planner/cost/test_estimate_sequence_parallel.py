"""Sequence parallelism in the exact estimate: seconds and bytes of the same plan with and without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from trainwright import documents
from trainwright.accelerators import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.cost.pipeline_replay import channels_of
from trainwright.cost.stage_times import PlanTimes
from trainwright.families import Bert, Gpt, Moe, Vit
from trainwright.layer import Dtype, LayerKind, TensorSplit
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.strategy import Strategy

NAME = "NVIDIA-A100-SXM4-80GB"
CLUSTER = Cluster((Accelerator(NAME, 80 * 2**30),), (Node("node", NAME, 8, Port(1e-5, 1e10), Port(1e-5, 1e10)),), ())
GPT = Model.of(Gpt(6, 1024, 16, 512, 50257), Dtype.BFLOAT16)
ROWS = 2


def context_of(model: Model) -> CostContext:
    return CostContext(model, CLUSTER, estimate_profiles(model, [NAME], tensor_degrees=[1, 2, 4], rows=[1, ROWS, 4]))


def plan_of(model: Model, ends: Sequence[int], *, tensor: int = 4, recompute: bool = False) -> Plan:
    stages, first = [], 0
    for number, end in enumerate(ends):
        run = LayerRun(first, end - first, Strategy(tensor, 1, recompute=recompute), (ROWS,))
        stages.append(Stage(CLUSTER.devices[number * tensor : (number + 1) * tensor], (run,)))
        first = end
    return Plan(len(model.layers), 4 * ROWS, (Pipeline(4, ROWS, tuple(stages)),))


def in_sequence_parallel(plan: Plan) -> Plan:
    return plan.map_stages(
        lambda stage: replace(stage, layers=tuple(run.with_strategy(sequence_parallel=True) for run in stage.layers))
    )


def both(model: Model, plan: Plan) -> tuple[Estimate, Estimate]:
    """Return the estimates without and with sequence parallelism."""
    context = context_of(model)
    return tuple(estimate_with_context(one, context) for one in (plan, in_sequence_parallel(plan)))  # type: ignore[return-value]


def test_whole_model_sends_as_much_computes_less_and_saves_less() -> None:
    without, divided = both(GPT, plan_of(GPT, [len(GPT.layers)]))
    assert divided.breakdown.tensor_sync_seconds == pytest.approx(without.breakdown.tensor_sync_seconds)
    assert 0.8 * without.iteration_seconds < divided.iteration_seconds < without.iteration_seconds
    (before, *_), (after, *_) = without.memory_parts, divided.memory_parts
    kinds = [GPT.divided_kind(kind) or kind for kind in map(GPT.kind_of, range(len(GPT.layers)))]
    saved = sum(
        kind.saved_bytes(GPT.dtype, 4, ROWS) - kind.saved_bytes(GPT.dtype, 4, ROWS, sequence_parallel=True)
        for kind in kinds
    )
    assert before.activations_bytes - after.activations_bytes == pytest.approx(saved, rel=1e-4)
    assert before.weights_bytes == after.weights_bytes


@pytest.mark.parametrize("tensor", [2, 4])
@pytest.mark.parametrize("kind", GPT.kinds, ids=lambda kind: kind.name)
def test_ranks_save_their_share_of_all_where_inputs_are_gathered_again(kind: LayerKind, tensor: int) -> None:
    # Korthikanti et al. 2022: equation 4, that is equation 1 divided by the tensor degree.
    gathering = replace(context_of(GPT), runtime=Runtime(gathers_inputs_again=True))
    alone = (GPT.divided_kind(kind) or kind).saved_bytes(GPT.dtype, 1, ROWS)
    assert gathering.layer_cost(
        NAME, kind, TensorSplit(tensor, divides_sequence=True), ROWS
    ).activation_bytes == pytest.approx(alone / tensor, rel=1e-4)
    whole = gathering.layer_cost(NAME, kind, TensorSplit(tensor, divides_sequence=False), ROWS).activation_bytes
    assert (
        whole
        == context_of(GPT).layer_cost(NAME, kind, TensorSplit(tensor, divides_sequence=False), ROWS).activation_bytes
    )


def test_boundaries_between_stages_stay_divided() -> None:
    without, divided = both(GPT, plan_of(GPT, [4, len(GPT.layers)]))
    assert divided.breakdown.tensor_sync_seconds == pytest.approx(without.breakdown.tensor_sync_seconds)
    plan = in_sequence_parallel(plan_of(GPT, [4, len(GPT.layers)]))
    found = channels_of(0, PlanTimes(plan, context_of(GPT)))
    # Each of the four ranks sends a quarter on a port of its own.
    sent = {one.send_seconds for one in found.channels}
    assert sorted(sent) == pytest.approx([ROWS * GPT.output_bytes_per_row(3) / 4 / 1e10])
    assert found.gather_seconds == (0.0, 0.0)


def sync_seconds(plan: Plan) -> list[float]:
    """Return the seconds of tensor collectives of each stage, for one micro-batch."""
    stages = PlanTimes(plan, context_of(GPT)).stages.values()
    return [one.workers[0].forward.sync_seconds + one.workers[0].backward.sync_seconds for one in stages]


@pytest.mark.parametrize("number", [0, 1])
def test_boundaries_to_stages_without_it_are_gathered(number: int) -> None:
    """The first stage gathers the boundary, the second one its gradient."""
    plan = plan_of(GPT, [4, len(GPT.layers)])
    stages = list(plan.stages)
    stages[number] = in_sequence_parallel(plan).stages[number]
    mixed = replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))
    expected = sync_seconds(plan)
    boundary = ROWS * GPT.output_bytes_per_row(3)
    expected[number] += context_of(GPT).collectives.all_reduce((("node",) * 4,)).all_gather_seconds(boundary)
    assert sync_seconds(mixed) == pytest.approx(expected)


def test_gathers_of_a_stage_do_not_depend_on_plans_costed_before() -> None:
    """Stages that plans share are computed once, unless their neighbours make them gather."""
    plan, context = plan_of(GPT, [4, len(GPT.layers)]), context_of(GPT)
    divided = in_sequence_parallel(plan)
    mixed = replace(plan, pipelines=(replace(plan.pipelines[0], stages=(divided.stages[0], plan.stages[1])),))
    shared = [estimate_with_context(one, context) for one in (divided, mixed)]
    assert shared == [estimate_with_context(one, context_of(GPT)) for one in (divided, mixed)]


def test_recomputed_layers_keep_their_part_of_the_input() -> None:
    without, divided = both(GPT, plan_of(GPT, [len(GPT.layers)], recompute=True))
    inputs = ROWS * sum(GPT.output_bytes_per_row(layer) for layer in range(len(GPT.layers) - 1))
    saved = without.memory_parts[0].activations_bytes - divided.memory_parts[0].activations_bytes
    assert saved >= 0.75 * inputs


def test_plans_that_do_not_state_it_mean_none() -> None:
    plan = plan_of(GPT, [len(GPT.layers)])
    written = documents.dumps(plan)
    assert "sequence_parallel" not in written
    assert documents.loads(written, Plan) == plan
    divided = in_sequence_parallel(plan)
    assert documents.loads(documents.dumps(divided), Plan) == divided
    assert divided.stages[0].layers[0].strategy.sequence_parallel


@pytest.mark.parametrize(
    ("family", "kind", "tensor", "allowed"),
    [
        (Gpt(2, 64, 4, 32, 100), "block", 1, False),
        (Gpt(2, 64, 4, 32, 100), "head", 4, True),
        (Gpt(2, 64, 4, 30, 100), "block", 4, False),  # 4 does not divide the sequence
        (Bert(2, 64, 4, 32, 100), "embedding", 2, True),
        (Bert(2, 64, 4, 32, 100), "head", 2, False),  # the pooler reads the first position
        (Moe(2, 64, 4, 32, 100), "expert_block", 2, False),  # experts need whole sequences
        (Vit(2, 64, 4, 32, 16), "block", 2, False),  # a class token and four patches
    ],
)
def test_layers_allow_it_if_the_degree_divides_their_sequences(
    family: Gpt, kind: str, tensor: int, allowed: bool
) -> None:
    model = Model.of(family)
    assert model.allows_sequence_parallel(model.kind(kind), tensor) is allowed


def test_layers_that_do_not_allow_it_cost_the_same() -> None:
    model = Model.of(Vit(2, 64, 4, 32, 16))
    without, divided = both(model, plan_of(model, [len(model.layers)], tensor=2))
    assert divided == without
