"""Stages taken apart and put together again, on the same devices and on others."""

from __future__ import annotations

import pytest

from trainwright.cluster import Device
from trainwright.search.auto.layer_rebalancing import LayerStrategy, StageConfig, scale_rows
from trainwright.strategy import RankOrder, Strategy

DEVICES = tuple(Device(f"node-{node}", slot) for node in (1, 2, 3) for slot in (0, 1))


@pytest.mark.parametrize("order", RankOrder)
@pytest.mark.parametrize(("tensor", "rows"), [(1, (6, 5, 4, 3, 2, 4)), (2, (12, 7, 5)), (1, (5, 1, 5, 1, 5, 1))])
def test_stage_config_is_unchanged_on_its_own_devices(order: RankOrder, tensor: int, rows: tuple[int, ...]) -> None:
    setup = StageConfig(DEVICES, (LayerStrategy(rows, Strategy(tensor, len(rows), order)),) * 2)
    assert setup.with_devices(DEVICES, sum(rows)) == setup


def test_replicas_keep_the_row_ratios_of_their_nodes() -> None:
    setup = StageConfig(DEVICES, (LayerStrategy((3, 3, 2, 2, 1, 1), Strategy(1, 6)),))
    assert setup.with_devices(DEVICES[2:], 12).layers[0].rows == (4, 4, 2, 2)
    assert setup.with_devices(DEVICES[:4], 20).layers[0].rows == (6, 6, 4, 4)


def test_unknown_nodes_get_the_mean_rows() -> None:
    setup = StageConfig(DEVICES[:4], (LayerStrategy((3, 3, 1, 1), Strategy(1, 4)),))
    assert setup.with_devices((*DEVICES[:2], *DEVICES[4:]), 10).layers[0].rows == (3, 3, 2, 2)


def test_tensor_degree_becomes_one_when_it_does_not_divide() -> None:
    (layer,) = StageConfig(DEVICES[:4], (LayerStrategy((2, 2), Strategy(2, 2)),)).with_devices(DEVICES[:3], 6).layers
    assert (layer.strategy.tensor, layer.rows) == (1, (2, 2, 2))


def test_fewer_rows_than_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot split 2 rows over 3 replicas"):
        scale_rows((1, 1, 1), 2)
