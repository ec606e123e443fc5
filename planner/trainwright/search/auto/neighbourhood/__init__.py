"""Neighbourhoods: small changes of a plan, each yielding valid plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainwright.search.auto.neighbourhood.device_moves import (
    EditablePipeline,
    Move,
    change_devices,
    editable_pipelines,
    move_devices,
)
from trainwright.search.auto.neighbourhood.layer_moves import (
    change_strategy_boundaries,
    insert_or_remove_stages,
    move_layers,
)
from trainwright.search.auto.neighbourhood.strategy_moves import (
    change_micro_batch_size,
    change_schedule,
    change_sharding,
    change_tensor_degree,
    save_memory,
)

Neighbourhood = Callable[[Sequence[EditablePipeline]], Iterator[Move]]

NEIGHBOURHOODS: tuple[Neighbourhood, ...] = (
    change_sharding,
    change_micro_batch_size,
    move_layers,
    save_memory,
    move_devices,
    change_devices,
    change_tensor_degree,
    insert_or_remove_stages,
    change_strategy_boundaries,
    change_schedule,
)
"""Neighbourhoods, most promising first."""

NEEDS_REBALANCING: frozenset[Neighbourhood] = frozenset(
    {
        change_micro_batch_size,
        move_devices,
        change_devices,
        change_tensor_degree,
        insert_or_remove_stages,
        change_schedule,
    }
)
"""Neighbourhoods whose moves may unbalance stages."""

__all__ = ["NEEDS_REBALANCING", "NEIGHBOURHOODS", "EditablePipeline", "Move", "Neighbourhood", "editable_pipelines"]
