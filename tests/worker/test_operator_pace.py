"""Emulated seconds of stages with shardings of operators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from operator_plans import MEGATRON, given

from trainwright.cluster import Emulation
from trainwright.families import Gpt
from trainwright.loop_nests.layer_wiring import wire_layer
from trainwright.model import Model
from trainwright_worker.emulation import Pacer
from trainwright_worker.executor.emulated_pacing import EmulatedStagePace, pace_operators
from trainwright_worker.layers.operators.operator_layer import OperatorLayer
from trainwright_worker.layers.operators.operator_pace import OperatorPace
from trainwright_worker.layers.operators.resharding import Mesh
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

EMULATION = Emulation(1e9, 0.004, 1e8)
MODEL = Model.of(Gpt(1, 32, 4, 8, 64))


def stage_of(*layers: int) -> SimpleNamespace:
    """Return what pacing reads of a stage on a mesh of 2 × 2."""
    specs = given(MODEL, (2, 2), 4, MEGATRON, (0, 3)).operators
    assert specs is not None
    family = make_family_layers(MODEL)
    group = SimpleNamespace(index=0, size=2)
    mesh = Mesh((2, 2), (0, 0), (group, group, group))  # type: ignore[arg-type]
    made = []
    for layer in layers:
        whole = family.make(layer, seed=0, shard=TensorShard(), shared={})
        wiring = wire_layer(MODEL, MODEL.kind_of(layer))
        made.append(SimpleNamespace(number=layer, module=OperatorLayer(whole, specs.layers[layer], wiring, mesh)))
    return SimpleNamespace(layers=made, updated_parameters=1000)


def test_operators_share_what_the_layer_takes_when_divided_as_they_are() -> None:
    stage = stage_of(1)
    pace = pace_operators(EMULATION, MODEL, stage, 4, Pacer(active=True))
    assert (pace.forward, pace.update) == (None, (EMULATION.update_seconds(1000),))
    seconds = stage.layers[0].module.operators.pace.seconds
    flops = sum(operator.forward_flops_per_row for operator in MODEL.kind_of(1).operators)
    assert sum(seconds.values()) == pytest.approx(
        EMULATION.compute_seconds(flops * 4 / 4)
    )  # all with FLOPs are divided by 4


def test_layers_without_flops_take_their_floor() -> None:
    stage = stage_of(0)
    pace_operators(EMULATION, MODEL, stage, 4, Pacer(active=True))
    assert sum(stage.layers[0].module.operators.pace.seconds.values()) == pytest.approx(EMULATION.floor_seconds)


def test_real_devices_are_not_paced() -> None:
    stage = stage_of(1)
    assert pace_operators(None, MODEL, stage, 4, Pacer(active=False)) == EmulatedStagePace()
    assert stage.layers[0].module.operators.pace is None


def test_backward_states_twice_the_seconds_when_it_begins() -> None:
    stated: list[float] = []
    value = torch.ones(2, requires_grad=True)
    (marked,) = OperatorPace({"down": 0.5}, stated.append).state("down", (value * 3.0,))
    assert stated == [0.5]
    marked.sum().backward()
    assert stated == [0.5, 1.0]
    assert value.grad is not None
    assert value.grad.tolist() == [3.0, 3.0]


def test_pass_without_given_segments_takes_what_is_stated_until_each_message(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("trainwright_worker.emulation.time", SimpleNamespace(
        perf_counter=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    ))  # fmt: skip
    pacer = Pacer(active=True)
    pacer.start(None, waited_seconds=1.0)
    pacer.add(0.25)
    pacer.add(0.25)
    pacer.pause()
    assert now[0] == pytest.approx(0.5, abs=1e-3)
    now[0] += 1.0  # a message
    pacer.resume()
    pacer.pause()  # another one directly after
    pacer.resume()
    pacer.add(0.125)
    pacer.end()
    assert now[0] == pytest.approx(1.625, abs=1e-3)
    assert (pacer.paced, pacer.late) == (2, 0)
