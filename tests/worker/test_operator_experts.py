"""Experts on devices of their own whose ranks choose for the same tokens."""

from __future__ import annotations

import pytest
import torch
from operator_plans import EXPERTS, given
from tensor_group import run_mesh
from torch import nn

from trainwright.families import Moe
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.model import Model
from trainwright_worker.layers.operators import expert_operators
from trainwright_worker.layers.operators.expert_operators import ChoiceValue
from trainwright_worker.layers.operators.operator_layer import OperatorLayer
from trainwright_worker.layers.operators.operator_tensors import OperatorCall
from trainwright_worker.layers.operators.resharding import Mesh
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

MODEL = Model.of(Moe(1, 32, 4, 8, 64, experts=4, intermediate_size=32))


@pytest.mark.parametrize(("dispatch", "agrees"), [(".x", True), ("..", False)])
def test_ranks_that_round_differently_take_one_choice_when_pairs_move(*, dispatch: str, agrees: bool) -> None:
    loops = {**dict.fromkeys(EXPERTS, ".."), "dispatch": dispatch, "combination": dispatch}
    specs = given(MODEL, (1, 2), 4, loops, (1, 2)).operators
    assert specs is not None
    family = make_family_layers(MODEL)
    whole = family.make(1, seed=0, shard=TensorShard(), shared={})
    torch.manual_seed(0)
    logits = torch.randn(4, 8, 4)

    def run(mesh: Mesh) -> torch.Tensor:
        layer = OperatorLayer(whole, specs.layers[0], wire_layer(MODEL, MODEL.kind_of(1)), mesh)
        for attribute in layer.operators.placed:
            layer.register_parameter(attribute, nn.Parameter(whole.get_parameter(attribute).detach()))
        own = logits if mesh.coordinates[1] == 0 else -logits
        router = expert_operators.Value((own,), layer.operators.output_layout("router"))
        value = expert_operators.choose(OperatorCall(layer.operators, "choice", (router,), {}))
        assert isinstance(value, ChoiceValue)
        return value.experts

    first, second = run_mesh((1, 2), run)
    assert torch.equal(first, second) == agrees
