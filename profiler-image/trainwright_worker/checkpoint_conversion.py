"""Conversion between the worker's checkpoints and those of torch's own trainers, chunk by chunk.

Both are read and written by torch.distributed.checkpoint; their names differ. A checkpoint of the worker has no plan, so
there is nothing to convert between plans.

In torch's, `model` is the state of a module whose `layers` are the model's layers, or of a user's whole module, and
`optim.state` that of torch's Adam or SGD, as `torch.distributed.checkpoint.state_dict` names them. A tied weight and its state
are there for each of its layers.
Groups of parameters, with their learning rates, are the trainer's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from trainwright import documents
from trainwright.model import Model
from trainwright.training import Training
from trainwright_worker.executor.checkpoint import (
    STATE_FILE,
    CheckpointReader,
    TrainingState,
    make_partial_folder,
    raise_first_error,
    read_training_state,
)
from trainwright_worker.executor.checkpoint_chunks import (
    BUFFERS,
    WEIGHTS,
    CheckpointError,
    StateTile,
    Tile,
    TileLoadPlanner,
    TileSavePlanner,
    former_name,
    metadata_index,
    optimizer_states,
)
from trainwright_worker.executor.optimizer import OPTIMIZERS
from trainwright_worker.executor.torch_optimizer import STEP, TORCH_STATES
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.initial_weights import deferred_weights
from trainwright_worker.layers.custom import CustomLayers
from trainwright_worker.layers.layer import SharedWeights
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard

MODEL, OPTIMIZER = "model", "optim"

Keys = tuple[str, ...]
"""Keys of a tensor in nested dictionaries; joined by dots, its name in the index."""


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """Weight or persistent buffer of a model.

    Attributes:
        name: in the worker's checkpoints: layer and parameter or buffer, or the name of a tied weight or in a whole module.
        torch_names: in torch's: layer and parameter or buffer, for each layer that has it, or all names in a whole module.
        is_trained: whether optimizers have a state of it.
        is_used: whether a layer has it; else it is in a user's whole module alone, and in torch's checkpoints at most.
    """

    name: str
    torch_names: tuple[str, ...]
    shape: tuple[int, ...]
    is_buffer: bool = False
    is_trained: bool = True
    is_used: bool = True

    @property
    def worker_name(self) -> str:
        return f"{BUFFERS if self.is_buffer else WEIGHTS}/{self.name}"


def named_tensors(model: Model) -> tuple[NamedTensor, ...]:
    """Return the weights and buffers of a model, in the order of its layers; then those that no layer has.

    Raises CheckpointError if the layers of a user's model cannot be made.
    """
    try:
        family = make_family_layers(model)
    except WorkerError as error:
        raise CheckpointError(error.message) from error
    shared: SharedWeights = {}
    tensors: dict[str, NamedTensor] = {}
    with deferred_weights(torch.device("meta")):
        for layer in range(len(model.layers)):
            module = family.make(layer, seed=0, shard=TensorShard(), shared=shared)
            for attribute, parameter in module.named_parameters():
                name = module.shared_weights.get(attribute) or module.checkpoint_name(layer, attribute)
                tensor = tensors.get(
                    name, NamedTensor(name, (), tuple(parameter.shape), is_trained=parameter.requires_grad)
                )
                torch_names = dict.fromkeys((*tensor.torch_names, *module.torch_names(layer, attribute)))
                tensors[name] = replace(tensor, torch_names=tuple(torch_names))
            for attribute, buffer in module.persistent_buffers():
                name, shape = module.checkpoint_name(layer, attribute), tuple(buffer.shape)
                tensors[name] = NamedTensor(
                    name, module.torch_names(layer, attribute), shape, is_buffer=True, is_trained=False
                )
    unused = family.whole_names.unused if isinstance(family, CustomLayers) else ()
    return *tensors.values(), *(NamedTensor(name, (name,), (), is_used=False) for name in unused)


def is_of_worker(folder: Path) -> bool:
    """Return whether a folder is a checkpoint of the worker."""
    return (folder / STATE_FILE).exists()


def to_torch(source: Path, target: Path) -> TrainingState:
    """Write a checkpoint of the worker as one of torch's trainers. Raises CheckpointError with one sentence."""
    state = read_training_state(source)
    new = _NewCheckpoint(source)
    kinds = optimizer_states(new.stored)
    needed = set(OPTIMIZERS[state.optimizer].state_names) if kinds and state.optimizer in OPTIMIZERS else set()
    written: set[str] = set()
    for tensor in named_tensors(Model.of(state.family)):
        for name in tensor.torch_names:
            if name in written or not tensor.is_used:  # written by the first of the layers that have copies of it
                continue
            written.add(name)
            new.copy((MODEL, name), tensor.shape, _with_former(tensor.worker_name))
            if not tensor.is_trained:
                continue
            of_weight = (OPTIMIZER, "state", name)
            for kind in sorted(kinds | needed):
                shape, names = tensor.shape if kind in TORCH_STATES else None, _with_former(f"{kind}/{tensor.name}")
                if kind in needed or not new.stored.keys().isdisjoint(names):
                    new.copy((*of_weight, TORCH_STATES.get(kind, kind)), shape, names)
            if kinds and state.optimizer != "sgd":
                new.add((*of_weight, STEP), torch.tensor(float(state.updates)))
    new.write(target)
    return state


def _with_former(name: str) -> list[str]:
    return [name, former_name(name)]


def to_worker(source: Path, target: Path, training: Training, *, iteration: int | None = None) -> TrainingState:
    """Write a checkpoint of torch's trainers as one of the worker, in float32.

    Buffers keep their number formats. Without a state of the optimizer in it, that of a new one is written. `iteration` is the number of completed iterations, by
    default that of the updates of torch's Adam. Raises CheckpointError with one sentence.
    """
    new = _NewCheckpoint(source)
    has_state = any(name.startswith(f"{OPTIMIZER}.") for name in new.stored)
    steps = []
    for tensor in named_tensors(Model.of(training.family)):
        if not tensor.is_used:
            new.leave(f"{MODEL}.{tensor.name}", f"{OPTIMIZER}.state.{tensor.name}.")
            continue
        dtype = None if tensor.is_buffer else torch.float32
        new.copy((tensor.worker_name,), tensor.shape, [f"{MODEL}.{name}" for name in tensor.torch_names], dtype)
        if not tensor.is_trained:
            continue
        of_weight = [f"{OPTIMIZER}.state.{name}" for name in tensor.torch_names]
        for kind in OPTIMIZERS[training.optimizer].state_names:
            if has_state:
                names = [f"{name}.{TORCH_STATES[kind]}" for name in of_weight]
                new.copy((f"{kind}/{tensor.name}",), tensor.shape, names, torch.float32)
            else:
                new.add((f"{kind}/{tensor.name}",), torch.zeros(tensor.shape))
        if has_state and training.optimizer == "adam":
            steps.append(new.read_number([f"{name}.{STEP}" for name in of_weight]))
    new.leave(f"{OPTIMIZER}.param_groups.")
    new.refuse_unknown()
    if len(set(steps)) > 1:
        raise CheckpointError(
            f"{source}: weights were updated {min(steps):.0f} to {max(steps):.0f} times, but the worker updates all at "
            "once; convert a checkpoint whose weights are all trained"
        )
    updates = round(steps[0]) if steps else iteration or 0
    state = TrainingState(training.family, training.optimizer, updates if iteration is None else iteration, updates)
    new.write(target, state)
    return state


class _NewCheckpoint:
    """Checkpoint made of the stored tensors of another one, under other names.

    Attributes:
        stored: index of the tensors of the other checkpoint.
    """

    def __init__(self, source: Path) -> None:
        self._source, self._reader = source, CheckpointReader(source)
        try:
            self.stored: Mapping[str, Any] = self._reader.index.state_dict_metadata
        except OSError as error:
            raise CheckpointError(
                f"{source}: not a checkpoint of torch.distributed.checkpoint: {error.filename}: {error.strerror}"
            ) from error
        self._used: set[str] = set()
        self._left: list[str] = []
        self._tiles: list[StateTile] = []
        self._names: list[str] = []
        self._paths: dict[str, Keys] = {}

    def copy(
        self, keys: Keys, shape: tuple[int, ...] | None, names: Sequence[str], dtype: torch.dtype | None = None
    ) -> None:
        """Take a stored tensor of a shape, None for any, by the first of its names that is there."""
        name, stored = self._find(names)
        size = tuple(stored.size)
        if shape not in {None, size}:
            raise CheckpointError(
                f"{self._source}: {name} has shape {size} in the checkpoint, but {shape} in the model"
            )
        for chunk in stored.chunks:
            tile = Tile(tuple(chunk.offsets), tuple(chunk.sizes))
            placeholder = torch.empty(tile.sizes, dtype=dtype or stored.properties.dtype, device="meta")
            self._add(keys, StateTile(".".join(keys), size, tile, placeholder), name)

    def add(self, keys: Keys, values: Tensor) -> None:
        """Take given values."""
        shape = tuple(values.shape)
        self._add(keys, StateTile(".".join(keys), shape, Tile((0,) * len(shape), shape), values), "")

    def _add(self, keys: Keys, tile: StateTile, name: str) -> None:
        self._paths[tile.name] = keys
        self._tiles.append(tile)
        self._names.append(name)

    def _find(self, names: Sequence[str]) -> tuple[str, TensorStorageMetadata]:
        stored_names = [name for name in names if isinstance(self.stored.get(name), TensorStorageMetadata)]
        if not stored_names:
            raise CheckpointError(f"{self._source}: {names[0]} is not in the checkpoint, but the model has it")
        self._used.update(stored_names)
        return stored_names[0], self.stored[stored_names[0]]

    def read_number(self, names: Sequence[str]) -> float:
        """Return a stored tensor of one value."""
        name, stored = self._find(names)
        shape = tuple(stored.size)
        return self._read(name, StateTile("", shape, Tile((0,) * len(shape), shape), torch.empty(shape))).item()

    def leave(self, *beginnings: str) -> None:
        """Leave stored tensors whose names begin so where they are."""
        self._left += beginnings

    def refuse_unknown(self) -> None:
        """Raise CheckpointError if a stored tensor was neither taken nor left."""
        unknown = [name for name in self.stored if name not in self._used and not name.startswith(tuple(self._left))]
        if unknown:
            raise CheckpointError(f"{self._source}: {min(unknown)} is in the checkpoint, but not in the model")

    def _read(self, name: str, tile: StateTile) -> Tensor:
        """Return a tile of a stored tensor."""
        part = replace(tile, name=name, values=torch.empty(tile.tile.sizes, dtype=tile.values.dtype))
        with raise_first_error(self._source):
            read({}, storage_reader=self._reader, planner=_PartPlanner([part], self._source), no_dist=True)
        return part.values

    def write(self, folder: Path, state: TrainingState | None = None) -> None:
        """Write the checkpoint to a new folder, which appears when it is complete."""
        partial = make_partial_folder(folder)
        names = {metadata_index(tile): name for tile, name in zip(self._tiles, self._names, strict=True) if name}

        def values(tile: StateTile) -> Tensor:
            name = names.get(metadata_index(tile))
            return tile.values if name is None else self._read(name, tile)

        planner = _CopyPlanner(self._tiles, values, self._paths)
        with raise_first_error(folder):
            write({}, storage_writer=FileSystemWriter(partial), planner=planner, no_dist=True)
        if state is not None:
            (partial / STATE_FILE).write_text(documents.dumps(state), encoding="utf-8")
        partial.rename(folder)


class _PartPlanner(TileLoadPlanner):
    """Planner that reads tiles, and nothing else that is stored."""

    def __init__(self, tiles: list[StateTile], folder: Path) -> None:
        super().__init__(tiles, folder, lambda _doing: None)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan


class _CopyPlanner(TileSavePlanner):
    """Planner that gets a tile's values when they are written, and tells torch's tools how the names nest."""

    def __init__(
        self, tiles: list[StateTile], values: Callable[[StateTile], Tensor], paths: Mapping[str, Keys]
    ) -> None:
        super().__init__(tiles, lambda _doing: None)
        self._values, self._paths = values, paths

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=dict(self._paths))

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._values(self._tiles[index])
