"""Layers whose operators are sharded over a mesh: their boundaries at the ends of a stage."""

from __future__ import annotations

import torch
from operator_plans import given
from tensor_group import Meeting, Thread, run_mesh
from torch import nn

from trainwright.families import Gpt
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.model import Model
from trainwright_worker.layers.operators.layouts import REPLICATED
from trainwright_worker.layers.operators.operator_layer import OperatorLayer, StageEnd
from trainwright_worker.layers.operators.operator_tensors import ROWS
from trainwright_worker.layers.operators.resharding import Mesh
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

MODEL = Model.of(Gpt(1, 32, 4, 8, 64))


def test_boundary_leaves_as_degrees_divide_it_where_no_mesh_dimension_does() -> None:
    specs = given(MODEL, (1, 4), 4, {"tokens": ".w", "positions": ".w"}, (0, 1)).operators
    assert specs is not None
    family = make_family_layers(MODEL)
    data = family.rows(("tokens",), seed=0, iteration=0, first=0, count=4)
    whole = family.make(0, seed=0, shard=TensorShard(), shared={})
    (expected,) = whole((), data).boundary
    replicas, groups = [Meeting(2), Meeting(2)], [Meeting(2), Meeting(2)]

    def run(mesh: Mesh) -> None:
        replica, tensor = divmod(mesh.coordinates[1], 2)
        of_degrees = Thread(replicas[tensor], replica, 2), Thread(groups[replica], tensor, 2)
        degrees = Mesh((2, 2), (replica, tensor), (*of_degrees, mesh.groups[2]))
        layer = OperatorLayer(whole, specs.layers[0], wire_layer(MODEL, MODEL.kind_of(0)), mesh)
        for attribute, placed in layer.operators.placed.items():
            part = mesh.own_part(whole.get_parameter(attribute).detach(), placed.layout).clone()
            layer.register_parameter(attribute, nn.Parameter(part))
        layer.last_end = StageEnd(degrees, (ROWS, REPLICATED))
        (left,) = layer((), data).boundary
        torch.testing.assert_close(left, expected[2 * replica : 2 * replica + 2])
        left.sum().backward()
        gradient = layer.get_parameter("positions").grad
        torch.testing.assert_close(gradient, torch.full_like(layer.get_parameter("positions"), 4.0))

    run_mesh((1, 4), run)
