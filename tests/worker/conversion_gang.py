"""Two processes that train under one plan, go on with torch's FSDP2 from the converted checkpoint, and then under another plan.

Run as a program: `python conversion_gang.py CASES_FILE RESULT_FILE`, with GANG_WORLD=2. The cases are a JSON list of objects
with the fields of `Case`; the result is a list of equal length.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.append(str(Path(__file__).with_name("oracles")))
from eight_processes import WORLD, join, leave, start
from equivalence_gang import optimizer_of

from trainwright import documents
from trainwright.cluster import Device
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy
from trainwright.training import Training
from trainwright_worker.checkpoint_conversion import to_torch, to_worker
from trainwright_worker.executor.checkpoint import load, save
from trainwright_worker.executor.checkpoint_chunks import resident_tiles
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.layers.layer import Output
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

SEED, ROWS, STEPS = 3, 8, 2
DEVICES = tuple(Device("node", slot) for slot in range(WORLD))


@dataclass(frozen=True)
class Case:
    """Training that goes from the worker to torch and back, `STEPS` iterations on each side."""

    name: str
    model: dict
    folder: str
    optimizer: str
    learning_rate: float


def two_stages(layers: int) -> Plan:
    half = layers // 2
    runs = LayerRun(0, half, Strategy(1, 1), (2,)), LayerRun(half, layers - half, Strategy(1, 1), (2,))
    stages = tuple(Stage((device,), (run,)) for device, run in zip(DEVICES, runs, strict=True))
    return Plan(layers, ROWS, (Pipeline(ROWS // 2, 2, stages),))


def tensor_group(layers: int) -> Plan:
    run = LayerRun(0, layers, Strategy(2, 1, sequence_parallel=True), (ROWS,))
    return Plan(layers, ROWS, (Pipeline(1, ROWS, (Stage(DEVICES, (run,)),)),))


class UsersModel(nn.Module):
    """The model's layers as a user's module."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        family, shared = make_family_layers(model), {}
        places = range(len(model.layers))
        self.layers = nn.ModuleList(
            family.make(place, seed=SEED + 1, shard=TensorShard(), shared=shared) for place in places
        )

    def forward(self, rows: dict[str, torch.Tensor]) -> torch.Tensor:
        output = Output(())
        for layer in self.layers:
            output = layer(output.boundary, rows)
        return output.loss


def summed(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()


def train_with_worker(executor: PlanExecutor, first: int) -> list[float]:
    return [summed(executor.run_iteration(executor.make_batch(step))) for step in range(first, first + STEPS)]


def train_with_torch(case: Case, model: Model, rank: int, given: Path, kept: Path) -> list[float]:
    """Load a checkpoint as torch's documentation does, train, and save another one. Returns mean losses."""
    module = UsersModel(model)
    for block in module.layers[1:-1]:
        fully_shard(block)
    fully_shard(module)
    for one in (*module.layers[1:-1], module):
        one.set_force_sum_reduction_for_comms(True)  # gloo of torch 2.8 takes an average for a sum
    optimizer = optimizer_of(case, list(module.parameters()))
    weights, state = get_state_dict(module, optimizer)
    dcp.load({"model": weights, "optim": {"state": state["state"]}}, checkpoint_id=given)
    set_state_dict(module, optimizer, model_state_dict=weights, optim_state_dict=state)
    family, share, losses = make_family_layers(model), ROWS // WORLD, []
    for step in range(STEPS, 2 * STEPS):
        rows = family.rows(("tokens", "targets"), seed=SEED, iteration=step, first=rank * share, count=share)
        loss = module(rows) * (WORLD / ROWS)  # FSDP2 averages over its ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(summed(loss.item() / WORLD))
    weights, state = get_state_dict(module, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=kept)
    return losses


def on_first_rank(rank: int, convert, *arguments, **options) -> None:
    if rank == 0:
        convert(*arguments, **options)
    dist.barrier()


def state_of(executor: PlanExecutor) -> dict[tuple, torch.Tensor]:
    return {(tile.name, tile.tile.offsets): tile.values.clone() for tile in resident_tiles(executor)}


def run_case(case: Case, rank: int, groups: ProcessGroups) -> dict:
    folder = Path(case.folder)
    document = {"dtype": "float32", **case.model, "optimizer": case.optimizer, "global_batch_size": ROWS}
    training = documents.parse(document, Training)
    model, config = training.model, TrainingConfig(case.optimizer, case.learning_rate, SEED)

    def executor_of(plan: Plan) -> PlanExecutor:
        return PlanExecutor(plan, model, config, RankContext(rank, torch.device("cpu"), DEVICES), groups)

    straight = executor_of(two_stages(len(model.layers)))
    losses = train_with_worker(straight, 0)
    save(straight, folder / "worker", STEPS)
    before = state_of(straight)
    wanted = train_with_worker(straight, STEPS) + train_with_worker(straight, 2 * STEPS)
    on_first_rank(rank, to_torch, folder / "worker", folder / "torch")
    on_first_rank(rank, to_worker, folder / "torch", folder / "there-and-back", training, iteration=STEPS)
    load(straight, folder / "there-and-back")
    behind = state_of(straight)
    is_same = all(torch.equal(values, before[key]) for key, values in behind.items()) and behind.keys() == before.keys()
    losses = train_with_torch(case, model, rank, folder / "torch", folder / "from-torch")
    on_first_rank(rank, to_worker, folder / "from-torch", folder / "worker-again", training, iteration=2 * STEPS)
    other = executor_of(tensor_group(len(model.layers)))
    iteration = load(other, folder / "worker-again")
    losses += train_with_worker(other, iteration)
    return {
        "name": case.name,
        "is_same": summed(float(is_same)) == WORLD,
        "loss_error": max(abs(loss / want - 1) for loss, want in zip(losses, wanted, strict=True)),
        "updates": other.optimizer.updates,
    }


def member(rank: int, port: int, cases_file: str, result: str) -> None:
    cases = [Case(**case) for case in json.loads(Path(cases_file).read_text(encoding="utf-8"))]
    groups = join(rank, port)
    answers = []
    for case in cases:
        answers.append(run_case(case, rank, groups))
        if rank == 0:
            Path(result).write_text(json.dumps(answers), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.executor.checkpoint"))
