"""Pieces out to the chunks of a checkpoint and in again, by plans for torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainwright_worker.executor.boxes import Box
from trainwright_worker.executor.holdings import Piece


class CheckpointError(ValueError):
    """A checkpoint that cannot be saved or loaded; the message is one sentence."""


class Writing(DefaultSavePlanner):
    """Writes pieces as chunks of whole tensors."""

    def __init__(self, pieces: list[Piece], beat: Callable[[str], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}
        self._beat = beat

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        self._beat(f"writing {index.fqn}")
        return self._pieces[index].values


class Reading(DefaultLoadPlanner):
    """Reads whatever meets these pieces, and puts it where their values are."""

    def __init__(self, pieces: list[Piece], folder: Path, beat: Callable[[str], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}
        self._folder, self._beat = folder, beat

    def create_local_plan(self) -> LoadPlan:
        by_name: dict[str, list[Piece]] = {}
        for piece in self._pieces.values():
            by_name.setdefault(piece.name, []).append(piece)
        items: list[ReadItem] = []
        for name, pieces in by_name.items():
            stored = self._stored(name, pieces[0].shape)
            items += create_read_items_for_chunk_list(name, stored, [_chunk(piece.box) for piece in pieces])
        return LoadPlan(items)

    def _stored(self, name: str, shape: tuple[int, ...]) -> TensorStorageMetadata:
        stored = self._stored_tensors.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder}: {name} is not in the checkpoint, but this run's model has it")
        if tuple(stored.size) != shape:
            raise CheckpointError(
                f"{self._folder}: {name} has shape {tuple(stored.size)} in the checkpoint, but {shape} in this run's model"
            )
        return stored

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Of the first rank. Raises CheckpointError where no rank wants a tensor that is there."""
        wanted = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        if left := sorted(set(self._stored_tensors) - wanted):
            raise CheckpointError(f"{self._folder}: {left[0]} is in the checkpoint, but not in this run's model")
        return global_plan

    @property
    def _stored_tensors(self) -> dict[str, Any]:
        return {} if self.metadata is None else self.metadata.state_dict_metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        self._beat(f"reading {index.fqn}")
        return self._pieces[index].values


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.name, torch.Size(piece.box.offsets))


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    data = TensorWriteData(_chunk(piece.box), TensorProperties(piece.values.dtype), torch.Size(piece.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
