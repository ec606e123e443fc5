"""Operators that a user's layers issue, as described, and the times that follow from them."""

from __future__ import annotations

import own_gpt
import plain_model
import pytest
import scan
from torch import Tensor, nn

from trainwright.accelerators.efficiency import BACKWARD_KERNEL_RATIO
from trainwright.accelerators.roofline import estimate_profiles
from trainwright.cluster import Accelerator, Cluster, Device, Link, Node
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.families import Custom, Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.runtime import Runtime
from trainwright.strategy import Strategy
from trainwright_worker.model_description.description import describe


def test_a_recurrence_takes_as_long_as_the_host_issues_its_operators() -> None:
    """Each step multiplies and adds; before and after them are zeros and a stack."""
    model = Model.of(describe("scan:scan"), Dtype.FLOAT16)
    recurrence = model.kind_of(0)
    assert recurrence.forward_kernels == 2 * scan.STEPS + 2
    assert 4 * scan.STEPS < recurrence.backward_kernels < 6 * scan.STEPS
    (profile, *_) = estimate_profiles(model, ["A100-40"], tensor_degrees=[1], rows=[1]).layers
    assert profile.forward_seconds == Runtime().host_seconds_per_operator * recurrence.forward_kernels
    issued = BACKWARD_KERNEL_RATIO * recurrence.backward_kernels
    assert profile.backward_seconds == pytest.approx(Runtime().host_seconds_per_operator * issued)


def test_a_block_issues_as_many_operators_as_the_family_has() -> None:
    """Views are no kernels, and attention is one."""
    (block,) = (kind for kind in Model.of(describe("own_gpt:small")).kinds if kind.name == "Block")
    family = Gpt(layers=2, hidden_size=64, heads=4, sequence_length=32, vocabulary_size=16_384)
    assert block.forward_kernels == len(Model.of(family).kind("block").operators)


class Block(nn.Module):
    """Counts the forwards of all blocks."""

    forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(plain_model.WIDTH, plain_model.WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        Block.forwards += 1
        return self.inner(values)


def test_equal_layers_are_counted_and_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A further one of them takes the forward that shows what it hands on, and no other."""
    forwards = {}
    for blocks in (2, 8):
        monkeypatch.setattr(plain_model, "stack", lambda n=blocks: plain_model.model(*[Block] * n), raising=False)
        before = Block.forwards
        assert len(describe("plain_model:stack", check_seconds=0).layers) == blocks + 2
        forwards[blocks] = Block.forwards - before
    assert forwards[8] - forwards[2] == 8 - 2


@pytest.fixture(scope="module", params=["medium", "medium_tied"])
def own_medium(request: pytest.FixtureRequest) -> Custom:
    return describe(f"own_gpt:{request.param}", check_seconds=0)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
@pytest.mark.parametrize("accelerator", ["A100-40", "V100-32", "T4"])
def test_gpt2_medium_takes_as_long_as_the_family(own_medium: Custom, accelerator: str, dtype: Dtype) -> None:
    """Both are priced on eight devices: in one stage, and in four with recompute, where the loss weighs most."""
    sizes = own_gpt.MEDIUM
    family = Gpt(sizes.layers, sizes.hidden, sizes.heads, sizes.sequence, sizes.vocabulary)
    for stages in (1, 4):
        seconds, expected = (
            seconds_of_iteration(Model.of(model, dtype), accelerator, stages) for model in (own_medium, family)
        )
        assert seconds == pytest.approx(expected, rel=0.02), stages


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT16])
def test_gpt2_medium_keeps_as_much_as_the_family(own_medium: Custom, dtype: Dtype) -> None:
    """Log-probabilities and statistics are float32 in half formats, too."""
    sizes = own_gpt.MEDIUM
    family = Model.of(Gpt(sizes.layers, sizes.hidden, sizes.heads, sizes.sequence, sizes.vocabulary), dtype)
    for own, kind in zip(Model.of(own_medium, dtype).kinds, family.kinds, strict=True):
        assert own.saved_bytes_per_row(dtype) == pytest.approx(kind.saved_bytes_per_row(dtype), rel=0.005), kind.name


def seconds_of_iteration(model: Model, accelerator: str, stages: int) -> float:
    """Return the predicted seconds of 64 rows in micro-batches of four, on stages of equal numbers of replicas."""
    nodes = (Node("node", accelerator, 8),)
    cluster = Cluster((Accelerator(accelerator, 40 * 10**9),), nodes, (Link("node", "node", 1e-5, 200e9),))
    replicas = 8 // stages
    cuts = [round(stage * len(model.layers) / stages) for stage in range(stages + 1)]
    strategy = Strategy(1, replicas, recompute=stages > 1)
    parts = tuple(
        Stage(
            tuple(Device("node", replicas * stage + number) for number in range(replicas)),
            (LayerRun(cuts[stage], cuts[stage + 1] - cuts[stage], strategy, (4,) * replicas),),
        )
        for stage in range(stages)
    )
    micro_batches = 64 // (4 * replicas)
    plan = Plan(len(model.layers), 64, (Pipeline(micro_batches, 4 * replicas, parts),))
    profiles = estimate_profiles(model, [accelerator], tensor_degrees=[1], rows=[4])
    return estimate_with_context(plan, CostContext(model, cluster, profiles, "adam", Runtime())).iteration_seconds
