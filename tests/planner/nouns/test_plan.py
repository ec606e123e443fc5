"""A plan that cannot run is refused on construction, with a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainwright.cluster import Device
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy

A, B, C, D = (Device("n", slot) for slot in range(4))


def stage(first: int, count: int, *devices: Device, rows: tuple[int, ...] = (2,), tensor: int = 1) -> Stage:
    return Stage(devices, (LayerRun(first, count, Strategy(tensor, len(rows)), rows),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerRun(0, 0, Strategy(1, 1), (1,)), "needs first >= 0 and count >= 1, got first 0, count 0"),
        (lambda: LayerRun(0, 3, Strategy(0, 1), (1,)), r"degrees must be at least 1, got tensor 0"),
        (lambda: LayerRun(0, 3, Strategy(1, 2), (1,)), "one part for each of the 2 data replicas, got 1 parts"),
        (
            lambda: LayerRun(0, 3, Strategy(1, 2), (1, 0)),
            r"every data replica needs at least one row, got rows \[1, 0\]",
        ),
        (lambda: stage(0, 2, A, B), "tensor 1 × data 1 = 1, but the stage has 2 devices"),
        (lambda: Stage((), ()), "at least one device and at least one layer run"),
        (
            lambda: Stage((A,), (LayerRun(0, 2, Strategy(1, 1), (1,)), LayerRun(3, 1, Strategy(1, 1), (1,)))),
            "layer 2 must follow, got 3",
        ),
        (
            lambda: Pipeline(1, 2, (stage(0, 2, A), stage(3, 1, B))),
            "stage 1 starts at layer 3, expected 2: layer 2 is missing",
        ),
        (lambda: Pipeline(1, 2, (stage(0, 2, A), stage(1, 2, B))), "expected 2: layer 1 is there twice"),
        (lambda: Pipeline(1, 3, (stage(0, 2, A),)), r"rows \[2\] sum to 2, but micro_batch_size is 3"),
        (lambda: Pipeline(0, 2, (stage(0, 2, A),)), "got 1, 0 and 2"),
        (lambda: Plan(3, 2, (Pipeline(1, 2, (stage(0, 2, A),)),)), "ends before layer 2, but the model has 3 layers"),
        (lambda: Plan(2, 4, (Pipeline(1, 2, (stage(0, 2, A),)),)), "take 2 rows an iteration"),
        (lambda: Plan(2, 2, ()), "at least one pipeline"),
        (lambda: Plan(2, 2, (Pipeline(1, 2, (stage(0, 1, A), stage(1, 1, A))),)), "device n:0 is used twice"),
    ],
)
def test_plan_that_cannot_run_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_tensor_groups_are_consecutive_and_data_groups_hold_equal_shards() -> None:
    run = LayerRun(0, 1, Strategy(2, 2), (1, 1))
    assert run.strategy.tensor_groups((A, B, C, D)) == ((A, B), (C, D))
    assert run.strategy.data_groups((A, B, C, D)) == ((A, C), (B, D))


def test_plan_summary_is_one_line() -> None:
    plan = Plan(3, 4, (Pipeline(2, 2, (stage(0, 2, A), stage(2, 1, B))),))
    assert plan.summary() == "pp2 dp1 tp1 mb2×2 [2 1]"
