"""Eight processes that run many plans in turn and compare them with one process on the whole batch.

Run as a program: `python equivalence_gang.py RESULT_FILE`. The result is a JSON object: plan name -> errors.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright.cluster import Device
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Order, Pipeline, Plan, Schedule, Stage
from trainwright_worker.batches import token_rows
from trainwright_worker.executor.iteration import Executor, Host, Training
from trainwright_worker.layers.gpt import Block, make_layer
from trainwright_worker.layers.tensor_parallel import TensorShard

WORLD = 8
STEPS = 10
GPT = Gpt(layers=6, hidden_size=32, heads=8, sequence_length=16, vocabulary_size=64)
MODEL = Model.of(GPT)
BATCH = 24


def plan(*stages, micro_batches: int = 4, schedule: Schedule = Schedule.ONE_FORWARD_ONE_BACKWARD) -> Plan:
    """Stages as (layers, data, tensor, rows, order); devices are numbered through."""
    first = device = 0
    made = []
    for layers, data, tensor, rows, *order in stages:
        devices = tuple(Device("node", device + i) for i in range(data * tensor))
        made.append(Stage(devices, (LayerRun(first, layers, tensor, data, rows, *order),)))
        first, device = first + layers, device + data * tensor
    return Plan(8, BATCH, (Pipeline(micro_batches, BATCH // micro_batches, tuple(made)),), schedule)


INNER, OUTER, GPIPE = Order.TENSOR_INNER, Order.DATA_INNER, Schedule.GPIPE
PLANS = {
    "pipeline": plan(*[(1, 1, 1, (6,))] * 8),
    "pipeline-gpipe": plan(*[(1, 1, 1, (6,))] * 8, schedule=GPIPE),
    "data-uneven-rows": plan((8, 8, 1, (3, 2, 2, 1, 1, 1, 1, 1)), micro_batches=2),
    "tensor": plan((8, 1, 8, (6,))),
    "uneven-stages": plan((1, 2, 1, (3, 3)), (4, 2, 1, (3, 3)), (2, 2, 1, (3, 3)), (1, 2, 1, (3, 3))),
    "all-three": plan((4, 2, 2, (3, 3), INNER), (4, 2, 2, (3, 3), INNER)),
    "all-three-uneven-data-inner-gpipe": plan((3, 2, 2, (4, 2), OUTER), (5, 2, 2, (1, 5), OUTER), schedule=GPIPE),
    "mixed-degrees": plan((2, 3, 1, (3, 2, 1)), (4, 2, 2, (1, 5), OUTER), (2, 1, 1, (6,))),
    "tied-across-tensor-degrees": plan((2, 1, 2, (6,)), (4, 1, 4, (6,)), (2, 2, 1, (2, 4))),
    "growing-tensor-degree": plan((3, 2, 1, (5, 1)), (2, 1, 2, (6,)), (3, 1, 4, (6,)), schedule=GPIPE),
    "one-micro-batch": plan((4, 4, 1, (6,) * 4), (4, 2, 2, (12, 12)), micro_batches=1),
}
TRAININGS = {"adam": ("mixed-degrees", 1e-3), "sgd": ("all-three-uneven-data-inner-gpipe", 0.05)}


def reference(training: Training, steps: int) -> tuple[list[float], dict, dict]:
    """One process, one forward and one backward of the whole batch a step: losses, first gradients, last weights."""
    shared: dict = {}
    layers = [make_layer(MODEL, i, seed=training.seed, shard=TensorShard(), shared=shared) for i in range(8)]
    parameters = list({id(p): p for layer in layers for p in layer.parameters()}.values())
    if training.optimizer == "adam":
        optimizer = torch.optim.Adam(parameters, lr=training.learning_rate)
    else:
        optimizer = torch.optim.SGD(parameters, lr=training.learning_rate, momentum=0.9)
    losses, gradients = [], {}
    for step in range(steps):
        tokens, targets = token_rows(GPT, seed=training.seed, iteration=step, first=0, count=BATCH)
        hidden = tokens
        for layer in layers[:-1]:
            hidden = layer(hidden)
        loss = layers[-1](hidden, targets, BATCH * GPT.sequence_length)
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = {key: p.grad.clone() for key, p in named(layers, 0).items()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {key: p.detach().clone() for key, p in named(layers, 0).items()}


def named(layers, first: int) -> dict:
    return {(first + i, name): p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}


def whole_weights(executor: Executor, *, gradients: bool) -> list[dict]:
    """Every replica's weights (or gradients) put together from its tensor parts, one mapping for each replica."""
    mine = {
        key: (p.grad if gradients else p.detach())
        for key, p in named(executor.layers.layers, executor.stage.first).items()
    }
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, mine)
    found = []
    for stage in executor.mesh.stages:
        for replica in stage.replicas:
            parts = [everyone[rank] for rank in replica]
            for key in parts[0]:
                dimension = Block.SPLIT_DIMENSION.get(key[1])
                if dimension is None:
                    found += [{key: part[key]} for part in parts]
                else:
                    found.append({key: torch.cat([part[key] for part in parts], dimension)})
    return found


def worst(found: list[dict], expected: dict) -> tuple[float, int]:
    """The largest error relative to the largest value of the same weight, and how many weights were compared."""
    seen = {key for weights in found for key in weights}
    assert seen == set(expected), seen ^ set(expected)
    errors = [
        ((value - expected[key]).abs().max() / expected[key].abs().max()).item()
        for weights in found
        for key, value in weights.items()
    ]
    return max(errors), len(errors)


def absolute(found: list[dict], expected: dict) -> float:
    return max((value - expected[key]).abs().max().item() for weights in found for key, value in weights.items())


def run(name: str, training: Training, rank: int, steps: int) -> tuple[list[float], list[dict], list[dict]]:
    executor = Executor(PLANS[name], MODEL, training, Host(rank, torch.device("cpu"), timeout=timedelta(seconds=60)))
    losses, gradients = [], []
    for step in range(steps):
        loss = torch.tensor([executor.run(executor.prepare(step))], dtype=torch.float64)
        dist.all_reduce(loss)
        losses.append(loss.item())
        if step == 0:
            gradients = whole_weights(executor, gradients=True)
    weights = whole_weights(executor, gradients=False)
    dist.barrier()
    executor.close()
    return losses, gradients, weights


def member(rank: int, port: int, result: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    answers: dict = {"plans": {}, "trainings": {}}
    losses, gradients, _ = reference(Training("sgd"), 1)
    for name in PLANS:
        found_losses, found, _ = run(name, Training("sgd"), rank, 1)
        error, compared = worst(found, gradients)
        answers["plans"][name] = {
            "loss_error": abs(found_losses[0] / losses[0] - 1),
            "gradient_error": error,
            "compared": compared,
        }
    for optimizer, (name, rate) in TRAININGS.items():
        training = Training(optimizer, rate, seed=3)
        expected_losses, _, expected = reference(training, STEPS)
        found_losses, _, found = run(name, training, rank, STEPS)
        answers["trainings"][optimizer] = {
            "weight_error": absolute(found, expected),
            "losses": found_losses,
            "expected_losses": expected_losses,
        }
    dist.barrier()
    if rank == 0:
        Path(result).write_text(json.dumps(answers), encoding="utf-8")
    dist.destroy_process_group()


def main() -> int:
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["trainwright_worker.process"])
    processes = [context.Process(target=member, args=(rank, store.port, sys.argv[1])) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return 0 if codes == [0] * WORLD else 1


if __name__ == "__main__":
    sys.exit(main())
