"""The order of work in a pipeline."""

from __future__ import annotations

from trainwright.plan import Schedule

FORWARD, BACKWARD = 0, 1
Operation = tuple[int, int]
"""(FORWARD or BACKWARD, micro-batch)."""


def operations(schedule: Schedule, micro_batches: int, stage: int, stages: int) -> tuple[Operation, ...]:
    """What a stage does in one iteration, in order; all its replicas do the same.

    1F1B (PipeDream-Flush): some forwards ahead, then one forward and one backward in turn. GPipe: all forwards first.
    """
    forwards = [(FORWARD, i) for i in range(micro_batches)]
    backwards = [(BACKWARD, i) for i in range(micro_batches)]
    if schedule is Schedule.GPIPE:
        return (*forwards, *backwards)
    warm_up = min(micro_batches, stages - 1 - stage)
    steady = [pair for i in range(micro_batches - warm_up) for pair in (forwards[warm_up + i], backwards[i])]
    return (*forwards[:warm_up], *steady, *backwards[micro_batches - warm_up :])
