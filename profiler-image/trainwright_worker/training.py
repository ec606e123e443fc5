"""Training by a plan in a loop of one's own: torch's optimizers, evaluation, and checkpoints that any plan resumes."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor

import trainwright
from trainwright import documents
from trainwright.layer import Dtype
from trainwright.plan import Plan
from trainwright.training import RequestedDtype, Training
from trainwright_worker import validation
from trainwright_worker.device import barrier, infiniband_problem, sum_over_ranks
from trainwright_worker.executor import checkpoint
from trainwright_worker.executor.checkpoint_chunks import CheckpointError
from trainwright_worker.executor.executor import PlanExecutor, RankContext, TrainingConfig
from trainwright_worker.executor.process_groups import ProcessGroups
from trainwright_worker.executor.torch_optimizer import MakeOptimizer, OptimizerChoice, TorchOptimizer
from trainwright_worker.gang.gathering import gather
from trainwright_worker.layers.custom import Rows, read_user_rows
from trainwright_worker.layers.layer import ReadRows

__all__ = ["CheckpointError", "Rows", "Trainer"]

_PREFIX = "iteration-"


class Trainer:
    """One rank's part of a training. Every rank of the plan makes one, and calls the same methods in the same order.

    torchrun starts the ranks: `launch.sh` of `trainwright export --to torchrun`. A plan of one device needs no torchrun. A user's
    model is imported as Python finds it, or from the current folder. Errors are ValueErrors of one sentence, CheckpointErrors
    among them, and WorkerErrors of layers.

    Args:
        plan: file of the plan, `plan.json`.
        model: file of the model that it was made for; its batch is the plan's.
        optimizer: makes an optimizer of groups of parameters: `partial(torch.optim.AdamW, lr=3e-4)`. The update of a value must not
            need others: if ranks hold parts of weights, in the same weight; else, in those of other ranks.
        options: returns the options of a weight's group, given its name in checkpoints and its shape; by default none.
        schedule: returns the factor of all learning rates in an iteration.
        clip_norm: maximum norm of the gradients over all weights; None disables clipping.
        rows: training data instead of the model's own, with the fields that its layers read.
        dtype: number format; needed if neither the plan nor the file of the model names one.
        seed: of weights, random numbers and rows.
        timeout: of what ranks wait for; writing a checkpoint takes less.

    Attributes:
        rank: of this process.
        device: of this process.
    """

    def __init__(  # noqa: PLR0913 (what a training is)
        self,
        plan: str | Path,
        model: str | Path,
        *,
        optimizer: MakeOptimizer,
        options: Callable[[str, tuple[int, ...]], Mapping[str, Any]] = lambda _name, _shape: {},
        schedule: Callable[[int], float] | None = None,
        clip_norm: float | None = None,
        rows: Rows | None = None,
        dtype: str | None = None,
        seed: int = 0,
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        if not callable(optimizer):
            kind = type(optimizer).__name__
            raise TypeError(
                f"optimizer must be a function of groups of parameters, such as partial({kind}, lr=…), got a {kind}"
            )
        sys.path.append(str(Path.cwd()))
        read_plan = trainwright.read(plan, Plan)
        read_model = _read_training(Path(model), dtype, read_plan.dtype).model
        for problem in validation.plan_problems(read_plan, read_model):
            raise ValueError(f"{plan} and {model}: {problem}")
        self._schedule, self._rows = schedule, _reader(rows)
        self._is_own_group = not dist.is_initialized()
        self.device = _join(len(read_plan.devices), timeout)
        self.rank = dist.get_rank()
        self._groups = ProcessGroups(timeout)
        self._executor = PlanExecutor(
            read_plan,
            read_model,
            TrainingConfig(OptimizerChoice(optimizer, options), seed=seed, clip_norm=clip_norm),
            RankContext(self.rank, self.device),
            self._groups,
        )

    @property
    def is_first_rank(self) -> bool:
        """Return whether this is the rank that prints."""
        return self.rank == 0

    @property
    def skipped_updates(self) -> int:
        """Number of iterations that updated nothing, since a gradient was infinite or NaN."""
        return self._executor.skipped_updates

    @property
    def empty_batches(self) -> int:
        """Number of iterations that updated nothing, since all rows had weight 0; their losses are NaN."""
        return self._executor.empty_batches

    def step(self, iteration: int) -> float:
        """Train on one global batch. Returns, on every rank, its mean loss before the update."""
        executor = self._executor
        if self._schedule is not None:
            self._optimizer.scale_rates(self._schedule(iteration))
        return self._sum(executor.run_iteration(executor.make_batch(iteration, self._rows)))

    def evaluate(self, iteration: int = 0, rows: Rows | None = None, weights: str | None = None) -> float:
        """Return, on every rank, the mean loss over one global batch, without gradients and with layers in evaluation mode.

        Args:
            iteration: of the rows.
            rows: other data than that of the training.
            weights: state of the optimizer that is in place of the weights meanwhile, such as their average.
        """
        executor = self._executor
        batch = executor.make_batch(iteration, _reader(rows) or self._rows)
        if weights is None:
            return self._sum(executor.evaluate(batch))
        self._optimizer.exchange(weights)
        loss = self._sum(executor.evaluate(batch))
        self._optimizer.exchange(weights)
        return loss

    @property
    def _optimizer(self) -> TorchOptimizer:
        return cast("TorchOptimizer", self._executor.optimizer)

    def _sum(self, own_loss: float) -> float:
        return sum_over_ranks([own_loss], self.device)[0]

    def save(self, folder: str | Path, iterations: int) -> Path:
        """Write a checkpoint after this number of iterations into `folder`, on storage that all ranks share. Returns its path.

        It appears when it is complete.
        """
        path = Path(folder) / f"{_PREFIX}{iterations:08}"
        checkpoint.save(self._executor, path, iterations)
        return path

    def load(self, path: str | Path) -> int:
        """Load a checkpoint, whatever plan wrote it. Returns the number of completed iterations."""
        return checkpoint.load(self._executor, Path(path))

    def resume(self, folder: str | Path) -> int:
        """Load the newest checkpoint of `folder`. Returns the number of completed iterations, 0 if there is no checkpoint."""
        saved = sorted(path.name for path in Path(folder).glob(f"{_PREFIX}*") if not path.suffix)
        newest = gather(saved[-1] if saved else "", str, self.device)[0]
        return self.load(Path(folder) / newest) if newest else 0

    def close(self) -> None:
        """Leave the other ranks; all call this at the end."""
        barrier(self.device)  # gloo aborts a process whose peer has gone
        # The threads of its groups free tensors, for which they need the interpreter: they end before it does.
        del self._executor
        gc.collect()
        self._groups.close()
        if self._is_own_group:
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()


def _read_training(path: Path, dtype: str | None, stated: Dtype | None) -> Training:
    """Read the model in a number format: that which is given, else the file's, else that which the plan states."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from None
    training: Training = documents.loads_given(content, Training, source=str(path), absent={"global_batch_size": 1})
    if dtype is None and training.dtype is RequestedDtype.AUTO:
        dtype = stated
    if dtype is None and training.dtype is RequestedDtype.AUTO:
        raise ValueError(f"{path}: dtype is auto; state that of the plan there or as dtype: {', '.join(Dtype)}")
    return training if dtype is None else training.in_format(Dtype(dtype))


def _reader(rows: Rows | None) -> ReadRows | None:
    """Return the source of fields of a user's rows."""
    if rows is None:
        return None

    def read(fields: tuple[str, ...], *, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        tensors = read_user_rows("rows", rows, seed=seed, iteration=iteration, first=first, count=count)
        for field in fields:
            if field not in tensors:
                raise ValueError(
                    f"rows: the model's layers read {field}, but rows() returns {', '.join(tensors)}; add it"
                )
        return {field: tensors[field] for field in fields}

    return read


def _join(ranks: int, timeout: timedelta) -> torch.device:
    """Join the other ranks, as torchrun started them. Returns this process's device."""
    is_started = "RANK" in os.environ
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if started != ranks:
        raise ValueError(
            f"the plan has {ranks} devices, but {started} processes were started; start them with launch.sh of trainwright "
            "export --to torchrun"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        if ranks > 1 and (problem := infiniband_problem()):
            sys.stderr.write(f"{problem}\n")
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_initialized():
        if is_started:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return device
