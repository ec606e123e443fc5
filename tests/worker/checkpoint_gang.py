"""Eight processes that train by one plan, save, load by another and train on, and compare with one process.

Run as a program: `python checkpoint_gang.py CASES_FILE RESULT_FILE`. The cases are a JSON list of objects with the
fields of `Case` or `Refusal`; the result is a list of as many objects: errors, or the sentences that were told.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).with_name("oracles")))
from eight_processes import WORLD, join, leave, start
from equivalence_gang import optimizer_of, scales
from one_process import OneProcess

from trainwright import documents
from trainwright.cluster import Device
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.training import Training as TrainingDocument
from trainwright_worker.executor import checkpoint
from trainwright_worker.executor.checkpoint import load, save
from trainwright_worker.executor.chunks import CheckpointError
from trainwright_worker.executor.groups import Groups, wanted_groups
from trainwright_worker.executor.holdings import Piece, held, written
from trainwright_worker.executor.iteration import Executor, Host, Training
from trainwright_worker.executor.mesh import Mesh

STEPS = 3
SEED = 3
USUAL_CHUNK_VALUES = checkpoint.CHUNK_VALUES
HEARD = 1e-2
"""Adam's weights are compared where gradients are at least this share of the largest: below, its first steps have the
sign of what may be rounding."""


@dataclass(frozen=True)
class Case:
    """A training that changes its plan in the middle.

    Attributes:
        model: a training document without its batch.
        folder: of the checkpoint.
        dtypes: of the weights before and behind it.
        chunk_values: at most so many in a chunk; None for what is usual, which no small model's weight reaches.
    """

    name: str
    model: dict
    first: Plan
    second: Plan
    folder: str
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    dtypes: list[str] = field(default_factory=lambda: ["float32", "float32"])
    chunk_values: int | None = None


@dataclass(frozen=True)
class Refusal:
    """A checkpoint that cannot be loaded, or a folder that cannot be saved to.

    Attributes:
        damage: what happened to the checkpoint: its largest file is "removed" or "cut".
    """

    name: str
    model: dict
    plan: Plan
    folder: str
    optimizer: str = "sgd"
    saves: bool = False
    damage: str | None = None


def model_of(document: dict, dtype: str) -> Model:
    built = documents.parse({**document, "global_batch_size": 1}, TrainingDocument).model
    return replace(built, dtype=Dtype(dtype))


def devices_of(name: str) -> tuple[Device, ...]:
    """All devices in an order of the case's own, so that a plan's first device is any rank."""
    devices = [Device(f"node-{place // 2}", place % 2) for place in range(WORLD)]
    random.Random(name).shuffle(devices)
    return tuple(devices)


def executor_of(
    plan: Plan, model: Model, training: Training, rank: int, groups: Groups, *, name: str
) -> Executor | None:
    """None on ranks that the plan does not use."""
    devices = devices_of(name)
    mesh = Mesh.of(plan, devices)
    if rank not in mesh.ranks:
        groups.make(wanted_groups(mesh, model))
        return None
    return Executor(plan, model, training, Host(rank, torch.device("cpu"), devices), groups)


def gathered(own: object) -> list:
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, own)
    return everyone


def trained(executor: Executor | None, iterations: range) -> list[float]:
    """Mean losses."""
    own = [executor.run(executor.prepare(iteration)) if executor else 0.0 for iteration in iterations]
    return [sum(losses) for losses in zip(*gathered(own), strict=True)]


def slices(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(piece.box.offsets, piece.box.sizes, strict=True))


def whole_state(executor: Executor | None) -> dict[str, torch.Tensor]:
    """Whole tensors by name, of what all ranks write; every value comes from exactly one of them."""
    own = list(written(executor, checkpoint.CHUNK_VALUES)) if executor else []
    found: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for pieces in gathered([replace(piece, values=piece.values.clone()) for piece in own]):
        for piece in pieces:
            found.setdefault(piece.name, torch.zeros(piece.shape))[slices(piece)] = piece.values
            times.setdefault(piece.name, torch.zeros(piece.shape))[slices(piece)] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return found


def reference(case: Case, model: Model) -> tuple[list[float], dict[str, dict[str, torch.Tensor]]]:
    """Losses, and the last state by kind and name, of one process."""
    one = OneProcess(model, seed=SEED)
    named = one.named()
    optimizer = optimizer_of(case, list(named.values()))
    losses = []
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        plan = case.first if step < STEPS else case.second
        loss = one.loss(step, plan.global_batch_size)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kinds = {"exp_avg": "mean", "exp_avg_sq": "square", "momentum_buffer": "momentum"}
    found: dict[str, dict[str, torch.Tensor]] = {"weights": {name: one.detach() for name, one in named.items()}}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            if key in kinds:
                found.setdefault(kinds[key], {})[name] = value
    return losses, found


def heard(states: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """By name, where Adam's gradients are more than rounding; everywhere for SGD."""
    if "square" not in states:
        return {name: torch.ones_like(value, dtype=torch.bool) for name, value in states["weights"].items()}
    least = HEARD**2 * max(value.max() for value in states["square"].values())
    return {name: value >= least for name, value in states["square"].items()}


def errors(executor: Executor | None, want: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """The largest error of each kind of state, relative to the largest value of the same weight."""
    scale = {kind: scales(values) for kind, values in want.items()}
    counts = heard(want)
    found = dict.fromkeys(want, 0.0)
    for piece in held(executor) if executor else ():
        kind, name = piece.name.split("/", 1)
        error = (piece.values - want[kind][name][slices(piece)]).abs() / scale[kind][name][slices(piece)]
        if kind == "weights":
            error = error[counts[name][slices(piece)]]
        found[kind] = max(found[kind], error.max().item() if error.numel() else 0.0)
    return found


def difference(executor: Executor | None, saved: dict[str, torch.Tensor]) -> float:
    """The largest between what this rank holds and what was saved; weights in their format, too."""
    worst = 0.0
    for piece in held(executor) if executor else ():
        worst = max(worst, (piece.values - saved[piece.name][slices(piece)]).abs().max().item())
    for unit in executor.stage.units if executor else ():
        worst = max(worst, (unit.own - unit.master.to(unit.own.dtype)).abs().max().item())
    return worst


def bytes_read() -> int:
    """By this process so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def scalars(executor: Executor) -> list[float]:
    return [executor.optimizer.updates, executor.loss_scale.factor, executor.loss_scale.quiet_iterations]


def run_case(case: Case, rank: int, groups: Groups) -> dict:
    training = Training(case.optimizer, case.learning_rate, SEED)
    before, behind = (model_of(case.model, dtype) for dtype in case.dtypes)
    first = executor_of(case.first, before, training, rank, groups, name=case.name)
    losses = trained(first, range(STEPS))
    checkpoint.CHUNK_VALUES = case.chunk_values or USUAL_CHUNK_VALUES
    if first:
        save(first, Path(case.folder), STEPS)
    saved = whole_state(first)
    second = executor_of(case.second, behind, training, rank, groups, name=f"{case.name} behind")
    trained(second, range(100, 101))  # what is loaded takes the place of a training, not only of first values
    begin = bytes_read()
    iteration = load(second, Path(case.folder)) if second else None
    own_bytes = [bytes_read() - begin, sum(4 * piece.values.numel() for piece in held(second))] if second else None
    worst = max(gathered(difference(second, saved)))
    names = set().union(*gathered({piece.name for piece in held(second)} if second else set()))
    counts = [gathered(scalars(one) if one else None) for one in (first, second)]
    losses += trained(second, range(STEPS, 2 * STEPS))
    want_losses, want = reference(case, model_of(case.model, "float32"))
    every = gathered(errors(second, want))
    return {
        "name": case.name,
        "iterations": sorted({one for one in gathered(iteration) if one is not None}),
        "difference": worst,
        "missing": sorted(set(saved) ^ names),
        "loss_error": max(abs(loss / wanted - 1) for loss, wanted in zip(losses, want_losses, strict=True)),
        "errors": {kind: max(one[kind] for one in every) for kind in want},
        "scalars": [next(one for one in counted if one is not None) for counted in counts],
        "bytes": [one for one in gathered(own_bytes) if one is not None],
    }


def damaged(refusal: Refusal, rank: int) -> Path:
    """The checkpoint's folder; a copy of it, where something happened to it."""
    folder = Path(refusal.folder)
    if refusal.damage is None:
        return folder
    copy = folder.with_name(f"{folder.name}-{refusal.damage}")
    if rank == 0:
        shutil.copytree(folder, copy)
        largest = max(copy.glob("*.distcp"), key=lambda file: file.stat().st_size)
        if refusal.damage == "removed":
            largest.unlink()
        else:
            largest.write_bytes(largest.read_bytes()[:1000])
    dist.barrier()
    return copy


def run_refusal(refusal: Refusal, rank: int, groups: Groups) -> dict:
    folder = damaged(refusal, rank)
    training = Training(refusal.optimizer, 0.05, SEED)
    executor = executor_of(refusal.plan, model_of(refusal.model, "float32"), training, rank, groups, name=refusal.name)
    told = None
    if executor:
        try:
            save(executor, folder, STEPS) if refusal.saves else load(executor, folder)
            told = ""
        except CheckpointError as error:
            told = str(error)
    return {"name": refusal.name, "told": sorted({one for one in gathered(told) if one is not None})}


def parsed(case: dict) -> Case | Refusal:
    plans = {key: documents.parse(case[key], Plan) for key in ("first", "second", "plan") if key in case}
    return (Refusal if "plan" in case else Case)(**{**case, **plans})


def member(rank: int, port: int, cases_file: str, result: str) -> None:
    cases = [parsed(case) for case in json.loads(Path(cases_file).read_text(encoding="utf-8"))]
    groups = join(rank, port)
    answers = []
    for case in cases:
        run = run_case if isinstance(case, Case) else run_refusal
        answers.append(run(case, rank, groups))
        if rank == 0:
            Path(result).write_text(json.dumps(answers), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.executor.checkpoint"))
