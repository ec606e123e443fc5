"""Memory of a GPU as its allocator and driver state it, with their counters replaced."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from trainwright.worker_api import TrialReport, TrialSeriesTask
from trainwright_worker import trial
from trainwright_worker.executor.optimizer import SquaredNorm
from trainwright_worker.live_bytes import (
    AllocationTracker,
    bytes_beside_tensors,
    measure_process_peak_bytes,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Counters:
    """Counters of a GPU of 100 bytes, of which the allocator reserves up to 40 and others take 25."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.reserved, self.most_reserved = 50, 50
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: self.calls.append(name))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 - self.reserved - 25, 100))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: self.most_reserved)

    def work(self) -> None:
        self.calls.append("work")
        self.reserved, self.most_reserved = 30, 40


def test_peak_counts_reserved_bytes_and_those_beside_tensors_on_a_gpu(monkeypatch) -> None:
    counters = Counters(monkeypatch)
    assert measure_process_peak_bytes(counters.work, [], GPU) == 40 + 25
    assert counters.calls == ["empty_cache", "reset_peak_memory_stats", "work", "synchronize"]
    assert bytes_beside_tensors(GPU) == 25


def test_peak_counts_live_bytes_on_a_cpu() -> None:
    assert measure_process_peak_bytes(lambda: torch.zeros(10), [], CPU) == 40
    assert bytes_beside_tensors(CPU) is None


def test_cached_memory_is_released_between_plans_of_a_series(monkeypatch) -> None:
    counters = Counters(monkeypatch)
    monkeypatch.setattr(trial, "ProcessGroups", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(trial, "measure_trial", lambda *_: counters.work() or TrialReport((1.0,), (1.0,)))
    task = TrialSeriesTask(None, None, (1, 2), iterations=1)  # type: ignore[arg-type]
    assignment = SimpleNamespace(is_main_process=False)
    trial.run_series(task, assignment, GPU, None, timedelta())  # type: ignore[arg-type]
    assert counters.calls == ["work", "empty_cache"] * 2
    trial.run_series(task, assignment, CPU, None, timedelta())  # type: ignore[arg-type]
    assert counters.calls[4:] == ["work"] * 2


class ShardedGradient:
    """Stand-in for a flat parameter: a gradient, half of which the tensor degree splits."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self.gradient_shard, self.split_size, self.shard_start = gradient, len(gradient) // 2, 0


def test_norm_makes_no_copy_of_the_gradient() -> None:
    gradient = torch.randn(9_000_000, generator=torch.Generator().manual_seed(1))
    norm = SquaredNorm(ShardedGradient(gradient), includes_split=True, includes_unsplit=False)  # type: ignore[arg-type]
    with AllocationTracker([gradient]) as tracker:
        found = norm.square_sum()
    assert tracker.peak_bytes - gradient.nbytes < 10_000
    assert found.item() == pytest.approx(gradient[:4_500_000].double().square().sum().item(), rel=1e-12)
    assert torch.equal(found, norm.square_sum())
