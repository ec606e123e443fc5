"""Eight processes that train under one plan, save, load under another, train on, and compare with one process.

Run as a program: `python checkpoint_gang.py CASES_FILE RESULT_FILE`. The cases are a JSON list of objects with the
fields of `Case` or `Refusal`; the result is a list of equal length: errors, or reported error messages.
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
from eight_processes import WORLD, join, leave, shared_out, start
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
from trainwright_worker.executor.checkpoint_chunks import CheckpointError, StateTile, resident_tiles, written_tiles
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.plan_ranks import PlanRanks
from trainwright_worker.executor.process_groups import ProcessGroups, required_groups

STEPS = 3
SEED = 3
USUAL_CHUNK_VALUES = checkpoint.MAX_CHUNK_VALUES
HEARD = 1e-2
"""Minimum gradient, relative to the largest, at which Adam's weights are compared: below it, its first steps follow the
sign of rounding errors.
"""


@dataclass(frozen=True)
class Case:
    """Training that changes its plan in the middle.

    Attributes:
        model: training document without its batch.
        folder: checkpoint folder.
        dtypes: dtypes of the weights before and after the checkpoint.
        chunk_values: maximum values per chunk; None for the default, which no small model's weight reaches.
        by_piece: whether the reference computes each replica's rows separately (layers with buffers).
        later_model: model after the checkpoint, whose weights have the same names, if it trains others of them.
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
    by_piece: bool = False
    later_model: dict | None = None


@dataclass(frozen=True)
class Refusal:
    """Checkpoint that cannot be loaded, or folder that cannot be saved to.

    Attributes:
        damage: damage to the checkpoint's largest file: "removed" or "cut".
    """

    name: str
    model: dict
    plan: Plan
    folder: str
    optimizer: str = "sgd"
    saves: bool = False
    damage: str | None = None


def model_of(document: dict, dtype: str) -> Model:
    built = documents.parse({"dtype": "float32", **document, "global_batch_size": 1}, TrainingDocument).model
    return replace(built, dtype=Dtype(dtype))


def devices_of(name: str) -> tuple[Device, ...]:
    """Return all devices in a case-specific order, so that a plan's first device may be any rank."""
    devices = [Device(f"node-{place // 2}", place % 2) for place in range(WORLD)]
    random.Random(name).shuffle(devices)
    return tuple(devices)


def executor_of(
    plan: Plan, model: Model, training: TrainingConfig, rank: int, groups: ProcessGroups, *, name: str
) -> PlanExecutor | None:
    """Return the executor; None on ranks that the plan does not use."""
    devices = devices_of(name)
    mesh = PlanRanks.of(plan, devices)
    if rank not in mesh.ranks:
        groups.prepare(required_groups(mesh, model))
        return None
    return PlanExecutor(plan, model, training, RankContext(rank, torch.device("cpu"), devices), groups)


def gathered(own: object) -> list:
    everyone: list = [None] * WORLD
    dist.all_gather_object(everyone, own)
    return everyone


def trained(executor: PlanExecutor | None, iterations: range) -> list[float]:
    """Return mean losses."""
    own = [executor.run_iteration(executor.make_batch(iteration)) if executor else 0.0 for iteration in iterations]
    return [sum(losses) for losses in zip(*gathered(own), strict=True)]


def slices(piece: StateTile) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + size) for offset, size in zip(piece.tile.offsets, piece.tile.sizes, strict=True)
    )


def whole_state(executor: PlanExecutor | None) -> dict[str, torch.Tensor]:
    """Return full tensors by name, from the tiles that all ranks write; each value comes from exactly one rank."""
    own = list(written_tiles(executor, checkpoint.MAX_CHUNK_VALUES)) if executor else []
    found: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for pieces in gathered([replace(piece, values=piece.values.clone()) for piece in own]):
        for piece in pieces:
            found.setdefault(piece.name, torch.zeros(piece.shape))[slices(piece)] = piece.values
            times.setdefault(piece.name, torch.zeros(piece.shape))[slices(piece)] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return found


Reference = tuple[list[float], dict[str, dict[str, torch.Tensor]]]


def reference(case: Case | Refusal) -> Reference | None:
    """Return one process's losses and final state by kind and name; None for a refusal."""
    if isinstance(case, Refusal):
        return None
    one = OneProcess(model_of(case.model, "float32"), seed=SEED)
    named = one.named()
    optimizer = optimizer_of(case, list(named.values()))
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS and case.later_model is not None:
            one, optimizer = trained_otherwise(case, one, optimizer)
            named = one.named()
        optimizer.zero_grad()
        plan = case.first if step < STEPS else case.second
        loss = one.loss(step, plan.global_batch_size, plan if case.by_piece else None)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kinds = {"exp_avg": "mean", "exp_avg_sq": "square", "momentum_buffer": "momentum"}
    weights = {name: parameter.detach() for name, parameter in named.items()} | one.frozen()
    found: dict[str, dict[str, torch.Tensor]] = {"weights": weights}
    for name, parameter in named.items():
        for key, value in optimizer.state[parameter].items():
            if key in kinds:
                found.setdefault(kinds[key], {})[name] = value
    if buffers := one.named_buffers():
        found["buffers"] = {name: buffer.float() for name, buffer in buffers.items()}
    return losses, found


def trained_otherwise(
    case: Case, one: OneProcess, optimizer: torch.optim.Optimizer
) -> tuple[OneProcess, torch.optim.Optimizer]:
    """Return the later model with the same weights, and an optimizer with their states; Adam's start anew with new weights."""
    before, later = one.named(), OneProcess(model_of(case.later_model or {}, "float32"), seed=SEED)
    values, copies = before | one.frozen(), {"5.table": "0.weight"}
    after = later.named()
    with torch.no_grad():
        for name, value in (after | later.frozen()).items():
            value.copy_(values[name if name in values else copies[name]])
    other = optimizer_of(case, list(after.values()))
    if case.optimizer == "sgd" or after.keys() <= before.keys():
        for name in after.keys() & before.keys():
            other.state[after[name]] = optimizer.state[before[name]]
    return later, other


def heard(states: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return by name where Adam's gradients exceed rounding; everywhere for SGD."""
    if "square" not in states:
        return {name: torch.ones_like(value, dtype=torch.bool) for name, value in states["weights"].items()}
    least = HEARD**2 * max(value.max() for value in states["square"].values())
    everywhere = {name: torch.ones_like(value, dtype=torch.bool) for name, value in states["weights"].items()}
    return everywhere | {name: value >= least for name, value in states["square"].items()}


def errors(executor: PlanExecutor | None, want: dict[str, dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return the largest error of each kind of state, relative to the largest value of the same weight."""
    scale = {kind: scales(values) for kind, values in want.items()}
    counts = heard(want)
    found = dict.fromkeys(want, 0.0)
    for piece in resident_tiles(executor) if executor else ():
        kind, name = piece.name.split("/", 1)
        error = (piece.values - want[kind][name][slices(piece)]).abs() / scale[kind][name][slices(piece)]
        if kind == "weights":
            error = error[counts[name][slices(piece)]]
        found[kind] = max(found[kind], error.max().item() if error.numel() else 0.0)
    return found


def difference(executor: PlanExecutor | None, saved: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between this rank's state and the saved state, weights in the model's dtype included."""
    worst = 0.0
    for piece in resident_tiles(executor) if executor else ():
        if piece.name in saved:
            worst = max(worst, (piece.values - saved[piece.name][slices(piece)]).abs().max().item())
    for unit in executor.stage.flat_parameters if executor else ():
        worst = max(worst, (unit.shard - unit.master_shard.to(unit.shard.dtype)).abs().max().item())
    return worst


def bytes_read() -> int:
    """Return the bytes that this process has read so far."""
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def scalars(executor: PlanExecutor) -> list[float]:
    return [executor.optimizer.updates, executor.loss_scale.factor, executor.loss_scale.quiet_iterations]


def run_case(case: Case, rank: int, groups: ProcessGroups, wanted: Reference) -> dict:
    training = TrainingConfig(case.optimizer, case.learning_rate, SEED)
    before, after = map(model_of, (case.model, case.later_model or case.model), case.dtypes)
    first = executor_of(case.first, before, training, rank, groups, name=case.name)
    losses = trained(first, range(STEPS))
    checkpoint.MAX_CHUNK_VALUES = case.chunk_values or USUAL_CHUNK_VALUES
    if first:
        save(first, Path(case.folder), STEPS)
    saved = whole_state(first)
    if case.later_model is not None:  # states are compared after further iterations
        saved = {name: values for name, values in saved.items() if name.startswith("weights/")}
    own_difference = gathered(difference(first, saved))
    second = executor_of(case.second, after, training, rank, groups, name=f"{case.name} after")
    trained(second, range(100, 101))  # loading must replace a trained state, not only initial values
    begin = bytes_read()
    iteration = load(second, Path(case.folder)) if second else None
    own_bytes = (
        [bytes_read() - begin, sum(4 * piece.values.numel() for piece in resident_tiles(second))] if second else None
    )
    worst = max(gathered(difference(second, saved)))
    names = set().union(*gathered({piece.name for piece in resident_tiles(second)} if second else set()))
    counts = [gathered(scalars(one) if one else None) for one in (first, second)]
    losses += trained(second, range(STEPS, 2 * STEPS))
    want_losses, want = wanted
    every = gathered(errors(second, want))
    return {
        "name": case.name,
        "iterations": sorted({one for one in gathered(iteration) if one is not None}),
        "difference": worst,
        "own_difference": own_difference,
        "missing": sorted(set(saved) ^ names),
        "loss_error": max(abs(loss / wanted - 1) for loss, wanted in zip(losses, want_losses, strict=True)),
        "errors": {kind: max(one[kind] for one in every) for kind in want},
        "scalars": [next(one for one in counted if one is not None) for counted in counts],
        "bytes": [one for one in gathered(own_bytes) if one is not None],
    }


def damaged(refusal: Refusal, rank: int) -> Path:
    """Return the checkpoint's folder, or a damaged copy of it."""
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


def run_refusal(refusal: Refusal, rank: int, groups: ProcessGroups) -> dict:
    folder = damaged(refusal, rank)
    training = TrainingConfig(refusal.optimizer, 0.05, SEED)
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
    for case, wanted in zip(cases, shared_out(rank, len(cases), lambda number: reference(cases[number])), strict=True):
        if isinstance(case, Case):
            answers.append(run_case(case, rank, groups, wanted))
        else:
            answers.append(run_refusal(case, rank, groups))
        if rank == 0:
            Path(result).write_text(json.dumps(answers), encoding="utf-8")
    leave(groups)


if __name__ == "__main__":
    sys.exit(start(member, tuple(sys.argv[1:]), "trainwright_worker.executor.checkpoint"))
