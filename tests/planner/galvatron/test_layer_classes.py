"""Decision trees: how many strategies there are, and what they mean for devices and rows."""

from __future__ import annotations

import pytest

from trainwright.plan import RankOrder, Sharding
from trainwright.search.galvatron.layer_classes import Paradigm, Strategy, decision_trees, strategies

STAGES_OF_EIGHT = (8, 4, 2, 1)


@pytest.mark.parametrize(
    ("recompute", "mixing", "count"), [(False, False, 22), (True, False, 44), (True, True, 68), (False, True, 34)]
)
def test_strategies_for_eight_devices_over_all_pipeline_degrees(recompute, mixing, count):
    assert (
        sum(len(strategies(n, recompute=recompute, mixing_data_and_sharded=mixing)) for n in STAGES_OF_EIGHT) == count
    )


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8, 12, 64])
def test_degrees_multiply_to_the_stage(devices):
    found = strategies(devices)
    assert len(set(found)) == len(found)
    for strategy in found:
        assert strategy.tensor * strategy.data == devices
        assert all(degree > 1 for _, degree in strategy.levels)


def test_no_paradigm_occurs_on_two_levels():
    for levels in decision_trees(64, mixing_data_and_sharded=True):
        paradigms = [paradigm for paradigm, _ in levels]
        assert len(set(paradigms)) == len(paradigms)


def test_nesting_orders_are_distinct_strategies():
    inner = Strategy(((Paradigm.DATA, 4), (Paradigm.TENSOR, 2)))
    outer = Strategy(((Paradigm.TENSOR, 2), (Paradigm.DATA, 4)))
    assert inner.layer_run(0, 1, 8).order is RankOrder.TENSOR_INNER
    assert outer.layer_run(0, 1, 8).order is RankOrder.DATA_INNER
    assert {inner.levels, outer.levels} <= set(decision_trees(8))


def test_sdp_is_zero3_and_ckpt_is_recompute():
    run = Strategy(((Paradigm.SHARDED, 2),), recompute=True).layer_run(3, 2, 4)
    assert (run.sharding, run.recompute, run.first, run.count) == (Sharding.ZERO3, True, 3, 2)
    assert Strategy(((Paradigm.DATA, 2),)).sharding is Sharding.NONE


def test_rows_are_split_as_evenly_as_possible():
    run = Strategy(((Paradigm.DATA, 3),)).layer_run(0, 1, 8)
    assert run.rows == (3, 3, 2)
    with pytest.raises(ValueError, match="at least one row"):
        Strategy(((Paradigm.DATA, 4),)).layer_run(0, 1, 3)
