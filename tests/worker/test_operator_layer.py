"""Layers whose operators are sharded over a mesh: their boundaries at the ends of a stage, and what attention reads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from operator_plans import T5_MIXED, given
from tensor_group import Meeting, Thread, run_mesh
from torch import nn

from trainwright.families import T5, Gpt
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.model import Model
from trainwright_worker.layers.operators.layouts import REPLICATED
from trainwright_worker.layers.operators.operator_layer import OperatorLayer, StageEnd
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, ROWS, OperatorCall, Value
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


@dataclass(frozen=True)
class Counted(Thread):
    """Group that counts the values that a rank brings to each all-gather."""

    gathered: list[int] = field(default_factory=list)

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        self.gathered.append(part.numel())
        return super().all_gather(part)


def test_attention_with_biases_gathers_keys_and_values_alone_when_queries_are_divided() -> None:
    model = Model.of(T5(1, 32, 4, 8, 64))
    loops = {**dict.fromkeys(T5_MIXED, ".."), "query_key_value": ".s", "attention": ".s"}
    specs = given(model, (1, 2), 4, loops, (1, 2)).operators
    assert specs is not None
    whole = make_family_layers(model).make(1, seed=0, shard=TensorShard(), shared={})

    def run(mesh: Mesh) -> list[int]:
        first, second, both = mesh.groups
        assert isinstance(second, Thread)
        counted = Counted(second.meeting, second.index, second.size)
        own = replace(mesh, groups=(first, counted, both))
        layer = OperatorLayer(whole, specs.layers[0], wire_layer(model, model.kind_of(1)), own)
        for attribute in layer.operators.placed:
            layer.register_parameter(attribute, nn.Parameter(whole.get_parameter(attribute).detach()))
        products = Value((torch.randn(4, 4, 32),) * 3, (REPLICATED, POSITIONS))
        layer.operators.operators["attention"].compute(OperatorCall(layer.operators, "attention", (products,), {}))
        return counted.gathered

    assert run_mesh((1, 2), run) == [[2 * 4 * 4 * 32]] * 2
