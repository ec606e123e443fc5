"""Checks that a description left out are made by the gang that profiles the layers, before it times one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trainwright.families import Custom, CustomChecks
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.worker_api import Gang, ProfilingTask
from trainwright_worker.gang.errors import WorkerError, one_line
from trainwright_worker.layers.described_layers import load_described_layers
from trainwright_worker.model_description import description, left_out_checks
from trainwright_worker.model_description.description import describe

pytestmark = pytest.mark.timeout(300)


def task_of(make, family: Custom, dtype: Dtype = Dtype.FLOAT32, **fields) -> ProfilingTask:
    return ProfilingTask(make.gang(1), Model.of(family, dtype), 1, (1,), warmup_iterations=0, iterations=1, **fields)


def on_cpus(gang: Gang) -> Gang:
    return replace(gang, nodes=tuple(replace(node, accelerator="cpu-2") for node in gang.nodes))


def test_values_without_time_or_memory_are_named_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    untimed = describe("habits:contrast", check_seconds=0)
    assert untimed.checks is not None
    assert untimed.checks.unchecked_kinds == ("Linear", "Contrast")
    assert describe("drawn_habits:dropout").checks == CustomChecks()
    monkeypatch.setattr(description, "MAX_BYTES", 1500)
    small = describe("drawn_habits:dropout")
    assert small.checks is not None
    assert small.checks.unchecked_kinds == ("Dropping",)


@pytest.mark.torch_processes
@pytest.mark.parametrize(
    ("habit", "told"),
    [
        ("habits:contrast", "layer 1 (Contrast) gives rows together other losses or gradients than each alone"),
        (
            "cached_habits:moved",
            "layer 1 (Adds) fails on float32 (2, 8): NotImplementedError: Cannot copy out of meta tensor",
        ),
        ("drawn_habits:numpy_weights", "layer 1 (Linear) starts with other weights in another process"),
        (
            "format_habits:gpu_kernel_with_shapes",
            "layer 1 (Kernel) has no kernels for a CPU, on which it is to be measured",
        ),
    ],
)
def test_habit_that_the_description_left_out_is_refused_before_a_layer_is_timed(
    worker, make, habit: str, told: str
) -> None:
    outcome = worker.local(task_of(make, describe(habit, check_seconds=0)))
    assert outcome.reasons == {"OrderInvalid"}, outcome.errors
    assert outcome.failures[0].message.startswith(f"entry point {habit}: {told}")
    assert not outcome.progress


@pytest.mark.parametrize(
    ("habit", "way"),
    [("lazy", "Linear in place of LazyLinear"), ("missing_module", "install flash_"), ("gpu_kernel", "register_fake")],
)
def test_model_that_only_the_pods_refuse_has_the_sentence_of_the_description(habit: str, way: str) -> None:
    """The module was changed, or its libraries are not in the image."""
    entrypoint = f"format_habits:{habit}"
    with pytest.raises(ValueError, match=way) as described:
        describe(entrypoint)
    with pytest.raises(WorkerError) as refusal:
        load_described_layers(replace(describe("habits:contrast", check_seconds=0), entrypoint=entrypoint))
    assert refusal.value.message == str(described.value)
    assert way in one_line(refusal.value.message)  # the way out is in what a pod's message keeps


@pytest.mark.torch_processes
def test_model_that_keeps_to_the_rules_is_checked_and_profiled(worker, make) -> None:
    family = describe("drawn_habits:dropout", check_seconds=0)
    outcome = worker.local(replace(task_of(make, family), gang=on_cpus(make.gang(2))))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert {layer.kind for layer in report.layers} == {kind.name for kind in family.kinds}
    assert report.unchecked == ()


@pytest.mark.torch_processes
def test_processes_of_a_gang_know_how_many_share_their_host(worker, make) -> None:
    """Each of them may build a whole model."""
    family = replace(describe("habits:contrast", check_seconds=0), entrypoint="habits:tells_its_processes")
    outcome = worker.local(replace(task_of(make, family), gang=on_cpus(make.gang(1, 1))))
    assert "tells_its_processes() fails: OSError: 2 processes share this host" in outcome.failures[0].message


@pytest.mark.torch_processes
def test_only_what_was_left_out_and_is_profiled_is_checked(worker, make) -> None:
    """The habit is in another kind, or the description says that it was checked."""
    left_out = describe("habits:contrast", check_seconds=0)
    assert worker.local(task_of(make, left_out, kinds=("Linear",))).code == 0
    assert worker.local(task_of(make, replace(left_out, checks=CustomChecks()))).code == 0
    assert worker.local(task_of(make, replace(left_out, checks=None))).reasons == {"OrderInvalid"}


@pytest.mark.torch_processes
def test_layer_with_kernels_in_a_half_format_alone_is_checked_in_that(worker, make) -> None:
    family = describe("format_habits:half_kernel", check_seconds=0)
    outcome = worker.local(task_of(make, family, Dtype.BFLOAT16))
    assert outcome.code == 0, outcome.errors
    assert outcome.reports[0].unchecked == ()
    mixing = describe("format_habits:half_kernel_that_mixes_rows", check_seconds=0)
    refused = worker.local(task_of(make, mixing, Dtype.BFLOAT16))
    assert "layer 1 (Kernel) gives rows together other values" in refused.failures[0].message


def test_what_the_gang_has_no_time_or_memory_for_is_named(make, monkeypatch: pytest.MonkeyPatch) -> None:
    task = task_of(make, describe("habits:slow", check_seconds=0))
    monkeypatch.setattr(left_out_checks, "CHECK_SECONDS", 0.25)
    late = left_out_checks.check_left_out(task, torch.device("cpu"), lambda _doing: None, is_main_process=False)
    assert "values of Slow (layer 1): the time for checks is over (0.25 s)" in late
    monkeypatch.setattr(left_out_checks, "host_bytes", lambda: 1000)
    monkeypatch.setattr(left_out_checks, "CHECK_SECONDS", 60.0)
    large = left_out_checks.check_left_out(task, torch.device("cpu"), lambda _doing: None, is_main_process=False)
    assert any("values of Linear (layer 0): they take about" in sentence for sentence in large), large


def test_kinds_to_check_are_kinds_of_the_model() -> None:
    family = describe("habits:contrast", check_seconds=0)
    with pytest.raises(ValueError, match="unchecked_kinds names Head, which"):
        replace(family, checks=CustomChecks(unchecked_kinds=("Head",)))
