"""The order in which one stage computes its micro-batches' forwards and backwards."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost.schedule import FORWARD
from trainwright.cost.schedule import operations as planned
from trainwright.plan import Schedule


@dataclass(frozen=True, slots=True)
class Operation:
    """The forward or the backward of one micro-batch on one stage."""

    is_forward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{'forward' if self.is_forward else 'backward'} {self.micro_batch}"


def operations(schedule: Schedule, *, stage: int, stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """In the order that the planner reckons with."""
    order = planned(schedule, micro_batches, stage, stages)
    return tuple(Operation(direction == FORWARD, micro_batch) for direction, micro_batch in order)


def received_before(neighbour: tuple[Operation, ...], *, is_forward: bool, micro_batch: int) -> tuple[int, ...]:
    """Micro-batches of the other direction that the neighbour had surely received before it sent this one.

    When forward `micro_batch` comes from the stage before, that stage is done with its earlier backwards, so the
    gradients sent for them have arrived (and the same the other way round): waiting for those sends costs nothing.
    """
    position = neighbour.index(Operation(is_forward=is_forward, micro_batch=micro_batch))
    return tuple(earlier.micro_batch for earlier in neighbour[:position] if earlier.is_forward is not is_forward)
