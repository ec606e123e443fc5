"""Benchmarks of single layers: times, bytes, and what does not fit."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainwright.cluster import Emulation
from trainwright.families import Vit
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.profiles import LayerTooLarge
from trainwright.worker_api import GangNode, ProfilingReport, ProfilingTask
from trainwright_worker.device import Clock
from trainwright_worker.gang.rank_assignment import RankAssignment
from trainwright_worker.measure import layer_bench
from trainwright_worker.measure.layer_bench import (
    MAX_ROUND_ITERATIONS,
    MAX_ROUNDS,
    StoppingRule,
    iterations_lasting,
    median_uncertainty,
    relative_spread,
)
from trainwright_worker.measure.layer_under_test import LayerUnderTest
from trainwright_worker.run_task import task_devices

CPU = torch.device("cpu")


def gang_test(test):
    return pytest.mark.torch_processes(pytest.mark.timed(pytest.mark.timeout(120)(test)))


class Silence:
    """Stand-in for a watchdog."""

    def beat(self, doing: str) -> None:
        pass


@pytest.fixture(autouse=True)
def one_thread():
    """Limit torch to one thread, as in a worker: a thread that waits for its pool spins, which counts as its time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def profile(order: ProfilingTask) -> ProfilingReport:
    """Profile in this process."""
    environment = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "TRAINWRIGHT_NODE_NAME": "node-a"}
    return layer_bench.profile_layers(
        order, RankAssignment.from_environment(order.gang, task_devices(order), environment), CPU, Silence()
    )


@gang_test
def test_layers_are_profiled_at_the_emulated_pace(worker, make) -> None:
    emulation = Emulation(2e8, 0.004, 2e6)
    node = GangNode("node-a", (0,), "emulated-x")
    gang = replace(make.gang(1), nodes=(node,), emulations=(("emulated-x", emulation),))
    outcome = worker.local(ProfilingTask(gang, make.model, 1, (1, 4), iterations=7))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert isinstance(report, ProfilingReport)
    assert [(p.kind, p.rows) for p in report.layers] == [
        (kind, rows) for kind in ("embedding", "block", "head") for rows in (1, 4)
    ]
    for profile in report.layers:
        kind = next(k for k in make.model.kinds if k.name == profile.kind)
        share = 1 / len(kind.segments)
        expected = sum(
            emulation.compute_seconds(s.forward_flops_per_row * profile.rows, floor_share=share) for s in kind.segments
        )
        # Pacing guarantees a lower bound; a busy machine may take longer.
        assert 0.97 * expected < profile.forward_seconds < 2.5 * expected
        assert 0.97 * 2 * expected < profile.backward_seconds < 2.5 * 2 * expected
        assert profile.parameter_bytes == 4 * kind.parameters
        assert profile.update_seconds > emulation.update_seconds(kind.parameters) - 1e-4
        assert profile.activation_bytes > 0
        assert profile.samples % 7 == 0
        assert 7 <= profile.samples <= 7 * MAX_ROUNDS
        assert profile.peak_bytes >= profile.activation_bytes + profile.parameter_bytes
    assert report.out_of_memory == ()


@gang_test
def test_tensor_shards_are_profiled_without_their_group(worker, make) -> None:
    outcome = worker.local(ProfilingTask(make.gang(1), make.model, 2, (2,), iterations=2))
    assert outcome.code == 0, outcome.errors
    assert [profile.kind for profile in outcome.reports[0].layers] == ["embedding", "block", "head"]
    for profile in outcome.reports[0].layers:
        kind = make.model.kind(profile.kind)
        assert (profile.tensor_degree, profile.accelerator) == (2, "cpu")
        assert profile.parameter_bytes == 4 * (make.model.divided_kind(kind) or kind).parameters_at(2)


@gang_test
def test_rows_that_do_not_fit_are_reported(worker, make) -> None:
    """Measure a ViT, of which degree 2 divides the block alone, with rows of 2 KiB: more than a process can address."""
    vit = Model.of(Vit(1, 32, 4, 32, 8))
    outcome = worker.local(ProfilingTask(make.gang(1), vit, 2, (2**37, 2, 2**36), iterations=2))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert [(found.kind, found.rows) for found in report.layers] == [("block", 2)]
    assert report.out_of_memory == (LayerTooLarge("cpu", "block", 2, 2**36),)


def test_only_the_kinds_of_the_task_are_profiled(make) -> None:
    order = ProfilingTask(make.gang(1), make.model, 1, (1, 2), iterations=1, seconds_per_layer=0.0, kinds=("block",))
    assert [(found.kind, found.rows) for found in profile(order).layers] == [("block", 1), ("block", 2)]


def test_kinds_that_never_fit_are_reported(make, monkeypatch) -> None:
    order = ProfilingTask(make.gang(1), make.model, 1, (1, 2), iterations=1, seconds_per_layer=0.0)
    made = LayerUnderTest.of
    lacking = {"block"}

    def of(order, kind, rows, device, beat):
        if kind.name in lacking and rows > 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return made(order, kind, rows, device, beat)

    monkeypatch.setattr(LayerUnderTest, "of", of)
    report = profile(order)
    assert [(found.kind, found.rows) for found in report.layers] == [
        (kind, rows) for kind in ("embedding", "head") for rows in (1, 2)
    ]
    assert report.out_of_memory == (LayerTooLarge("cpu", "block", 1, 1),)
    lacking |= {"embedding", "head"}
    report = profile(order)
    assert report.layers == ()
    assert [(found.kind, found.rows) for found in report.out_of_memory] == [
        (kind, 1) for kind in ("embedding", "block", "head")
    ]


def test_other_errors_are_raised(make, monkeypatch) -> None:
    def of(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(LayerUnderTest, "of", of)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        profile(ProfilingTask(make.gang(1), make.model, 1, (1,)))


@pytest.mark.parametrize("dtype", [Dtype.FLOAT16, Dtype.BFLOAT16])
def test_half_precision_takes_half_the_bytes(make, dtype: Dtype) -> None:
    def measured(dtype: Dtype) -> dict:
        model = Model.of(make.gpt, dtype)
        order = ProfilingTask(make.gang(1), model, 1, (4,), iterations=2, seconds_per_layer=0.0)
        return {found.kind: found for found in profile(order).layers}

    whole, half = measured(Dtype.FLOAT32), measured(dtype)
    for kind in ("embedding", "block", "head"):
        assert half[kind].parameter_bytes == whole[kind].parameter_bytes / 2
        assert half[kind].forward_seconds > 0
        assert half[kind].update_seconds > 0
    assert half["block"].activation_bytes < 0.7 * whole["block"].activation_bytes
    # Gradients and optimizer state stay in float32, so a peak is more than half.
    assert half["block"].peak_bytes < whole["block"].peak_bytes


def test_more_rows_take_longer_and_hold_more(make) -> None:
    """256 times the work shows even on a busy machine, since other processes' time is excluded."""
    order = ProfilingTask(make.gang(1), make.model, 2, (1, 256), iterations=5, seconds_per_layer=0.2)
    few, many = (found for found in profile(order).layers if found.kind == "block")
    assert many.forward_seconds > 3 * few.forward_seconds
    assert many.backward_seconds > 3 * few.backward_seconds
    assert many.activation_bytes > 100 * few.activation_bytes
    assert many.peak_bytes > many.activation_bytes
    assert few.parameter_bytes == many.parameter_bytes


def test_cpu_layers_are_timed_by_thread_time(make, monkeypatch) -> None:
    """A forward that is blocked does not take longer."""
    forward = LayerUnderTest.forward

    def slow(bench: LayerUnderTest):
        time.sleep(0.02)
        return forward(bench)

    order = ProfilingTask(make.gang(1), make.model, 2, (1,), iterations=3, seconds_per_layer=0.0)
    monkeypatch.setattr(LayerUnderTest, "forward", slow)
    found = profile(order).layers[1]
    assert 0 < found.forward_seconds < 0.015


def test_warm_up_is_dropped_and_rounds_follow_while_there_is_time(make, monkeypatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(LayerUnderTest, "update_weights", lambda bench: calls.append(bench.rows))
    vit = Model.of(Vit(1, 32, 4, 32, 8))  # degree 2 divides its block alone
    order = ProfilingTask(make.gang(1), vit, 2, (1,), warmup_iterations=4, iterations=3)
    (hasty,) = profile(replace(order, seconds_per_layer=0.0)).layers
    assert hasty.samples == 3
    assert len(calls) == 4 + 3 + 1  # the last one for the peak
    (strict,) = profile(replace(order, target_uncertainty=0.0, seconds_per_layer=60.0)).layers
    assert strict.samples == 3 * MAX_ROUNDS
    (easy,) = profile(replace(order, target_uncertainty=100.0, seconds_per_layer=60.0)).layers
    assert easy.samples == 6  # fewer have no interval


def test_rounds_end_when_the_median_is_known_or_time_is_over() -> None:
    enough = StoppingRule(target_uncertainty=0.1, max_seconds=5.0)
    wide, narrow = [1.0, 2.0] * 5, [1.0, 1.01] * 5
    assert not enough.should_stop(wide, rounds=1, elapsed_seconds=1.0)
    assert enough.should_stop(narrow, rounds=1, elapsed_seconds=1.0)
    assert enough.should_stop(wide, rounds=1, elapsed_seconds=5.0)
    assert enough.should_stop(wide, rounds=MAX_ROUNDS, elapsed_seconds=1.0)


@given(st.lists(st.floats(0.1, 10.0), min_size=6, max_size=200))
def test_median_interval_is_within_the_samples(samples: list[float]) -> None:
    found = median_uncertainty(samples)
    assert 0 <= found <= (max(samples) - min(samples)) / statistics.median(samples)
    assert median_uncertainty([3 * sample for sample in samples]) == pytest.approx(found)
    assert median_uncertainty(samples[::-1]) == found


def test_the_medians_interval_covers_it_in_about_95_of_100_cases() -> None:
    generator = torch.Generator().manual_seed(7)
    cases = torch.rand(2000, 20, generator=generator).sort().values  # the true median is 0.5
    low = math.floor(20 / 2 - 0.98 * math.sqrt(20))
    covered = ((cases[:, low] <= 0.5) & (cases[:, 19 - low] >= 0.5)).float().mean().item()
    assert 0.93 < covered < 0.99
    first = cases[0].tolist()
    assert median_uncertainty(first) == pytest.approx((first[19 - low] - first[low]) / 2 / statistics.median(first))


def test_median_uncertainty_is_infinite_with_too_few_samples() -> None:
    assert median_uncertainty([1.0] * 5) == math.inf
    assert median_uncertainty([1.0] * 6) == 0


def test_spread_is_relative_to_the_median() -> None:
    assert relative_spread([1.0]) == 0
    assert relative_spread([1.0] * 5) == 0
    assert relative_spread([float(i) for i in range(11)]) == pytest.approx(8 / 5)


def test_a_threads_clock_does_not_count_sleep() -> None:
    for read, least, most in ((time.thread_time, 0.0, 0.02), (time.perf_counter, 0.03, 60.0)):
        clock = Clock(CPU, read)
        begin = clock.mark()
        time.sleep(0.03)
        assert least <= clock.elapsed_seconds(begin, clock.mark()) <= most


@pytest.mark.parametrize(("iteration_seconds", "expected"), [(1e-3, 250), (0.1, 10), (1e-6, MAX_ROUND_ITERATIONS)])
def test_rounds_last_some_seconds_when_iterations_are_short(iteration_seconds: float, expected: int) -> None:
    assert iterations_lasting(0.25, iteration_seconds, at_least=10) == expected


def test_drawing_the_weights_of_a_layer_is_no_silence(make) -> None:
    beats: list[str] = []
    LayerUnderTest.of(ProfilingTask(make.gang(1), make.model, 1, (1,)), make.model.kinds[1], 1, CPU, beats.append)
    assert any(doing.startswith("drawing ") for doing in beats)


def test_cache_is_flushed_before_every_timing(make, monkeypatch) -> None:
    task = ProfilingTask(make.gang(1), make.model, 1, (1,), iterations=2)
    layer = LayerUnderTest.of(task, make.model.kinds[1], 1, CPU, lambda _doing: None)
    stopwatch, flushes = layer_bench._Stopwatch(layer), []
    monkeypatch.setattr(stopwatch._cache_flush, "run", lambda: flushes.append("flush"))
    assert len(stopwatch.run_round(2)) == 2
    assert len(flushes) == 6


def test_submission_is_timed_alone_after_the_device_is_idle(make, monkeypatch) -> None:
    """Only forward and backward count, each time begun once the device has finished the former."""
    task = ProfilingTask(make.gang(1), make.model, 1, rows=(2,))
    layer = LayerUnderTest.of(task, make.model.kind("block"), 2, torch.device("cpu"), lambda _doing: None)
    passed: list[str] = []
    monkeypatch.setattr(layer_bench, "synchronize", lambda _device: passed.append("idle"))
    readings = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0, 30.0, 39.0, 40.0, 42.5])

    def read() -> float:
        passed.append("read")
        return next(readings)

    assert layer_bench.submission_seconds(layer, read) == 2.5
    assert passed == ["idle", "read", "read"] * 5
