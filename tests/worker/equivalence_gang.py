"""Eight processes that run many plans in turn and compare them with one process on the whole batch.

Run as a program: `python equivalence_gang.py CASES_FILE RESULT_FILE`. The cases are a JSON list of objects with the
fields of `Case`; the result is a list of as many objects: errors, or what went wrong.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).with_name("oracles")))
from eight_processes import WORLD, device_of, join, leave, start
from one_process import OneProcess

from trainwright import documents
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.training import Training as TrainingDocument
from trainwright_worker.executor.groups import Groups, wanted_groups
from trainwright_worker.executor.iteration import Executor, Host, Training
from trainwright_worker.executor.mesh import Mesh
from trainwright_worker.executor.unit import Unit


@dataclass(frozen=True)
class Case:
    """A plan to run.

    Attributes:
        model: a training document without its batch.
        steps: iterations; gradients are compared after the first one, weights and losses after all.
        by_piece: whether the reference computes the plan's pieces of rows apart (batch normalisation).
    """

    name: str
    plan: Plan
    model: dict
    steps: int = 1
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    clip_norm: float | None = None
    by_piece: bool = False
    sequence_parallel: bool = False


def optimizer_of(case: Case, parameters: list) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=case.learning_rate)
    return torch.optim.SGD(parameters, lr=case.learning_rate, momentum=0.9)


def expected(case: Case, model: Model) -> dict:
    """Losses, first gradients, last weights and last optimizer states of one process."""
    one = OneProcess(model, seed=3)
    named = one.named()
    optimizer = optimizer_of(case, list(named.values()))
    losses, gradients = [], {}
    for step in range(case.steps):
        optimizer.zero_grad()
        loss = one.loss(step, case.plan.global_batch_size, case.plan if case.by_piece else None)
        loss.backward()
        if step == 0:
            gradients = {name: parameter.grad.clone() for name, parameter in named.items()}
        if case.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(named.values()), case.clip_norm)
        optimizer.step()
        losses.append(loss.item())
    states = {
        name: [value for value in optimizer.state[parameter].values() if value is not None and value.numel() > 1]
        for name, parameter in named.items()
    }
    weights = {name: parameter.detach() for name, parameter in named.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights, "states": states}


def own_part(unit: Unit, whole: dict[str, torch.Tensor], place, run) -> torch.Tensor:
    """What this rank's part of the unit should hold, from whole tensors by name."""
    parts = []
    for weight in unit.weights:
        value = whole[weight.name]
        if weight.split is not None:
            value = value.chunk(run.tensor, weight.split)[place.tensor]
        parts.append(value.flatten())
    flat = torch.zeros(unit.part * unit.replicas.count)
    torch.cat(parts, out=flat[: unit.size])
    return flat[unit.low : unit.high]


def scales(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For every value the largest of its weight, but at least a thousandth of the largest of all.

    Some gradients are zero but for rounding (a bias of keys), and have no digits to compare.
    """
    least = 1e-3 * max(value.abs().max() for value in whole.values())
    return {name: torch.full_like(value, max(value.abs().max(), least)) for name, value in whole.items()}


class Comparison:
    """The largest errors of one rank, each relative to the largest value of the same weight."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.seen: set[str] = set()

    def error(self, found: list[torch.Tensor], whole: dict[str, torch.Tensor]) -> float:
        executor, scale = self.executor, scales(whole)
        worst = 0.0
        for unit, value in zip(executor.stage.units, found, strict=True):
            self.seen |= {weight.name for weight in unit.weights}
            run = self._run_of(unit)
            place = run.position(executor.rank)
            want, least = own_part(unit, whole, place, run), own_part(unit, scale, place, run)
            worst = max(worst, ((value.cpu() - want).abs() / least.clamp_min(1e-30)).max().item())
        return worst

    def _run_of(self, unit: Unit):
        for layer in self.executor.stage.layers:
            if any(held.unit is unit for held in layer.held):
                return layer.run
        raise AssertionError("a unit that no layer holds")


def run_case(case: Case, model: Model, want: dict, rank: int, groups: Groups) -> dict:
    """What a member finds; ranks beyond the plan's devices only help to make groups."""
    errors = {"gradient_error": 0.0, "weight_error": 0.0, "state_error": 0.0}
    found = {"losses": [], **errors, "seen": set(), "parted": 0}
    mesh = Mesh.of(case.plan)
    if rank not in mesh.ranks:
        groups.make(wanted_groups(mesh, model))
        return {**found, "losses": [0.0] * case.steps}
    training = Training(case.optimizer, case.learning_rate, 3, case.clip_norm, case.sequence_parallel)
    host = Host(rank, device_of(rank))
    executor = Executor(case.plan, model, training, host, groups)
    found["parted"] = sum(layer.is_sequence_parallel for layer in executor.stage.layers)
    comparison = Comparison(executor)
    for step in range(case.steps):
        found["losses"].append(executor.run(executor.prepare(step)))
        if step == 0 and case.clip_norm is None:
            gradients = [unit.gradient for unit in executor.stage.units]  # float16's are unscaled by now
            found["gradient_error"] = comparison.error(gradients, want["gradients"])
    units = executor.stage.units
    found["weight_error"] = comparison.error([unit.master for unit in units], want["weights"])
    for number in range(len(executor.optimizer.states[0])):
        whole = {name: states[number] for name, states in want["states"].items()}
        error = comparison.error([states[number] for states in executor.optimizer.states], whole)
        found["state_error"] = max(found["state_error"], error)
    found["seen"] = comparison.seen
    return found


def gathered(found: dict, want: dict, seconds: float) -> dict:
    """All members' findings as one answer."""
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, found)
    losses = [sum(values) for values in zip(*(one["losses"] for one in everyone), strict=True)]
    pairs = zip(losses, want["losses"], strict=True)
    return {
        "loss_error": max(abs(loss / wanted - 1) for loss, wanted in pairs),
        **{name: max(one[name] for one in everyone) for name in ("gradient_error", "weight_error", "state_error")},
        "missing": sorted(set(want["gradients"]) - set().union(*(one["seen"] for one in everyone))),
        "parted": sum(one["parted"] for one in everyone),
        "losses": losses,
        "seconds": seconds,
    }


def member(rank: int, port: int, cases_file: str, result: str) -> None:
    cases = [
        Case(**{**case, "plan": documents.parse(case["plan"], Plan)})
        for case in json.loads(Path(cases_file).read_text(encoding="utf-8"))
    ]
    groups = join(rank, port)
    answers = []
    for case in cases:
        model = documents.parse({**case.model, "global_batch_size": 1}, TrainingDocument).model
        want = expected(case, replace(model, dtype=Dtype.FLOAT32))
        begin = time.perf_counter()
        found = run_case(case, model, want, rank, groups)
        answers.append({"name": case.name, **gathered(found, want, time.perf_counter() - begin)})
        if rank == 0:
            Path(result).write_text(json.dumps(answers), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.executor.iteration"))
