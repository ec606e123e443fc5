"""Checkpoints independent of the plan: one plan's ranks write them, another plan's ranks read them.

A checkpoint stores every tensor of the state unsharded, under its own name, in chunks that ranks write without
communicating; a rank reads the chunks that overlap its shards, so no process ever holds the full model. The files and
their index are torch.distributed.checkpoint's and readable by its tools, next to a `TrainingState` as JSON.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from trainwright import documents
from trainwright.document_kind import document
from trainwright.families import Custom, Family
from trainwright_worker.executor.checkpoint_chunks import (
    WEIGHTS,
    CheckpointError,
    TileLoadPlanner,
    TileSavePlanner,
    optimizer_states,
    resident_tiles,
    stored_name,
    written_tiles,
)
from trainwright_worker.executor.executor import PlanExecutor
from trainwright_worker.executor.flat_parameter import publish_updates
from trainwright_worker.executor.resumed_states import TrainedChange
from trainwright_worker.gang.errors import one_line
from trainwright_worker.gang.gathering import gather
from trainwright_worker.layers.custom import CustomLayers


@document("TrainingState")
@dataclass(frozen=True, slots=True)
class TrainingState:
    """Document stored next to a checkpoint's tensors.

    Attributes:
        family: model family; a checkpoint loads only into the same model.
        iteration: completed iterations, i.e. the index of the next one.
        updates: iterations that updated the weights (float16 gradients may overflow).
        loss_scale: float16 loss scale; None if unscaled.
        quiet_iterations: iterations since the loss scale last changed.
    """

    family: Family
    optimizer: str
    iteration: int
    updates: int
    loss_scale: float | None = None
    quiet_iterations: int = 0

    def mismatch(self, family: Family, optimizer: str) -> str | None:
        """Return why training that model with that optimizer cannot resume here, as text; None if it can."""
        if self.family.family != family.family:
            return f"it holds a model of family {self.family.family}, but this run trains {family.family}"
        if isinstance(family, Custom) and isinstance(self.family, Custom):
            problem = _other_layers(self.family, family)
        else:
            problem = _other_fields(self.family, family)
        if problem is not None:
            return f"{problem}; load it into the model that it was saved from"
        if self.optimizer != optimizer:
            return (
                f"it was saved by optimizer {self.optimizer}, and the state of {optimizer} is not in it; "
                f"go on with {self.optimizer}"
            )
        return None


def _other_fields(saved: Family, current: Family) -> str | None:
    """Return the first field in which two models of a family differ, as text; None if there is none."""
    for field in fields(current):
        values = getattr(saved, field.name), getattr(current, field.name)
        if values[0] != values[1]:
            before, now = map(_format_value, values)
            return f"{current.family}.{field.name} is {before} in the checkpoint's model, but {now} in this run's"
    return None


def _other_layers(saved: Custom, current: Custom) -> str | None:
    """Return in which layers two own models differ, as text. Names and shapes of their weights are compared as these are read."""
    sizes = []
    for model in (saved, current):
        parameters = {kind.name: kind.parameters for kind in model.kinds}
        sizes.append([parameters[name] for name in model.layers])
    if len(sizes[0]) != len(sizes[1]):
        return f"it holds {len(sizes[0])} layers, but this run's model has {len(sizes[1])}"
    for layer, (before, now) in enumerate(zip(*sizes, strict=True)):
        if before != now:
            return f"layer {layer} holds {before} values in the checkpoint's model, but {now} in this run's"
    return None


def _format_value(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


STATE_FILE = "training.json"
MAX_CHUNK_VALUES = 4 * 2**20
"""Maximum values per chunk, 16 MiB: whoever needs a part of a chunk reads all of it."""

_Result = TypeVar("_Result")


def save(executor: PlanExecutor, folder: Path, iteration: int) -> None:
    """Write the training state after `iteration` iterations to a new folder. All ranks call this.

    The folder appears atomically when it is complete; until then files are in `<folder>.partial`. It must be on storage
    that all ranks share. Collectives wait for the slowest rank's files, so their timeout must exceed that time.

    Raises:
        CheckpointError: on all ranks, with one sentence; the folder is not created.
    """
    temporary = _partial_folder(folder)
    executor.beat(f"saving a checkpoint to {folder}")
    _run_on_all_ranks(executor, folder, lambda: _start_saving(executor, folder, temporary, iteration))
    planner = TileSavePlanner(list(written_tiles(executor, MAX_CHUNK_VALUES)), executor.beat)
    with raise_first_error(folder, executor.plan_ranks.ranks):
        write(
            {},
            storage_writer=FileSystemWriter(temporary),
            planner=planner,
            process_group=_process_group(executor),
            no_dist=_is_single_rank(executor),
        )
    _run_on_all_ranks(executor, folder, lambda: _finish_saving(executor, folder, temporary))


def load(executor: PlanExecutor, folder: Path) -> int:
    """Load a checkpoint into the executor. All ranks call this, between two iterations.

    Any plan may have written it. Weights of another dtype are cast from the float32 master weights. The index of
    torch.distributed.checkpoint is a pickle, which can run code: load only trusted checkpoints.

    Returns:
        Completed iterations, i.e. the index of the next one.

    Raises:
        CheckpointError: on all ranks, with one sentence, if the checkpoint is missing, incomplete, or another model's or
            optimizer's. The executor's state is undefined if reading has begun.
    """
    executor.beat(f"loading the checkpoint {folder}")
    reader = CheckpointReader(folder)
    state = _run_on_all_ranks(executor, folder, lambda: _begin_loading(executor, folder, reader))
    stored, copies = reader.index.state_dict_metadata, _copies(executor)
    tiles = [replace(tile, name=stored_name(tile.name, stored, copies)) for tile in resident_tiles(executor)]
    names = _on_all_ranks(executor, (tile.name for tile in tiles))
    change = TrainedChange.of(names, stored, counts_updates=executor.optimizer.counts_updates)
    if (sentence := change.sentence()) and _is_first_rank(executor):
        warnings.warn(f"{folder}: {sentence}", stacklevel=2)
    left = {name for name in stored if not change.reads(name)}
    left |= {copy for copy, name in copies.items() if name in names}
    planner = TileLoadPlanner([tile for tile in tiles if change.reads(tile.name)], folder, executor.beat, left)
    with raise_first_error(folder, executor.plan_ranks.ranks):
        read(
            {},
            storage_reader=reader,
            planner=planner,
            process_group=_process_group(executor),
            no_dist=_is_single_rank(executor),
        )
    executor.beat("publishing the loaded weights")
    publish_updates(executor.stage.flat_parameters)
    executor.optimizer.resume(0 if change.resets else state.updates)
    executor.loss_scale.resume(state.loss_scale, state.quiet_iterations)
    return state.iteration


def make_partial_folder(folder: Path) -> Path:
    """Make the empty folder that becomes a checkpoint's when it is complete. Raises CheckpointError if that one exists."""
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; save each checkpoint to a folder of its own")
    partial = _partial_folder(folder)
    if partial.exists():  # left by a run that ended while writing
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def _partial_folder(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _start_saving(executor: PlanExecutor, folder: Path, temporary: Path, iteration: int) -> None:
    if not _is_first_rank(executor):
        return
    make_partial_folder(folder)
    loss_scale = executor.loss_scale
    state = TrainingState(
        executor.model.family,
        executor.optimizer.name,
        iteration,
        executor.optimizer.updates,
        loss_scale.factor if loss_scale.active else None,
        loss_scale.quiet_iterations,
    )
    (temporary / STATE_FILE).write_text(documents.dumps(state), encoding="utf-8")


def _finish_saving(executor: PlanExecutor, folder: Path, temporary: Path) -> None:
    if not _is_first_rank(executor):
        return
    # Before torch 2.13, saving returns an index without its files.
    index = FileSystemReader(temporary).read_metadata()
    files = {chunk.relative_path for chunk in index.storage_data.values()}
    if missing := sorted(name for name in files if not (temporary / name).exists()):
        raise CheckpointError(
            f"{temporary} lacks {missing[0]}, which another rank wrote; save to storage that all nodes share"
        )
    temporary.rename(folder)


class CheckpointReader(FileSystemReader):
    """Reader that loads the index once."""

    @cached_property
    def index(self) -> Metadata:
        return super().read_metadata()

    def read_metadata(self, *_arguments: Any, **_options: Any) -> Metadata:
        return self.index


def read_training_state(folder: Path) -> TrainingState:
    """Return a checkpoint's training state. Raises CheckpointError if there is none."""
    try:
        text = (folder / STATE_FILE).read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{folder} is not a readable checkpoint: {STATE_FILE}: {error.strerror}") from error
    state: TrainingState = documents.loads(text, TrainingState, source=str(folder / STATE_FILE))
    return state


def _begin_loading(executor: PlanExecutor, folder: Path, reader: CheckpointReader) -> TrainingState:
    """Return the checkpoint's training state, and make room for it. Raises CheckpointError if this run cannot resume from it."""
    state = read_training_state(folder)
    if problem := state.mismatch(executor.model.family, executor.optimizer.name):
        raise CheckpointError(f"{folder}: {problem}")
    executor.optimizer.begin_resuming(has_states=bool(optimizer_states(reader.index.state_dict_metadata)))
    return state


def _on_all_ranks(executor: PlanExecutor, names: Iterable[str]) -> frozenset[str]:
    """Return the names that some rank has."""
    own = sorted(set(names))
    if _is_single_rank(executor):
        return frozenset(own)
    return frozenset(chain.from_iterable(gather(own, list[str], executor.device, _process_group(executor))))


def _copies(executor: PlanExecutor) -> dict[str, str]:
    """Return the weights that layers of an own model share, which a checkpoint holds once where they are trained."""
    if not isinstance(layers := executor.family_layers, CustomLayers):
        return {}
    shared = {**layers.shared_weights, **layers.copied_weights}
    own_names = {layer: layers.whole_names.checkpoint_name(layer, weight.own_name) for layer, weight in shared.items()}
    return {f"{WEIGHTS}/{own_names[layer]}": f"{WEIGHTS}/{weight.name}" for layer, weight in shared.items()}


def _process_group(executor: PlanExecutor) -> dist.ProcessGroup | None:
    return executor.groups.group_of(executor.plan_ranks.ranks)


def _is_first_rank(executor: PlanExecutor) -> bool:
    """Return whether this rank acts for all."""
    return executor.rank == executor.plan_ranks.ranks[0]


def _is_single_rank(executor: PlanExecutor) -> bool:
    return len(executor.plan_ranks.ranks) == 1


def _run_on_all_ranks(executor: PlanExecutor, folder: Path, step: Callable[[], _Result]) -> _Result:
    """Run a step on every rank. Raises CheckpointError on all of them if it fails on one."""
    problem, result = "", None
    try:
        result = step()
    except OSError as error:
        problem = f"{folder}: {one_line(str(error))}"
    except ValueError as error:
        problem = one_line(str(error))
    problems = [problem] * len(executor.plan_ranks.ranks)
    if not _is_single_rank(executor):
        problems = gather(problem, str, executor.device, _process_group(executor))
    for first in filter(None, problems):
        raise CheckpointError(first)
    return cast("_Result", result)


@contextmanager
def raise_first_error(folder: Path, ranks: Sequence[int] = (0,)) -> Iterator[None]:
    """Re-raise the failures that torch.distributed.checkpoint gathers as the first rank's error, in one sentence."""
    try:
        with _without_warnings():
            yield
    except CheckpointException as error:
        rank_index, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        if isinstance(cause, CheckpointError):
            raise cause from None
        message = (
            one_line(str(cause)).split(". ")[0] or type(cause).__name__
        )  # torch's advice is for its own developers
        rank = f"rank {ranks[rank_index]}: " if len(ranks) > 1 else ""
        raise CheckpointError(f"{folder}: {rank}{message}") from error


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence torch.distributed.checkpoint's warnings: a single rank has no process group, and torch uses what it deprecates."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield
