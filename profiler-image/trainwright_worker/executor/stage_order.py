"""Order of forwards and backwards on a stage, and what it says of messages with its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

from trainwright.cost.schedule_replay import FORWARD
from trainwright.cost.schedule_replay import operations as planned
from trainwright.plan import Schedule


@dataclass(frozen=True, slots=True)
class Operation:
    """Forward or backward of one micro-batch."""

    is_forward: bool
    micro_batch: int

    def __str__(self) -> str:
        return f"{'forward' if self.is_forward else 'backward'} {self.micro_batch}"


def operations(schedule: Schedule, *, stage: int, stages: int, micro_batches: int) -> tuple[Operation, ...]:
    """Return a stage's operations in order, as the planner replays them."""
    order = planned(schedule, micro_batches, stage, stages)
    return tuple(Operation(direction == FORWARD, micro_batch) for direction, micro_batch in order)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Operations of a stage and of its two neighbours, each in order; empty where there is no such stage."""

    own: tuple[Operation, ...]
    previous: tuple[Operation, ...]
    next: tuple[Operation, ...]

    @classmethod
    def of(cls, schedule: Schedule, *, stage: int, stages: int, micro_batches: int) -> StageOrder:
        previous, own, following = (
            operations(schedule, stage=number, stages=stages, micro_batches=micro_batches)
            if 0 <= number < stages
            else ()
            for number in (stage - 1, stage, stage + 1)
        )
        return cls(own, previous, following)

    def _sender_of(self, operation: Operation) -> tuple[Operation, ...]:
        """Return the operations of the neighbour that sends what an operation needs."""
        return self.previous if operation.is_forward else self.next

    def delivered_before(self, operation: Operation) -> tuple[int, ...]:
        """Return micro-batches of the other direction that the neighbour had received when it sent what an operation needs.

        When forward `n` arrives from the previous stage, that stage has finished its earlier backwards, so the gradients sent
        for them have arrived (and vice versa): waiting for those sends costs nothing.
        """
        sender = self._sender_of(operation)
        position = sender.index(operation)
        return tuple(
            earlier.micro_batch for earlier in sender[:position] if earlier.is_forward is not operation.is_forward
        )

    def may_post_ahead(self, number: int) -> bool:
        """Return whether the receive of the operation after the `number`-th one may be posted before that one runs.

        It may not if the neighbour sends the message only after it got this operation's result. NCCL's receive occupies the
        GPU until the message comes, and whatever waits for an idle GPU in this operation would wait for ever: the first
        launch of a kernel, which is loaded then, and an allocation after memory was freed.
        """
        running, following = self.own[number : number + 2]
        sender = self._sender_of(following)
        if running.is_forward is following.is_forward or not sender:
            return True
        return sender.index(following) < sender.index(running)
