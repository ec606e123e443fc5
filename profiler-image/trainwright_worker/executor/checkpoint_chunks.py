"""Chunks of a checkpoint: a rank's state as rectangular tiles of full tensors, and the planners that move them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
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
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from trainwright.strategy import Sharding
from trainwright_worker.executor.executor import PlanExecutor
from trainwright_worker.executor.flat_parameter import FlatParameter, Weight, WeightPart
from trainwright_worker.executor.parameter_groups import tied_parameter_groups
from trainwright_worker.executor.plan_ranks import RunRanks
from trainwright_worker.executor.stage_module import RankLayer
from trainwright_worker.initial_weights import part_start


@dataclass(frozen=True, slots=True)
class Tile:
    """Rectangular tile of a tensor: `sizes[d]` entries from `offsets[d]` on in each dimension d."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def shifted(self, dimension: int, by: int) -> Tile:
        """Return the tile shifted by `by` entries in a dimension."""
        offsets = (*self.offsets[:dimension], self.offsets[dimension] + by, *self.offsets[dimension + 1 :])
        return Tile(offsets, self.sizes)


def tiles_of_interval(shape: tuple[int, ...], low: int, high: int, max_values: int = sys.maxsize) -> Iterator[Tile]:
    """Yield values `low … high - 1` of a flattened tensor as tiles, in order; none if `low >= high`.

    The values of a tile are contiguous in the flat tensor. A tensor of d dimensions needs at most 2d − 1 tiles, unless
    `max_values`, the maximum values per tile, requires more.
    """
    if low >= high:
        return
    if not shape:
        yield Tile((), ())
        return
    row_values = prod(shape[1:])
    first, last = -(-low // row_values), high // row_values
    if first > last:
        yield from _tiles_in_row(shape, last, low - last * row_values, high - last * row_values, max_values)
        return
    yield from _tiles_in_row(shape, first - 1, low - (first - 1) * row_values, row_values, max_values)
    yield from _tiles_of_rows(shape, first, last, max_values)
    yield from _tiles_in_row(shape, last, 0, high - last * row_values, max_values)


def _tiles_in_row(shape: tuple[int, ...], number: int, low: int, high: int, max_values: int) -> Iterator[Tile]:
    for box in tiles_of_interval(shape[1:], low, high, max_values):
        yield Tile((number, *box.offsets), (1, *box.sizes))


def _tiles_of_rows(shape: tuple[int, ...], first: int, last: int, max_values: int) -> Iterator[Tile]:
    """Yield complete rows `first … last - 1`."""
    row_values = prod(shape[1:])
    if row_values > max_values:
        for number in range(first, last):
            yield from _tiles_in_row(shape, number, 0, row_values, max_values)
        return
    rows_per_tile = max_values // row_values
    for start in range(first, last, rows_per_tile):
        yield Tile((start, *(0 for _ in shape[1:])), (min(rows_per_tile, last - start), *shape[1:]))


WEIGHTS = "weights"
"""Kind of state of the float32 weights; other kinds have the names of the optimizer's states."""

BUFFERS = "buffers"
"""Kind of state of the layers' persistent buffers, in their own number formats."""


@dataclass(frozen=True, slots=True)
class StateTile:
    """Tile of a full tensor, with its values on this rank.

    Attributes:
        name: kind of state / weight, such as `mean/3.qkv_weight` or `weights/token_embedding`.
        shape: shape of the full tensor.
        values: view of this rank's values, in the tile's shape.
    """

    name: str
    shape: tuple[int, ...]
    tile: Tile
    values: Tensor

    @property
    def joined_shape(self) -> tuple[int, ...]:
        """Shape of the tensor with its first two dimensions as one."""
        return self.shape if len(self.shape) < 2 else (prod(self.shape[:2]), *self.shape[2:])

    def joined(self) -> Iterator[StateTile]:
        """Yield the parts of the tile in the tensor with its first two dimensions as one."""
        first, inner, *others = self.tile.offsets
        for index, values in enumerate(self.values, first):
            tile = Tile((index * self.shape[1] + inner, *others), self.tile.sizes[1:])
            yield StateTile(self.name, self.joined_shape, tile, values)


@dataclass(frozen=True, slots=True)
class _RankState:
    """State of a flat parameter on this rank.

    Attributes:
        states: of each part of a weight, by kind: flat values, or a state that belongs to the weight as a whole.
        run: run whose tensor degree splits the weights.
        rank: this rank, of that run.
    """

    flat_parameter: FlatParameter
    states: tuple[tuple[WeightPart, dict[str, Tensor]], ...]
    run: RunRanks
    rank: int

    def tiles(self, low: int, high: int, max_values: int = sys.maxsize) -> Iterator[StateTile]:
        """Yield this rank's part of values `low … high - 1` of the flat parameter, in tiles of at most `max_values` values."""
        for part, states in self.states:
            begin = self.flat_parameter.shard_start + part.start - part.first
            first, stop = max(low - begin, part.first), min(high - begin, part.stop)
            position = first - part.first
            for box in tiles_of_interval(tuple(part.weight.parameter.shape), first, stop, max_values):
                for kind, flat in states.items():
                    if flat.shape == (part.stop - part.first,):
                        values = flat[position : position + box.numel].view(box.sizes)
                        yield self._state_tile(kind, part.weight, box, values)
                position += box.numel

    def whole_states(self, intervals: Sequence[tuple[int, int]] | None = None) -> Iterator[StateTile]:
        """Yield states that belong to weights as a whole; with intervals, those of weights that begin in one of them.

        A weight that the tensor degree or a mesh splits begins on its first rank.
        """
        for part, states in self.states:
            begin = self.flat_parameter.shard_start + part.start - part.first
            is_first = part.weight.split_dimension is None or self.run.tensor_shard(self.rank)[0] == 0
            if part.weight.box is not None:
                is_first = not any(part.weight.box.offsets)
            if intervals is None or (is_first and any(low <= begin < high for low, high in intervals)):
                for kind, state in states.items():
                    if state.shape != (part.stop - part.first,):
                        shape = tuple(state.shape)
                        yield StateTile(f"{kind}/{part.weight.name}", shape, Tile((0,) * len(shape), shape), state)

    def _state_tile(self, kind: str, weight: Weight, tile: Tile, values: Tensor) -> StateTile:
        shape, name = list(weight.parameter.shape), f"{kind}/{weight.name}"
        if weight.box is not None:
            for dimension, offset in enumerate(weight.box.offsets):
                tile = tile.shifted(dimension, offset)
            return StateTile(name, weight.box.full_shape, tile, values)
        if weight.split_dimension is None:
            return StateTile(name, tuple(shape), tile, values)
        shape[weight.split_dimension] = size = weight.split_size or 0
        tile = tile.shifted(weight.split_dimension, part_start(size, *self.run.tensor_shard(self.rank)))
        return StateTile(name, tuple(shape), tile, values)

    def write_intervals(self) -> tuple[tuple[int, int], ...]:
        """Return the intervals of the flat parameter that this rank writes, an even share among the ranks of its run.

        Each replica writes its shard, or an equal share of unsharded state. Weights that the tensor degree does not split are
        also divided among the ranks of a tensor group, since all of them hold them.
        """
        flat_parameter = self.flat_parameter
        low, high, split_end = (
            flat_parameter.shard_start,
            min(flat_parameter.shard_stop, flat_parameter.size),
            flat_parameter.split_size,
        )
        if flat_parameter.copies is not None:
            return (_even_share(low, high, flat_parameter.copies.count, flat_parameter.copies.number),)
        count, number = self.run.replicas, self.run.position_of(self.rank).replica
        if flat_parameter.shard_group.sharding is not Sharding.NONE:
            count, number = 1, 0
        tensor_rank, shards = self.run.tensor_shard(self.rank)
        unsplit = count * shards, number * shards + tensor_rank
        return _even_share(low, min(high, split_end), count, number), _even_share(max(low, split_end), high, *unsplit)


def _even_share(low: int, high: int, count: int, number: int) -> tuple[int, int]:
    """Return the number-th of `count` nearly equal intervals."""
    size = -(-max(high - low, 0) // count)
    return low + number * size, min(low + (number + 1) * size, high)


def resident_tiles(executor: PlanExecutor) -> Iterator[StateTile]:
    """Yield all state that this rank holds."""
    for holding in _rank_states(executor):
        yield from holding.tiles(0, holding.flat_parameter.size)
        yield from holding.whole_states()
    for layer in executor.stage.layers:
        yield from _buffer_tiles(layer)


def written_tiles(executor: PlanExecutor, max_values: int) -> Iterator[StateTile]:
    """Yield the tiles that this rank writes, of at most `max_values` values; over all ranks each value is written once.

    Only the first pipeline writes; its first run with a tied weight writes that weight. Buffers are the first replica's:
    those of other replicas follow from other rows.
    """
    if executor.stage_ranks.pipeline > 0:
        return
    tied_groups = {group.name: group for group in tied_parameter_groups(executor.plan_ranks, executor.model)}
    for holding in _rank_states(executor):
        tied_group = tied_groups.get(holding.flat_parameter.weights[0].name)
        copies, writing_run = holding.flat_parameter.copies, holding.run if tied_group is None else tied_group.runs[0]
        if copies is not None:
            writes = copies.is_first
        else:
            writes = executor.rank in writing_run.ranks and (
                tied_group is None or tied_group.has_same_part(writing_run, holding.run)
            )
        if writes:
            intervals = holding.write_intervals()
            for low, high in intervals:
                yield from holding.tiles(low, high, max_values)
            yield from holding.whole_states(intervals)
    for layer in executor.stage.layers:
        position = layer.run.position_of(executor.rank)
        if (position.replica, position.tensor_rank) == (0, 0):
            yield from _buffer_tiles(layer, max_values)


def _buffer_tiles(layer: RankLayer, max_values: int = sys.maxsize) -> Iterator[StateTile]:
    for attribute, buffer in layer.module.persistent_buffers():
        name = f"{BUFFERS}/{layer.module.checkpoint_name(layer.number, attribute)}"
        shape = tuple(buffer.shape)
        for tile in tiles_of_interval(shape, 0, buffer.numel(), max_values):
            ends = map(sum, zip(tile.offsets, tile.sizes, strict=True))
            values = buffer.detach()[tuple(map(slice, tile.offsets, ends))]
            yield StateTile(name, shape, tile, values)


def _rank_states(executor: PlanExecutor) -> Iterator[_RankState]:
    stage = executor.stage
    for number, flat_parameter in enumerate((*stage.flat_parameters, *stage.frozen_parameters)):
        run = next(
            layer.run
            for layer in stage.layers
            if any(use.flat_parameter is flat_parameter for use in layer.parameter_uses)
        )
        states = tuple(
            (
                part,
                {
                    WEIGHTS: part.of(flat_parameter.master_shard),
                    **(executor.optimizer.states_of(number, part) if flat_parameter.is_trained else {}),
                },
            )
            for part in flat_parameter.own_parts
        )
        yield _RankState(flat_parameter, states, run, executor.rank)


def optimizer_states(names: Iterable[str]) -> set[str]:
    """Return the kinds of optimizer state among the names of a checkpoint's tensors."""
    return {name.partition("/")[0] for name in names} - {WEIGHTS, BUFFERS}


def weight_with_state(name: str) -> str | None:
    """Return the weight whose state of an optimizer a checkpoint's tensor is; None of other tensors."""
    kind, _, weight = name.partition("/")
    return None if kind in {WEIGHTS, BUFFERS} else weight


class CheckpointError(ValueError):
    """Checkpoint that cannot be saved or loaded; the message is one sentence."""


class TileSavePlanner(DefaultSavePlanner):
    """Planner that writes tiles as chunks of full tensors."""

    def __init__(self, pieces: list[StateTile], beat: Callable[[str], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tiles = {metadata_index(piece): piece for piece in pieces}
        self._beat = beat

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._tiles.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        self._beat(f"writing {index.fqn}")
        return self._tiles[index].values


class TileLoadPlanner(DefaultLoadPlanner):
    """Planner that reads the chunks that overlap the tiles into the tiles' values.

    Args:
        pieces: tiles by the names that their tensors have in the checkpoint.
        left: names of the checkpoint's tensors that no rank needs to read.
    """

    def __init__(
        self,
        pieces: Iterable[StateTile],
        folder: Path,
        beat: Callable[[str], None],
        left: AbstractSet[str] = frozenset(),
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tiles: dict[str, list[StateTile]] = {}
        for piece in pieces:
            self._tiles.setdefault(piece.name, []).append(piece)
        self._folder, self._beat, self._left = folder, beat, left

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        self._drop_buffers_of_former_version()
        for name, whole in self._tiles.items():
            stored, pieces = self._stored_metadata(name, whole[0]), whole
            if tuple(stored.size) != whole[0].shape:
                pieces = self._tiles[name] = [part for piece in whole for part in piece.joined()]
            items += create_read_items_for_chunk_list(name, stored, [_chunk_metadata(piece.tile) for piece in pieces])
        return LoadPlan(items)

    def _drop_buffers_of_former_version(self) -> None:
        """Leave buffers as they are made, with a warning, if the checkpoint has none: Trainwright 0.2.0 saved none."""
        buffers = [name for name in self._tiles if name.startswith(f"{BUFFERS}/")]
        if buffers and not any(name.startswith(f"{BUFFERS}/") for name in self._stored_tensors):
            warnings.warn(
                f"{self._folder}: no buffers are in the checkpoint, as Trainwright 0.2.0 saved none; {buffers[0]} and all "
                "others keep their initial values",
                stacklevel=2,
            )
            for name in buffers:
                del self._tiles[name]

    def _stored_metadata(self, name: str, piece: StateTile) -> TensorStorageMetadata:
        """Return how a piece's tensor is stored: in its shape, or with its first two dimensions as one.

        Trainwright 0.2.0 stored the latent weights of TransGAN in that other shape.
        """
        stored = self._stored_tensors.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{self._folder}: {name} is not in the checkpoint, but this run's model has it")
        if tuple(stored.size) not in {piece.shape, piece.joined_shape}:
            raise CheckpointError(
                f"{self._folder}: {name} has shape {tuple(stored.size)} in the checkpoint, but {piece.shape} in this run's model"
            )
        return stored

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Check, on the first rank, that some rank reads every stored tensor. Raises CheckpointError otherwise."""
        names = {item.dest_index.fqn for plan in global_plan for item in plan.items}
        if unread := sorted(self._stored_tensors.keys() - names - self._left):
            raise CheckpointError(f"{self._folder}: {unread[0]} is in the checkpoint, but not in this run's model")
        return global_plan

    @property
    def _stored_tensors(self) -> dict[str, Any]:
        return {} if self.metadata is None else self.metadata.state_dict_metadata

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        # Two tiles of a rank may begin at the same place, so the number that torch gives a rank's chunks tells them apart.
        self._beat(f"reading {index.fqn}")
        return self._tiles[index.fqn][index.index or 0].values


def stored_name(name: str, stored: Container[str], copies: Mapping[str, str]) -> str:
    """Return the name that a tensor has in a checkpoint: its own, that of the weight of which it is a copy, or a former one.

    Trainwright 0.2.0 put `module.` before the names of own models.
    """
    names = name, former_name(name), copies.get(name, name)
    return next((candidate for candidate in names if candidate in stored), name)


def former_name(name: str) -> str:
    """Return the name of an own model's parameter in checkpoints of Trainwright 0.2.0, given `kind/layer.parameter`."""
    kind, _, parameter = name.partition("/")
    return f"{kind}/{parameter.replace('.', '.module.', 1)}"


def metadata_index(tile: StateTile) -> MetadataIndex:
    """Return what identifies a tile in the index of a checkpoint."""
    return MetadataIndex(tile.name, torch.Size(tile.tile.offsets))


def _chunk_metadata(tile: Tile) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(tile.offsets), torch.Size(tile.sizes))


def _write_item(index: MetadataIndex, tile: StateTile) -> WriteItem:
    data = TensorWriteData(_chunk_metadata(tile.tile), TensorProperties(tile.values.dtype), torch.Size(tile.shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)
