"""Stages taken apart and put together again, on the same devices and on others."""

from __future__ import annotations

import pytest

from trainwright.cluster import Device
from trainwright.plan import Order
from trainwright.search.auto.setups import Setup, Strategy, scaled

DEVICES = tuple(Device(f"node-{node}", slot) for node in (1, 2, 3) for slot in (0, 1))


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize(("tensor", "rows"), [(1, (6, 5, 4, 3, 2, 4)), (2, (12, 7, 5)), (1, (5, 1, 5, 1, 5, 1))])
def test_on_its_own_devices_it_is_what_it_was(order: Order, tensor: int, rows: tuple[int, ...]) -> None:
    setup = Setup(DEVICES, (Strategy(rows, tensor, order=order),) * 2)
    assert setup.on(DEVICES, sum(rows)) == setup


def test_replicas_keep_their_nodes_proportions() -> None:
    setup = Setup(DEVICES, (Strategy((3, 3, 2, 2, 1, 1)),))
    assert setup.on(DEVICES[2:], 12).layers[0].rows == (4, 4, 2, 2)
    assert setup.on(DEVICES[:4], 20).layers[0].rows == (6, 6, 4, 4)


def test_of_other_nodes_there_is_the_mean() -> None:
    setup = Setup(DEVICES[:4], (Strategy((3, 3, 1, 1)),))
    assert setup.on((*DEVICES[:2], *DEVICES[4:]), 10).layers[0].rows == (3, 3, 2, 2)


def test_a_degree_that_does_not_divide_becomes_one() -> None:
    (layer,) = Setup(DEVICES[:4], (Strategy((2, 2), tensor=2),)).on(DEVICES[:3], 6).layers
    assert (layer.tensor, layer.rows) == (1, (2, 2, 2))


def test_fewer_rows_than_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="3 replicas cannot share 2 rows"):
        scaled((1, 1, 1), 2)
