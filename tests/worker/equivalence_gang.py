"""Eight processes that run many plans in turn and compare each with one process on the whole batch.

Run as a program: `python equivalence_gang.py CASES_FILE RESULT_FILE`. The cases are a JSON list of objects with the
fields of `Case`; the result is a list of equal length: errors, or what went wrong.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).with_name("oracles")))
from eight_processes import WORLD, device_of, draws_own_weights, join, leave, shared_out, start
from one_process import OneProcess

from trainwright import documents
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.training import Training as TrainingDocument
from trainwright_worker.executor import gradient_reduction
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.flat_parameter import FlatParameter, publish_updates
from trainwright_worker.executor.plan_ranks import PlanRanks
from trainwright_worker.executor.process_groups import ProcessGroups, required_groups
from trainwright_worker.layers.image_models import NormedConvolution
from trainwright_worker.layers.tensor_parallel import TensorShard

ERRORS = "gradient_error", "weight_error", "state_error", "buffer_error", "frozen_error"


@dataclass(frozen=True)
class Case:
    """Plan to run.

    Attributes:
        model: training document without its batch.
        steps: iterations; gradients are compared after the first one, weights and losses after all.
        by_piece: whether the reference computes each replica's rows separately (batch normalisation).
    """

    name: str
    plan: Plan
    model: dict
    steps: int = 1
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    clip_norm: float | None = None
    by_piece: bool = False


def begin_with_few_zeros() -> None:
    """Let ReLUs after batch normalisation begin with 2 % of their inputs below 0.

    With half of them below, a change of the weights by 1e-7 changes some gradients by 10 % in one process, too.
    """
    make = NormedConvolution.__init__

    def make_biased(convolution: NormedConvolution, *arguments, **fields) -> None:
        make(convolution, *arguments, **fields)
        convolution.norm_bias.data += 2.0

    NormedConvolution.__init__ = make_biased


def optimizer_of(case: Case, parameters: list) -> torch.optim.Optimizer:
    if case.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=case.learning_rate)
    return torch.optim.SGD(parameters, lr=case.learning_rate, momentum=0.9)


def expected(case: Case, model: Model) -> dict:
    """Return one process's losses, initial weights, first gradients, final weights and final optimizer states."""
    one = OneProcess(model, seed=3)
    named = one.named()
    initial = {name: parameter.detach().clone() for name, parameter in named.items()}
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
    return {
        "losses": losses, "initial": initial, "gradients": gradients, "weights": weights, "states": states,
        "buffers": one.named_buffers(), "frozen": one.frozen(),
    }  # fmt: skip


def own_part(unit: FlatParameter, whole: dict[str, torch.Tensor], place, run) -> torch.Tensor:
    """Return the expected shard of a flat parameter on this rank, cut from full tensors by name."""
    flat = torch.zeros(unit.shard_size * unit.shard_group.count)
    for weight, view in zip(unit.weights, unit.views(flat), strict=True):
        value = whole[weight.name]
        if weight.box is not None:
            starts = zip(weight.box.offsets, weight.parameter.shape, strict=True)
            value = value[tuple(slice(start, start + size) for start, size in starts)]
        if weight.split_dimension is not None:
            value = TensorShard(place.tensor_rank, run.arrangement.tensor).slice_weight(value, weight.split_dimension)
        view.copy_(value)
    return flat[unit.shard_start : unit.shard_stop]


def scales(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return, for every value, the largest of its weight, but at least a thousandth of the largest of all.

    Some gradients are zero but for rounding (a key bias) and have no digits to compare.
    """
    least = 1e-3 * max(value.abs().max() for value in whole.values())
    return {name: torch.full_like(value, max(value.abs().max(), least)) for name, value in whole.items()}


class Comparison:
    """Largest errors of one rank, each relative to the largest value of the same weight."""

    def __init__(self, executor: PlanExecutor) -> None:
        self.executor = executor
        self.seen: set[str] = set()

    def error(self, found: list[torch.Tensor], whole: dict[str, torch.Tensor]) -> float:
        executor, scale = self.executor, scales(whole)
        worst = 0.0
        for unit, value in zip(executor.stage.flat_parameters, found, strict=True):
            self.seen |= {weight.name for weight in unit.weights}
            run = self._run_of(unit)
            place = run.position_of(executor.rank)
            want, least = own_part(unit, whole, place, run), own_part(unit, scale, place, run)
            worst = max(worst, ((value.cpu() - want).abs() / least.clamp_min(1e-30)).max().item())
        return worst

    def buffer_error(self, whole: dict[str, torch.Tensor]) -> float:
        """Return the largest difference of this rank's buffers."""
        own = {
            layer.module.checkpoint_name(layer.number, name): buffer
            for layer in self.executor.stage.layers
            for name, buffer in layer.module.persistent_buffers()
        }
        return max((float((buffer - whole[name]).abs().max()) for name, buffer in own.items()), default=0.0)

    def frozen_error(self, whole: dict[str, torch.Tensor]) -> float:
        """Return the largest error of weights that are not trained; on each rank they are whole but under ZeRO-3."""
        worst = 0.0
        for unit in self.executor.stage.frozen_parameters:
            self.seen |= {weight.name for weight in unit.weights}
            place = self._run_of(unit).position_of(self.executor.rank)
            want = own_part(unit, whole, place, self._run_of(unit)).to(unit.shard.dtype)
            worst = max(worst, float((unit.shard - want).abs().max()))
            if unit.full_gradients is not None or unit.gradient_shard is not None:
                worst = math.inf
        return worst

    def copy_weights(self, whole: dict[str, torch.Tensor]) -> None:
        """Copy full weights into the executor, whose device draws others than the CPU does."""
        for unit in self.executor.stage.flat_parameters:
            run = self._run_of(unit)
            unit.master_shard.copy_(own_part(unit, whole, run.position_of(self.executor.rank), run))
        publish_updates(self.executor.stage.flat_parameters)

    def _run_of(self, unit: FlatParameter):
        for layer in self.executor.stage.layers:
            if any(held.flat_parameter is unit for held in layer.parameter_uses):
                return layer.run
        raise AssertionError("a unit that no layer holds")


def run_case(case: Case, model: Model, want: dict, rank: int, groups: ProcessGroups) -> dict:
    """Run one case on this rank; ranks beyond the plan's devices only help to create groups."""
    errors = dict.fromkeys(ERRORS, 0.0)
    found = {"losses": [], **errors, "seen": set(), "parted": 0}
    mesh = PlanRanks.of(case.plan)
    if rank not in mesh.ranks:
        groups.prepare(required_groups(mesh, model))
        return {**found, "losses": [0.0] * case.steps}
    training = TrainingConfig(case.optimizer, case.learning_rate, 3, case.clip_norm)
    host = RankContext(rank, device_of(rank))
    executor = PlanExecutor(case.plan, model, training, host, groups)
    found["parted"] = sum(layer.is_sequence_parallel for layer in executor.stage.layers)
    comparison = Comparison(executor)
    if draws_own_weights():
        comparison.copy_weights(want["initial"])
    for step in range(case.steps):
        found["losses"].append(executor.run_iteration(executor.make_batch(step)))
        if step == 0 and case.clip_norm is None:
            gradients = [
                unit.gradient_shard for unit in executor.stage.flat_parameters
            ]  # float16 gradients are unscaled by now
            found["gradient_error"] = comparison.error(gradients, want["gradients"])
    units = executor.stage.flat_parameters
    found["weight_error"] = comparison.error([unit.master_shard for unit in units], want["weights"])
    for number in range(len(executor.optimizer.state_names)):
        whole = {name: states[number] for name, states in want["states"].items()}
        error = comparison.error([states[number] for states in executor.optimizer.states], whole)
        found["state_error"] = max(found["state_error"], error)
    found["buffer_error"] = comparison.buffer_error(want["buffers"])
    found["frozen_error"] = comparison.frozen_error(want["frozen"])
    found["seen"] = comparison.seen
    return found


def gathered(found: dict, want: dict, seconds: float) -> dict:
    """Combine all ranks' findings."""
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, found)
    losses = [sum(values) for values in zip(*(one["losses"] for one in everyone), strict=True)]
    pairs = zip(losses, want["losses"], strict=True)
    return {
        "loss_error": max(abs(loss / wanted - 1) for loss, wanted in pairs),
        **{name: max(one[name] for one in everyone) for name in ERRORS},
        "missing": sorted({*want["gradients"], *want["frozen"]} - set().union(*(one["seen"] for one in everyone))),
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
    begin_with_few_zeros()
    gradient_reduction.MAX_MESSAGE_BYTES = 8192  # so that gradients of tiny models take several messages
    models = [
        documents.parse({"dtype": "float32", **case.model, "global_batch_size": 1}, TrainingDocument).model
        for case in cases
    ]
    wanted = shared_out(
        rank, len(cases), lambda number: expected(cases[number], replace(models[number], dtype=Dtype.FLOAT32))
    )
    answers = []
    for case, model, want in zip(cases, models, wanted, strict=True):
        begin = time.perf_counter()
        found = run_case(case, model, want, rank, groups)
        answers.append({"name": case.name, **gathered(found, want, time.perf_counter() - begin)})
        if rank == 0:
            Path(result).write_text(json.dumps(answers), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.executor.executor"))
