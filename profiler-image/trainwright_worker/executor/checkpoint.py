"""Checkpoints that do not depend on the plan: what one plan's ranks write, another plan's ranks read.

Every tensor of the state lies in the checkpoint under its own name and whole, in chunks that the ranks write without
asking each other for anything; a rank reads the chunks that meet what it holds. So nobody ever has the whole model.
Files and their index are torch.distributed.checkpoint's, whose own tools can read them; beside them lies a
`TrainingState` as JSON.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from trainwright import documents
from trainwright_worker.executor.chunks import CheckpointError, Reading, Writing
from trainwright_worker.executor.holdings import held, written
from trainwright_worker.executor.iteration import Executor
from trainwright_worker.executor.training_state import TrainingState
from trainwright_worker.failures import one_line

STATE_FILE = "training.json"
CHUNK_VALUES = 4 * 2**20
"""At most so many values in a chunk, 16 MiB: who needs a part of a chunk reads all of it."""

_Found = TypeVar("_Found")


def save(executor: Executor, folder: Path, iteration: int) -> None:
    """Write the training's state, of which `iteration` iterations are done, to a new folder. All ranks call this.

    The folder appears at once, when it is complete; until then the files lie beside it, in `<folder>.partial`. It must
    be on storage that all ranks share. Each rank's collectives wait for the slowest rank's files, so their timeout must
    be longer than that takes.

    Raises:
        CheckpointError: on all ranks, with one sentence; nothing is left under the folder's name.
    """
    partial = folder.with_name(folder.name + ".partial")
    executor.beat(f"saving a checkpoint to {folder}")
    _together(executor, folder, lambda: _begin(executor, folder, partial, iteration))
    writing = Writing(list(written(executor, CHUNK_VALUES)), executor.beat)
    with _one_sentence(executor, folder):
        index = write(
            {},
            storage_writer=FileSystemWriter(partial),
            planner=writing,
            process_group=_group(executor),
            no_dist=_is_alone(executor),
        )
    _together(executor, folder, lambda: _complete(executor, folder, partial, index))


def load(executor: Executor, folder: Path) -> int:
    """Put a checkpoint's state in the place of the executor's. All ranks call this, between two iterations.

    The plan that wrote it may have been any. Weights of another number format follow from the float32 ones. The index
    of torch.distributed.checkpoint is a pickle, which can run code: load what you trust.

    Returns:
        How many iterations are done: the number of the next one.

    Raises:
        CheckpointError: on all ranks, with one sentence, where the checkpoint is not there, not complete, or another
            model's or optimizer's. What the executor holds is then undefined if reading has begun.
    """
    executor.beat(f"loading the checkpoint {folder}")
    state = _together(executor, folder, lambda: _fitting(executor, folder))
    reading = Reading(list(held(executor)), folder, executor.beat)
    with _one_sentence(executor, folder):
        read(
            {},
            storage_reader=FileSystemReader(folder),
            planner=reading,
            process_group=_group(executor),
            no_dist=_is_alone(executor),
        )
    executor.beat("publishing the loaded weights")
    for unit in executor.stage.units:
        unit.publish()
    executor.optimizer.resume(state.updates)
    executor.loss_scale.resume(state.loss_scale, state.quiet_iterations)
    return state.iteration


def _begin(executor: Executor, folder: Path, partial: Path, iteration: int) -> None:
    if not _speaks(executor):
        return
    if folder.exists():
        raise CheckpointError(f"{folder} is there already; save each checkpoint to a folder of its own")
    if partial.exists():  # of a run that ended while it wrote
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    scale = executor.loss_scale
    state = TrainingState(
        executor.model.family,
        executor.training.optimizer,
        iteration,
        executor.optimizer.updates,
        scale.factor if scale.active else None,
        scale.quiet_iterations,
    )
    (partial / STATE_FILE).write_text(documents.dumps(state), encoding="utf-8")


def _complete(executor: Executor, folder: Path, partial: Path, index: Metadata) -> None:
    if not _speaks(executor):
        return
    files = {chunk.relative_path for chunk in index.storage_data.values()}
    if lacking := sorted(name for name in files if not (partial / name).exists()):
        raise CheckpointError(
            f"{partial} lacks {lacking[0]}, which another rank wrote; save to storage that all nodes share"
        )
    partial.rename(folder)


def _fitting(executor: Executor, folder: Path) -> TrainingState:
    """The checkpoint's document. Raises CheckpointError where this run cannot carry on from there."""
    try:
        text = (folder / STATE_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint that can be read: {STATE_FILE}: {error.strerror}") from error
    state: TrainingState = documents.loads(text, TrainingState, source=str(folder / STATE_FILE))
    if problem := state.misfit(executor.model.family, executor.training.optimizer):
        raise CheckpointError(f"{folder}: {problem}")
    return state


def _group(executor: Executor) -> dist.ProcessGroup | None:
    return executor.groups.of(executor.mesh.ranks)


def _speaks(executor: Executor) -> bool:
    """Whether this rank does what one of them has to do for all."""
    return executor.rank == executor.mesh.ranks[0]


def _is_alone(executor: Executor) -> bool:
    return len(executor.mesh.ranks) == 1


def _together(executor: Executor, folder: Path, step: Callable[[], _Found]) -> _Found:
    """Do a step on every rank. Raises CheckpointError on all of them where it fails on one."""
    problem, found = "", None
    try:
        found = step()
    except OSError as error:
        problem = f"{folder}: {one_line(str(error))}"
    except ValueError as error:
        problem = one_line(str(error))
    problems = [problem] * len(executor.mesh.ranks)
    if not _is_alone(executor):
        dist.all_gather_object(problems, problem, _group(executor))
    for first in filter(None, problems):
        raise CheckpointError(first)
    return cast("_Found", found)


@contextmanager
def _one_sentence(executor: Executor, folder: Path) -> Iterator[None]:
    """Tell what torch.distributed.checkpoint gathers from all ranks as the first rank's one sentence."""
    try:
        with _unwarned() if _is_alone(executor) else nullcontext():
            yield
    except CheckpointException as error:
        place, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, CheckpointError):
            raise cause from None
        words = one_line(str(cause)).split(". ")[0] or type(cause).__name__  # torch's advice is for its own developers
        raise CheckpointError(f"{folder}: rank {executor.mesh.ranks[place]}: {words}") from error


@contextmanager
def _unwarned() -> Iterator[None]:
    """One rank needs no group; torch.distributed.checkpoint warns that it has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
