"""Order of forwards and backwards on a stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.plan import Schedule
from trainwright_worker.executor.stage_order import Operation, StageOrder, operations

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
    for stage in range(1, stages):
        order = StageOrder.of(schedule, stage=stage, stages=stages, micro_batches=micro_batches)
        for position, operation in enumerate(order.own):
            if operation.is_forward:
                sent = [o.micro_batch for o in order.own[:position] if not o.is_forward]
                assert set(order.delivered_before(operation)) <= set(sent)


def stuck_stages(orders: list[StageOrder], draining: tuple[int, Operation], *, posts_all_ahead: bool = False) -> int:
    """Return how many stages never end if an operation of a stage waits until all posted receives have their messages."""
    done: list[list[Operation]] = [[] for _ in orders]

    def has_message(stage: int, operation: Operation) -> bool:
        sender = stage - 1 if operation.is_forward else stage + 1
        return not 0 <= sender < len(orders) or operation in done[sender]

    def can_run(stage: int) -> bool:
        own, number = orders[stage].own, len(done[stage])
        if number == len(own) or not has_message(stage, own[number]):
            return False
        is_posted = number + 1 < len(own) and (posts_all_ahead or orders[stage].may_post_ahead(number))
        return (stage, own[number]) != draining or not is_posted or has_message(stage, own[number + 1])

    while ready := [stage for stage in range(len(orders)) if can_run(stage)]:
        for stage in ready:
            done[stage].append(orders[stage].own[len(done[stage])])
    return sum(len(one) < len(order.own) for one, order in zip(done, orders, strict=True))


def orders_of(schedule: Schedule, stages: int, micro_batches: int) -> list[StageOrder]:
    return [StageOrder.of(schedule, stage=one, stages=stages, micro_batches=micro_batches) for one in range(stages)]


@given(CASES)
def test_no_operation_that_needs_an_idle_gpu_waits_for_a_message_that_depends_on_it(
    case: tuple[Schedule, int, int],
) -> None:
    orders = orders_of(*case)
    for stage, order in enumerate(orders):
        for operation in order.own:
            assert stuck_stages(orders, (stage, operation)) == 0


def test_a_receive_of_what_depends_on_the_running_operation_would_block_it() -> None:
    orders = orders_of(ONE_F_ONE_B, 2, 1)
    assert stuck_stages(orders, (0, Operation(True, 0)), posts_all_ahead=True) == 2


def test_most_receives_are_posted_ahead() -> None:
    (order, *_) = orders_of(ONE_F_ONE_B, 3, 4)
    late = [number for number in range(len(order.own) - 1) if not order.may_post_ahead(number)]
    assert late == []
    (order, *_) = orders_of(GPIPE, 3, 4)
    late = [number for number in range(len(order.own) - 1) if not order.may_post_ahead(number)]
    assert [order.own[number] for number in late] == [Operation(True, 3)]
