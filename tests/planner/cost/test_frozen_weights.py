"""Price of weights that are not trained: their weights alone, no gradients, state or update, and no backward before others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainwright import documents
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.cost.stage_tables import StageSpans, StageTables
from trainwright.families import Custom, CustomKind
from trainwright.families.custom import CustomChecks
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.search import SEARCHES, NoFeasiblePlan, Problem, run
from trainwright.strategy import Sharding, Strategy
from trainwright.throughput import flops_per_row

BASE, ADAPTER, HEAD = 10**8, 10**6, 10**5
DEVICES = 4


def kind(name: str, parameters: int, frozen: int, **fields) -> CustomKind:
    return CustomKind(name, parameters, 2e3 * parameters, 10**4, 4e4, frozen_parameters=frozen, **fields)


def family(*, frozen: bool) -> Custom:
    """Return two frozen layers, four with adapters and a head; or the same whose weights are all trained."""
    encoder = kind("Encoder", BASE, BASE * frozen, without_backward=frozen)
    block = kind("Block", BASE + ADAPTER, BASE * frozen)
    head = replace(kind("Head", HEAD, 0), output_elements_per_row=1)
    return Custom("a:b", (encoder, block, head), ("Encoder",) * 2 + ("Block",) * 4 + ("Head",), checks=CustomChecks())


def context(*, frozen: bool, dtype: Dtype = Dtype.BFLOAT16, memory: int = 10**12) -> CostContext:
    model = Model.of(family(frozen=frozen), dtype)
    accelerator = "NVIDIA A100-SXM4-40GB"
    port = Port(1e-5, 1e10)
    cluster = Cluster((Accelerator(accelerator, memory),), (Node("node", accelerator, DEVICES, port, port),))
    profiles = estimate_profiles(model, [accelerator], tensor_degrees=[1], rows=[1, 2, 4, 8])
    return CostContext(model, cluster, profiles)


def plan(sharding: Sharding = Sharding.NONE) -> Plan:
    devices = tuple(Device("node", slot) for slot in range(DEVICES))
    layers = LayerRun(0, 7, Strategy(1, DEVICES, sharding=sharding), (2,) * DEVICES)
    return Plan(7, 16, (Pipeline(2, 8, (Stage(devices, (layers,)),)),))


def alone(*, recompute: bool) -> Plan:
    """Return a plan of one device, which reduces nothing."""
    layers = LayerRun(0, 7, Strategy(1, 1, recompute=recompute), (8,))
    return Plan(7, 16, (Pipeline(2, 8, (Stage((Device("node", 0),), (layers,)),)),))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("sharding", list(Sharding))
def test_memory_counts_frozen_weights_in_the_models_format_alone(dtype: Dtype, sharding: Sharding) -> None:
    trained, whole = 4 * ADAPTER + HEAD, 6 * BASE
    parts = estimate_with_context(plan(sharding), context(frozen=True, dtype=dtype)).memory_parts[0]
    weights = (trained + whole) * dtype.num_bytes
    optimizer = trained * (8 + (4 if dtype is not Dtype.FLOAT32 else 0))
    assert parts.weights_bytes == weights / (DEVICES if sharding is Sharding.ZERO3 else 1)
    assert parts.optimizer_bytes == optimizer / (1 if sharding is Sharding.NONE else DEVICES)
    assert parts.gradients_bytes == 4 * trained


def test_nothing_is_computed_reduced_or_updated_for_frozen_weights() -> None:
    some, every = (estimate_with_context(plan(), context(frozen=frozen)) for frozen in (True, False))
    assert some.iteration_seconds < 0.6 * every.iteration_seconds
    model = Model.of(family(frozen=True))
    assert [round(kind.backward_share, 2) for kind in model.kinds] == [0.0, 0.5, 1.0]
    assert flops_per_row(model) < 2 / 3 * flops_per_row(Model.of(family(frozen=False)))


def test_layers_without_backward_are_not_recomputed() -> None:
    seconds = [
        [
            estimate_with_context(alone(recompute=recompute), context(frozen=frozen)).iteration_seconds
            for recompute in (False, True)
        ]
        for frozen in (True, False)
    ]
    added = [recomputed - plain for plain, recomputed in seconds]
    assert added[0] == pytest.approx(4 / 6 * added[1], rel=0.02)


def test_tables_of_searches_count_what_the_exact_estimate_does() -> None:
    cost = context(frozen=True)
    spans = StageSpans(cost.model, tuple(range(8)))
    tables, divided = StageTables(cost, spans), cost.divided_at(1)
    for number, (first, end) in enumerate(zip(*spans.layers, strict=True)):
        assert tables.frozen_values[number] == divided.frozen_parameters(first, end)
        assert tables.resident_values(1)[number] == divided.resident_parameters(first, end)
    assert np.array_equal(divided.parameters_by_kind - divided.trained_by_kind, [BASE, BASE, 0])


@pytest.mark.parametrize("planner", SEARCHES)
def test_every_planner_finds_room_for_a_model_that_is_mostly_frozen(planner: str) -> None:
    """Frozen weights take 1.2 GB on each device; trained ones would take 9.6 GB in all, 2.4 GB on each of four at best."""
    some, every = (
        Problem(cost.cluster, cost.model, cost.profiles, 16)
        for cost in (context(frozen=frozen, memory=2 * 10**9) for frozen in (True, False))
    )
    assert run(planner, some, top=1)[0].estimate.feasible
    with pytest.raises(NoFeasiblePlan):
        run(planner, every, top=1)


def test_a_description_omits_what_is_zero_and_refuses_more_than_there_is() -> None:
    dumped = documents.dumps(Model.of(family(frozen=False)))
    assert "frozen" not in dumped
    assert "without_backward" not in dumped
    with pytest.raises(ValueError, match="frozen_parameters of Block must be among its 5 values"):
        kind("Block", 5, 6)
