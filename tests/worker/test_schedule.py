"""Order of forwards and backwards on a stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.plan import Schedule
from trainwright_worker.executor.executor import Operation, delivered_before, operations

ONE_F_ONE_B, GPIPE = Schedule.ONE_FORWARD_ONE_BACKWARD, Schedule.GPIPE


def words(schedule: Schedule, stage: int, stages: int, micro_batches: int) -> str:
    order = operations(schedule, stage=stage, stages=stages, micro_batches=micro_batches)
    return " ".join(f"{'F' if o.is_forward else 'B'}{o.micro_batch}" for o in order)


@pytest.mark.parametrize(
    ("schedule", "stage", "expected"),
    [
        (ONE_F_ONE_B, 0, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (ONE_F_ONE_B, 1, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (ONE_F_ONE_B, 2, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (GPIPE, 1, "F0 F1 F2 F3 B0 B1 B2 B3"),
    ],
)
def test_order_of_three_stages_and_four_micro_batches(schedule: Schedule, stage: int, expected: str) -> None:
    assert words(schedule, stage, 3, 4) == expected


def test_all_forwards_come_first_with_fewer_micro_batches_than_stages() -> None:
    assert words(ONE_F_ONE_B, 0, 5, 2) == "F0 F1 B0 B1"


CASES = st.tuples(st.sampled_from(Schedule), st.integers(1, 6), st.integers(1, 9))


@given(CASES)
def test_every_micro_batch_passes_once_and_forward_first(case: tuple[Schedule, int, int]) -> None:
    schedule, stages, micro_batches = case
    for stage in range(stages):
        order = operations(schedule, stage=stage, stages=stages, micro_batches=micro_batches)
        for direction in (True, False):
            assert [o.micro_batch for o in order if o.is_forward is direction] == list(range(micro_batches))
        for index in range(micro_batches):
            assert order.index(Operation(True, index)) < order.index(Operation(False, index))


@given(CASES)
def test_one_forward_one_backward_keeps_few_micro_batches_alive(case: tuple[Schedule, int, int]) -> None:
    _, stages, micro_batches = case
    for stage in range(stages):
        alive = most = 0
        for operation in operations(ONE_F_ONE_B, stage=stage, stages=stages, micro_batches=micro_batches):
            alive += 1 if operation.is_forward else -1
            most = max(most, alive)
        assert most == min(micro_batches, stages - stage)


@given(CASES)
def test_every_receive_follows_its_send(case: tuple[Schedule, int, int]) -> None:
    """A stage only waits for sends that it has made: the send precedes the operation that waits for it."""
    schedule, stages, micro_batches = case
    orders = [operations(schedule, stage=stage, stages=stages, micro_batches=micro_batches) for stage in range(stages)]
    for stage in range(1, stages):
        for position, operation in enumerate(orders[stage]):
            if operation.is_forward:
                earlier = delivered_before(orders[stage - 1], is_forward=True, micro_batch=operation.micro_batch)
                sent = [o.micro_batch for o in orders[stage][:position] if not o.is_forward]
                assert set(earlier) <= set(sent)
