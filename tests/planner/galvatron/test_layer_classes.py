"""Decision trees: how many strategies there are, and what they mean for devices and rows."""

from __future__ import annotations

import pytest

from trainwright.search.galvatron.layer_classes import Paradigm, decision_trees, strategies, strategy_of_tree
from trainwright.strategy import RankOrder, Sharding

STAGES_OF_EIGHT = (8, 4, 2, 1)


@pytest.mark.parametrize(
    ("recompute", "mixing", "count"), [(False, False, 22), (True, False, 44), (True, True, 68), (False, True, 34)]
)
def test_strategies_for_eight_devices_over_all_pipeline_degrees(recompute, mixing, count):
    assert (
        sum(len(strategies(n, recompute=recompute, mixing_data_and_sharded=mixing)) for n in STAGES_OF_EIGHT) == count
    )


@pytest.mark.parametrize("devices", [1, 2, 4, 6, 8, 12, 64])
def test_strategies_are_distinct_and_as_wide_as_the_stage(devices):
    found = strategies(devices)
    assert len(set(found)) == len(found)
    assert {strategy.width for strategy in found} == {devices}


def test_no_paradigm_occurs_on_two_levels_and_no_degree_is_one():
    for levels in decision_trees(64, mixing_data_and_sharded=True):
        paradigms = [paradigm for paradigm, _ in levels]
        assert len(set(paradigms)) == len(paradigms)
        assert all(degree > 1 for _, degree in levels)


def test_nesting_orders_are_distinct_strategies():
    inner = ((Paradigm.DATA, 4), (Paradigm.TENSOR, 2))
    outer = ((Paradigm.TENSOR, 2), (Paradigm.DATA, 4))
    assert strategy_of_tree(inner).order is RankOrder.TENSOR_INNER
    assert strategy_of_tree(outer).order is RankOrder.DATA_INNER
    assert {inner, outer} <= set(decision_trees(8))


def test_sdp_is_zero3_and_ckpt_is_recompute():
    strategy = strategy_of_tree(((Paradigm.SHARDED, 2),), recompute=True)
    assert (strategy.sharding, strategy.recompute) == (Sharding.ZERO3, True)
    assert strategy_of_tree(((Paradigm.DATA, 2),)).sharding is Sharding.NONE
