"""Walk of every rank of some plans on a device that is not the CPU, without one: tensors have a device, but no values.

Run as a program: `python device_walk.py CASES_FILE RESULT_FILE`. The cases are a JSON list of objects with `name`,
`plan`, `model` and perhaps `ends_only`, which leaves out the ranks between the first and the last one of a stage; the
result is a list of equal length: what went wrong, by step. An operation on tensors of different devices fails, as on a
GPU. Collectives change nothing, and one process is each of the ranks in turn.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import backend_registration

from trainwright import documents
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.training import Training
from trainwright.worker_api import Gang, GangNode, ProfilingTask
from trainwright_worker import initial_weights
from trainwright_worker.executor import batch_weight, recomputed_forward
from trainwright_worker.executor import executor as executor_module
from trainwright_worker.executor.checkpoint_chunks import resident_tiles, written_tiles
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.flat_parameter import publish_updates
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.layers.custom import CustomLayers
from trainwright_worker.layers.layer import FamilyLayers
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.measure import layer_under_test
from trainwright_worker.measure.layer_under_test import LayerUnderTest

backend_registration._setup_privateuseone_for_python_backend("gpu")
GPU = torch.device("gpu", 0)


@contextmanager
def gang_member(rank: int, ranks: int) -> Iterator[ProcessGroups]:
    """Be one rank of a gang whose collectives do nothing."""
    dist.init_process_group("cpu:fake,gpu:fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield ProcessGroups(timedelta(seconds=5))
    finally:
        dist.destroy_process_group()


def family_that_draws_values(model: Model) -> FamilyLayers:
    """Return a family that draws its rows on the real CPU, since values decide what an image shows.

    A user's modules are made on the device: a fake tensor cannot move there from the CPU, as their weights do. Formats of
    what they hand on are found as ever, on the meta device, whose tensors are no fake ones.
    """
    with unset_fake_temporarily():
        family = make_family_layers(model)
    if isinstance(family, CustomLayers):
        family.make = lambda number, **_options: family.make_module(number)
        formats = family.formats

        def found_formats(*arguments: Any) -> tuple[torch.dtype, ...]:
            with unset_fake_temporarily():
                return formats(*arguments)

        family.formats = found_formats
    rows = family.rows

    def drawn(*arguments: Any, **options: Any) -> dict[str, torch.Tensor]:
        with unset_fake_temporarily() as mode:
            found = rows(*arguments, **options)
        return {field: mode.from_tensor(value) for field, value in found.items()}

    family.rows = drawn
    return family


@dataclass(frozen=True)
class EvenShares:
    """Ends of the experts' tokens, if all are chosen as often: what a router chooses depends on values."""

    tokens: int
    experts: int

    def tolist(self) -> list[int]:
        return [self.tokens * (number + 1) // self.experts for number in range(self.experts)]


def find_even_ends(choices: torch.Tensor, numbers: torch.Tensor, **options: bool) -> EvenShares:
    del options
    return EvenShares(choices.numel(), len(numbers))


def require_that_mixing_fails() -> None:
    """Fail if torch lets tensors of different devices meet, since then a walk finds nothing."""
    with FakeTensorMode():
        try:
            torch.zeros(4) + torch.zeros(4, device=GPU)
        except RuntimeError:
            return
    raise AssertionError("a tensor on the CPU was added to one on the device")


def require_on_device(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        assert tensor.device == GPU, f"a tensor of shape {tuple(tensor.shape)} is on {tensor.device}"


def run_rank(plan: Plan, model: Model, rank: int) -> None:
    """Construct a rank's executor, run an iteration, and read and write its state as a checkpoint does."""
    with gang_member(rank, len(plan.devices)) as groups, FakeTensorMode():
        executor = PlanExecutor(plan, model, TrainingConfig(clip_norm=1.0), RankContext(rank, GPU), groups)
        batch = executor.make_batch(0)
        executor.run_iteration(batch)
        buffers = [buffer for layer in executor.stage.layers for buffer in layer.module.buffers()]
        require_on_device([*executor.optimizer.resident_tensors, *batch.tensors, *buffers])
        for tile in written_tiles(executor, 2**20):
            tile.values.cpu()
        for tile in resident_tiles(executor):
            tile.values.copy_(torch.empty(tile.tile.sizes))
        publish_updates(executor.stage.flat_parameters)
        executor.optimizer.resume(1)


def profile(model: Model, kind: str, tensor_degree: int) -> None:
    """Run an iteration of a layer's profile."""
    gang = Gang((GangNode("node", (0,), "gpu"),))
    task = ProfilingTask(gang, model, tensor_degree, rows=(2,))
    with FakeTensorMode():
        layer = LayerUnderTest.of(task, model.kind(kind), 2, GPU, lambda _doing: None)
        layer.backward(layer.forward())
        layer.reduce_gradients()
        layer.update_weights()
        layer.reset_gradients()
        require_on_device(layer.optimizer.resident_tensors)


Step = tuple[str, Callable[[], None]]


def steps(plan: Plan, model: Model, *, ends_only: bool) -> Iterator[Step]:
    """Yield what a case runs, by name."""
    ends = {device for stage in plan.stages for device in (stage.devices[0], stage.devices[-1])}
    for rank in (rank for rank, device in enumerate(plan.devices) if device in ends or not ends_only):
        yield f"rank {rank}", partial(run_rank, plan, model, rank)
    degrees = {run.strategy.tensor for stage in plan.stages for run in stage.layers}
    for degree in sorted(degrees):
        for kind in model.kinds:
            if degree == 1 or (model.divided_kind(kind) or kind).is_tensor_parallel:
                yield f"{model.dtype} profile of {kind.name} at {degree}", partial(profile, model, kind.name, degree)


def problem_of(step: Callable[[], None]) -> str | None:
    try:
        step()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is an answer)
        frames = traceback.extract_tb(error.__traceback__)
        where = next((frame for frame in reversed(frames) if "trainwright_worker" in frame.filename), frames[-1])
        return f"{Path(where.filename).name}:{where.lineno}: {type(error).__name__}: {error}"
    return None


def main(cases_file: str, result: str) -> None:
    sys.path.append(str(Path(__file__).with_name("oracles")))  # where user models are
    initial_weights.make_generator = lambda _device: torch.Generator()
    torch.searchsorted = find_even_ends
    executor_module.make_family_layers = layer_under_test.make_family_layers = family_that_draws_values
    executor_module.read_value = batch_weight.read_value = lambda _tensor: 1.0
    recomputed_forward._differ = lambda _before, _behind: True  # what a forward changes depends on values
    require_that_mixing_fails()
    answers = []
    profiled: set[str] = set()
    for case in json.loads(Path(cases_file).read_text(encoding="utf-8")):
        model = documents.parse({**case["model"], "global_batch_size": 1}, Training).model
        plan = documents.parse(case["plan"], Plan)
        walked = steps(plan, model, ends_only=case.get("ends_only", False))
        found = {name: problem_of(step) for name, step in walked if name not in profiled}
        profiled |= {name for name in found if "profile" in name}
        problems = {name: problem for name, problem in found.items() if problem is not None}
        answers.append({"name": case["name"], "steps": len(found), "problems": problems})
    Path(result).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # threads of the backward for a device without a driver do not end by themselves
