"""Sequence-parallel layers: each rank of a tensor group has a part of the sequence, and together they equal the full layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tensor_group import run_group

from trainwright.cluster import Emulation
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.strategy import Strategy
from trainwright.worker_api import GangNode, TrialSeriesTask
from trainwright_worker.gang.rank_assignment import gang_devices
from trainwright_worker.layers import tensor_parallel
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output
from trainwright_worker.layers.tensor_parallel import TensorShard

EMULATION = Emulation(1e9, 0.02, 1e8)
MODEL = Model.of(Gpt(layers=8, hidden_size=32, heads=4, sequence_length=64, vocabulary_size=64))
DEVICES, ROWS = 2, 4


class Through(Layer):
    """Layer that wraps the function under test, so that every rank runs it."""

    def __init__(self, shard: TensorShard, way) -> None:
        super().__init__()
        self.shard, self.way = shard, way

    def forward(self, boundary: Boundary, data: Data) -> Output:
        del data
        return Output(self.way(self.shard.collectives, *boundary))


def of_ranks(way, given: Boundary, gradients: Boundary, degree: int) -> list[tuple[Boundary, Boundary]]:
    """Return each rank's outputs and inputs' gradients; all ranks get the same inputs."""
    ranks = run_group(lambda shard: Through(shard, way), degree, given, {}, gradients)
    return [(outputs, inputs) for _, outputs, inputs, _ in ranks]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("rows", [1, 3])
def test_gathering_restores_a_split_sequence(rows: int) -> None:
    whole = numbered(rows, 6, 2), -numbered(rows, 12, 1)

    def way(group, *given):
        parts = [tensor_parallel.scatter_sequence(group, one) for one in given]
        assert [part.shape[1] for part in parts] == [2, 4]
        assert torch.equal(parts[0], given[0][:, 2 * group.index : 2 * group.index + 2])
        assert all(part.untyped_storage().nbytes() == 4 * part.numel() for part in parts)
        return tuple(one.requires_grad_() for one in tensor_parallel.gather_sequence(group, parts))

    for outputs, _ in of_ranks(way, whole, whole, 3):
        assert all(torch.equal(output, one) for output, one in zip(outputs, whole, strict=True))


@pytest.mark.parametrize("rows", [1, 3])
def test_f_all_gathers_activations_and_reduce_scatters_gradients(rows: int) -> None:
    parts, gradients = (numbered(rows, 2, 4), numbered(rows, 1, 4)), (numbered(rows, 6, 4), -numbered(rows, 3, 4))
    for index, (outputs, inputs) in enumerate(of_ranks(tensor_parallel.enter_sequence_parallel, parts, gradients, 3)):
        for part, output, gradient, found in zip(parts, outputs, gradients, inputs, strict=True):
            assert torch.equal(output, part.repeat(1, 3, 1))
            assert torch.equal(found, 3 * gradient.chunk(3, 1)[index])


def test_g_reduce_scatters_results_and_all_gathers_gradients() -> None:
    whole, gradient = numbered(2, 6, 4), numbered(2, 3, 4)

    def way(group, partial):
        return (tensor_parallel.leave_sequence_parallel(group, partial),)

    for index, ((output,), (found,)) in enumerate(of_ranks(way, (whole,), (gradient,), 2)):
        assert torch.equal(output, 2 * whole.chunk(2, 1)[index])
        assert torch.equal(found, gradient.repeat(1, 2, 1))


def two_ranks_plan(make, *, sequence_parallel: bool = True, backwards: bool = False, recompute: bool = False) -> Plan:
    """Return a plan with tensor parallelism on both devices of a node; `backwards`: tensor indices differ from group indices."""
    devices = gang_devices(make.gang(DEVICES))[:: -1 if backwards else 1]
    run = LayerRun(
        0, len(MODEL.layers), Strategy(DEVICES, 1, recompute=recompute, sequence_parallel=sequence_parallel), (ROWS,)
    )
    return Plan(len(MODEL.layers), 2 * ROWS, (Pipeline(2, ROWS, (Stage(devices, (run,)),)),))


def series(make, *plans: Plan, **fields) -> TrialSeriesTask:
    return TrialSeriesTask(make.gang(DEVICES), MODEL, plans, "sgd", warmup_iterations=1, iterations=2, **fields)


@pytest.mark.torch_processes
@pytest.mark.timeout(120)
def test_a_sequence_parallel_trial_trains_the_same_with_less_memory(worker, make) -> None:
    outcomes = [
        worker.local(series(make, two_ranks_plan(make, backwards=parted, sequence_parallel=parted)))
        for parted in (False, True)
    ]
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].errors + outcomes[1].errors
    (plain,), (parted,) = (outcome.reports[0].trials for outcome in outcomes)
    assert parted.losses == pytest.approx(plain.losses, rel=1e-5)
    memory = zip(plain.memory, parted.memory, strict=True)
    saved = [before.peak_bytes - after.peak_bytes for before, after in memory]
    # Expect half of the activations between each block's halves, in float32; gloo's threads may hold a message longer.
    between = 4 * ROWS * MODEL.family.sequence_length * MODEL.family.hidden_size
    assert min(saved) >= MODEL.family.layers * between / 2


@pytest.mark.torch_processes
@pytest.mark.timeout(120)
def test_an_emulated_devices_pace_fits_sequence_parallel_passes(worker, make) -> None:
    """A pass whose segments are not cut at its collectives raises an error."""
    plans = two_ranks_plan(make), two_ranks_plan(make, recompute=True)
    order = series(make, *plans, track_memory=False)
    nodes = (GangNode("node-a", tuple(range(DEVICES)), "emulated-x"),)
    gang = replace(order.gang, nodes=nodes, emulations=(("emulated-x", EMULATION),))
    outcome = worker.local(replace(order, gang=gang))
    assert outcome.code == 0, outcome.errors
    assert all(trial.paced_segments > 0 for trial in outcome.reports[0].trials)


@pytest.mark.torch_processes
@pytest.mark.timeout(120)
def test_messages_between_stages_of_one_tensor_degree_take_slices(worker, make) -> None:
    # A recomputing stage of two blocks keeps, of each micro-batch, their inputs and the message to the next stage.
    model, rows, layers = Model.of(Gpt(layers=4, hidden_size=64, heads=4, sequence_length=64, vocabulary_size=64)), 2, 6
    devices = gang_devices(make.gang(4))

    def plan(tensor: int, micro_batches: int) -> Plan:
        runs = (
            LayerRun(0, 3, Strategy(2, 1, recompute=True, sequence_parallel=True), (rows,)),
            LayerRun(3, 3, Strategy(tensor, 2 // tensor, sequence_parallel=tensor > 1), (tensor,) * (2 // tensor)),
        )
        stages = Stage(devices[:2], runs[:1]), Stage(devices[2:], runs[1:])
        return Plan(layers, rows * micro_batches, (Pipeline(micro_batches, rows, stages),), Schedule.GPIPE)

    plans = [plan(tensor, micro_batches) for tensor in (2, 1) for micro_batches in (16, 24)]
    outcome = worker.local(TrialSeriesTask(make.gang(4), model, tuple(plans), "sgd", warmup_iterations=1, iterations=1))
    assert outcome.code == 0, outcome.errors
    peaks = [max(rank.peak_bytes for rank in trial.memory[:2]) for trial in outcome.reports[0].trials]
    boundary = rows * 64 * 64 * 4
    growth = [(more - fewer) / 8 / boundary for fewer, more in zip(peaks[::2], peaks[1::2], strict=True)]
    assert growth == [pytest.approx(2 / 2 + part, abs=0.2) for part in (1 / 2, 1)]
