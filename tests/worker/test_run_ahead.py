"""Limit of the operations that a process submits before its device has finished them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright_worker.device import RunAheadLimit
from trainwright_worker.executor.executor import PlanExecutor

MOST = 2


@dataclass
class LazyStream:
    """Stream that finishes its operations only when something waits for them."""

    submitted: int = 0
    finished: int = 0
    most_unfinished: int = 0
    waits: list[int] = field(default_factory=list)

    def mark(self) -> Mark:
        self.submitted += 1
        self.most_unfinished = max(self.most_unfinished, self.submitted - self.finished)
        return Mark(self, self.submitted)


@dataclass
class Mark:
    stream: LazyStream
    number: int

    def synchronize(self) -> None:
        self.stream.finished = max(self.stream.finished, self.number)
        self.stream.waits.append(self.number)


def test_process_waits_for_the_oldest_operation_that_exceeds_the_limit() -> None:
    stream = LazyStream()
    limit = RunAheadLimit(stream.mark, MOST)
    for _ in range(5):
        limit.wait()
        limit.mark()
    assert stream.waits == [1, 2, 3]
    assert stream.most_unfinished == MOST


def test_operations_of_an_iteration_stay_within_the_limit(executor: Callable[..., PlanExecutor]) -> None:
    made = executor(Model.of(Gpt(1, 16, 2, 4, 8)))
    stream = LazyStream()
    made.run_ahead = RunAheadLimit(stream.mark, MOST)
    for iteration in range(2):
        made.run_iteration(made.make_batch(iteration))
    assert stream.submitted == 2 * 2 * made.pipeline.micro_batches
    assert stream.most_unfinished == MOST


def test_process_that_computes_itself_waits_for_nothing() -> None:
    limit = RunAheadLimit.of(torch.device("cpu"))
    limit.mark()
    limit.wait()
    assert not limit._marks
