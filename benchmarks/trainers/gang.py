"""Processes that run every plan with the executor and another trainer in turn: first losses, then seconds of iterations.

Both trainers are in the same processes and take turns in every round, so other load of the machine meets both.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist

from trainers.comparison import TrainerComparison
from trainers.plans import MODELS, PLANS, UniformPlan
from trainwright.model import Model
from trainwright_worker.device import barrier
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=2)
LOSS_ITERATIONS = 3
"""Iterations whose losses are compared; they warm up both trainers too."""
TRAINING = TrainingConfig(optimizer="adam", learning_rate=1e-3, seed=1)


TRAINERS = {"torch": "trainers.torch_trainer:TorchTrainer", "torchtitan": "trainers.titan_trainer:TitanTrainer"}
"""Classes of the trainers that the executor is compared with; torchtitan is installed in an environment of its own."""


class Trainer(Protocol):
    """Trainer of one plan on one rank."""

    def make_batch(self, iteration: int) -> Any:
        """Return this rank's data of an iteration."""

    def run_iteration(self, batch: Any) -> float:
        """Run one iteration. Returns this rank's contribution to the mean loss."""


class OtherTrainer(Trainer, Protocol):
    """Trainer that the executor is compared with."""

    def __init__(self, plan: UniformPlan, model: Model, training: TrainingConfig) -> None: ...

    @staticmethod
    def knows(plan: UniformPlan, model: Model) -> bool:
        """Return whether it trains the model under the plan."""


def compare_trainers(trainer: str, processes: int, rounds: int) -> list[TrainerComparison]:
    """Run all plans of that many processes, in one gang. Raises RuntimeError if a process fails."""
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    members = [
        context.Process(target=_run_rank, args=(rank, trainer, processes, store.port, rounds, sender), daemon=True)
        for rank in range(processes)
    ]
    for member in members:
        member.start()
    sender.close()
    try:
        found: list[TrainerComparison] = receiver.recv()
    except EOFError:
        raise RuntimeError("a process of the gang failed; its traceback is above") from None
    for member in members:
        member.join()
    return found


def _run_rank(  # noqa: PLR0913, PLR0917 (the arguments of a process)
    rank: int, trainer: str, processes: int, port: int, rounds: int, sender: Connection
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    module, name = TRAINERS[trainer].split(":")
    other: type[OtherTrainer] = getattr(import_module(module), name)
    found = []
    for model in MODELS:
        found += _compare_on_model(trainer, other, model, processes, rounds)
        gc.collect()
    if rank == 0:
        sender.send(found)
    sender.close()
    barrier(CPU)
    dist.destroy_process_group()


def _compare_on_model(
    trainer: str, other: type[OtherTrainer], model_name: str, processes: int, rounds: int
) -> list[TrainerComparison]:
    """Compare the trainers of all plans; a round runs one iteration of each, every second round in reverse order."""
    model = MODELS[model_name]
    plans = [plan for plan in PLANS[processes] if other.knows(plan, model)]
    groups = [ProcessGroups(TIMEOUT) for _ in plans]
    trainers: list[Trainer] = []
    for plan, own_groups in zip(plans, groups, strict=True):
        context = RankContext(dist.get_rank(), CPU)
        trainers.append(PlanExecutor(plan.plan(model), model, TRAINING, context, own_groups))
        trainers.append(other(plan, model, TRAINING))
    losses: list[list[float]] = [[] for _ in trainers]
    seconds: list[list[float]] = [[] for _ in trainers]
    gc.collect()
    gc.disable()
    for iteration in range(LOSS_ITERATIONS + rounds):
        for number in range(len(trainers)) if iteration % 2 else reversed(range(len(trainers))):
            elapsed, loss = _time_iteration(trainers[number], iteration)
            if iteration < LOSS_ITERATIONS:
                losses[number].append(loss)
            else:
                seconds[number].append(elapsed)
    gc.enable()
    for one in groups:
        one.close()
    return [
        TrainerComparison(
            trainer, model_name, str(plan), processes, tuple(losses[2 * place]), tuple(losses[2 * place + 1]),
            tuple(seconds[2 * place]), tuple(seconds[2 * place + 1]),
        )
        for place, plan in enumerate(plans)
    ]  # fmt: skip


def _time_iteration(trainer: Trainer, iteration: int) -> tuple[float, float]:
    """Return the slowest rank's seconds, and the mean loss over the batch's rows."""
    batch = trainer.make_batch(iteration)
    barrier(CPU)
    begin = time.perf_counter()
    loss = torch.tensor(trainer.run_iteration(batch), dtype=torch.float64)
    slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(loss)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest), float(loss)
