"""Order of gradient reductions and passes, by the calls that a rank makes without peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorded_calls import Call, Record, Wait, recording

from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Sharding, Strategy
from trainwright_worker.executor import gradient_reduction
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.flat_parameter import Weight
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.initial_weights import part_start
from trainwright_worker.live_bytes import measure_peak_bytes

MODEL = Model.of(Gpt(layers=2, hidden_size=16, heads=4, sequence_length=8, vocabulary_size=16))
LAYERS = len(MODEL.layers)
REDUCTIONS = ("all_reduce", "reduce_scatter")


def plan_of(*shardings: Sharding) -> Plan:
    """Return pipelines of one stage with two replicas, and two micro-batches."""
    pipelines = tuple(
        Pipeline(2, 2, (Stage(devices, (LayerRun(0, LAYERS, Strategy(1, 2, sharding=sharding), (1, 1)),)),))
        for number, sharding in enumerate(shardings)
        for devices in [(Device("node", 2 * number), Device("node", 2 * number + 1))]
    )
    return Plan(LAYERS, 4 * len(pipelines), pipelines)


def first_rank_of(plan: Plan, model: Model, *, beat: Callable[[str], None] = lambda _: None) -> PlanExecutor:
    context = RankContext(0, torch.device("cpu"), beat=beat)
    return PlanExecutor(plan, model, TrainingConfig(), context, ProcessGroups(timedelta(seconds=5)))


def iteration_of(plan: Plan) -> Record:
    """Return what the first rank calls in one iteration; a call's scope is the action that had begun."""
    with recording(0, len(plan.devices)) as record:

        def beat(doing: str) -> None:
            record.scope = doing

        executor = first_rank_of(plan, MODEL, beat=beat)
        batch = executor.make_batch(0)
        record.events.clear()
        executor.run_iteration(batch)
        return replace(record, events=list(record.events))


def reductions(record: Record) -> list[tuple[str, str]]:
    return [(call.kind, call.scope) for call in record.calls if call.kind in REDUCTIONS]


def of_each_layer(kind: str) -> list[tuple[str, str]]:
    """Return one reduction a layer, when the last micro-batch has passed it."""
    return [(kind, f"backward 1, layer {layer}") for layer in reversed(range(LAYERS))]


@pytest.mark.parametrize("sharding", list(Sharding))
def test_gradients_of_a_layer_are_reduced_while_earlier_layers_compute(sharding: Sharding) -> None:
    kind = "all_reduce" if sharding is Sharding.NONE else "reduce_scatter"
    assert reductions(iteration_of(plan_of(sharding))) == [*of_each_layer(kind), (kind, "summing gradients")]


@pytest.mark.parametrize("sharding", [Sharding.ZERO1, Sharding.ZERO3])
def test_several_pipelines_reduce_shards_after_each_has_reduced_among_its_replicas(sharding: Sharding) -> None:
    found = reductions(iteration_of(plan_of(sharding, sharding)))
    assert found[:LAYERS] == of_each_layer("reduce_scatter")
    assert {scope for _, scope in found[LAYERS:]} == {"summing gradients"}


@pytest.mark.parametrize("shardings", [(Sharding.NONE, Sharding.NONE), (Sharding.NONE, Sharding.ZERO3)])
def test_several_pipelines_reduce_unsharded_gradients_after_the_backward(shardings: tuple[Sharding, ...]) -> None:
    assert {scope for _, scope in reductions(iteration_of(plan_of(*shardings)))} == {"summing gradients"}


@pytest.mark.parametrize("sharding", list(Sharding))
def test_reduction_waits_for_the_one_before_only_where_that_frees_gradients(sharding: Sharding) -> None:
    events = iteration_of(plan_of(sharding)).events
    started = [place for place, event in enumerate(events) if isinstance(event, Call) and event.kind in REDUCTIONS]
    waited = [events.index(Wait(place)) for place in started]
    frees = sharding in {Sharding.ZERO2, Sharding.ZERO3}
    assert [before < after for before, after in zip(waited[: LAYERS - 1], started[1:LAYERS], strict=True)] == (
        [frees] * (LAYERS - 1)
    )


def test_pipelines_that_divide_weights_differently_copy_one_message_of_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradient_reduction, "MAX_MESSAGE_BYTES", message_bytes := 64 * 2**10)
    wide = Model.of(Gpt(layers=2, hidden_size=256, heads=4, sequence_length=8, vocabulary_size=16))

    def peak_bytes(*shardings: Sharding) -> int:
        plan = plan_of(*shardings)
        with recording(0, len(plan.devices)):
            executor = first_rank_of(plan, wide)
            batch = executor.make_batch(0)
            executor.run_iteration(batch)
            resident = [*executor.optimizer.resident_tensors, *batch.tensors]
            return measure_peak_bytes(lambda: executor.run_iteration(batch), resident, executor.device)

    differently, alike = peak_bytes(Sharding.NONE, Sharding.ZERO3), peak_bytes(Sharding.NONE, Sharding.NONE)
    assert differently <= alike + 2 * message_bytes


Shape = tuple[tuple[int, ...], int | None]
"""Full shape of a weight, and the dimension that tensor groups divide."""


@st.composite
def shapes(draw: st.DrawFn, slices: int) -> Shape:
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    split = draw(st.none() | st.integers(0, len(shape) - 1))
    if split is not None:
        shape[split] += slices  # no slice is empty; they may be uneven
    return tuple(shape), split


def message_sizes(found: list[Shape], slices: int, degree: int, index: int) -> dict[int, list[list[int]]]:
    """Return the values of every message's parts, by slice, on one rank of a tensor group. Checks that each is in one part."""
    weights = []
    for shape, split in found:
        own = [
            part_start(length, index + 1, degree) - part_start(length, index, degree) if dimension == split else length
            for dimension, length in enumerate(shape)
        ]
        parameter = torch.nn.Parameter(torch.zeros(own))
        weights.append(Weight("weight", parameter, split, None if split is None else shape[split]))
    messages = list(gradient_reduction._messages(weights, slices))
    per_rank, sizes = slices // degree, {}
    for number in range(index * per_rank, (index + 1) * per_rank):
        held = [one.narrow(torch.zeros(one.parameter.shape), number, slices, index * per_rank) for one in weights]
        for message in messages:
            for part in message:
                part.of(held).add_(1)
        assert all(bool((values == 1).all()) for values in held)
        sizes[number] = [[part.of(held).numel() for part in message] for message in messages]
    return sizes


@given(st.data(), st.sampled_from([1, 2, 4, 6]), st.integers(4, 200))
def test_ranks_with_different_parts_of_the_weights_reduce_the_same_messages(
    data: st.DataObject, slices: int, values: int
) -> None:
    found = data.draw(st.lists(shapes(slices), min_size=1, max_size=4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_reduction, "MAX_MESSAGE_BYTES", 4 * values)
        sizes = [
            message_sizes(found, slices, degree, index)
            for degree in range(1, slices + 1)
            if slices % degree == 0
            for index in range(degree)
        ]
    for number in range(slices):
        first, *others = [one[number] for one in sizes if number in one]
        assert all(other == first for other in others)
        assert all(min(message) > 0 for message in first)


@pytest.mark.parametrize(
    ("shape", "split", "slices"), [((3, 64, 64), 1, 2), ((8, 2, 48, 64), 2, 4), ((512, 64), 0, 8), ((64, 64), None, 2)]
)
def test_messages_of_large_weights_keep_to_the_limit(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], split: int | None, slices: int
) -> None:
    """Weights are parted by their longest dimension, which is not the first one of fused projections and of experts."""
    monkeypatch.setattr(gradient_reduction, "MAX_MESSAGE_BYTES", 4 * 600)
    sizes = message_sizes([(shape, split)], slices, slices, 0)
    assert max(map(sum, sizes[0])) <= 600
