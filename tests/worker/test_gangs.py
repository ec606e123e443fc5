"""Gangs on this machine: their reports, and their ends when something goes wrong."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from trainwright.worker_api import LayerCheck, LinkReport, LinkTask, TrialReport, TrialSeriesTask
from trainwright_worker.gang.rank_assignment import gang_devices

pytestmark = [pytest.mark.torch_processes, pytest.mark.timed, pytest.mark.timeout(120)]


def test_permuted_placement_trains_like_one_device(worker, make) -> None:
    one = worker.local(make.trial(make.gang(1)))
    assert one.code == 0, one.errors
    gang = make.gang(2, 1, 1)
    ordered = make.trial(gang, data=2)
    a, b, c, d = gang_devices(gang)
    scrambled = replace(ordered, plan=make.plan((d, a, c, b), 2, 1))
    outcome = worker.local(scrambled)
    assert outcome.code == 0, outcome.errors
    (alone,), (report,) = one.reports, outcome.reports
    assert isinstance(report, TrialReport)
    assert report.losses == pytest.approx(alone.losses, rel=1e-5)
    assert len(report.losses) == 4
    assert report.mean_absolute_row_loss == pytest.approx(report.losses[0], rel=1e-5)
    assert report.loss_depends_on is None
    assert len(report.iteration_seconds) == 3
    assert min(report.iteration_seconds) > 0
    assert [p.done for p in outcome.progress] == [1, 2, 3, 4]
    assert {(m.node, m.slot) for m in report.memory} == {(x.node, x.slot) for x in (a, b, c, d)}
    assert report.paced_segments == report.late_segments == 0
    assert report.late_ratio is None
    # Weights, gradients and Adam's two states in float32, plus some of the activations, but not all of the model's.
    whole = 4 * 4 * make.model.parameters
    assert all(whole / 8 < m.peak_bytes < 2 * whole for m in report.memory)
    assert alone.memory[0].peak_bytes > whole


def test_one_device_of_each_node_checks_a_layer_before_the_trial(worker, make) -> None:
    gang = make.gang(2, 1)
    gang = replace(gang, nodes=(gang.nodes[0], replace(gang.nodes[1], accelerator="other")))
    order = make.trial(gang, data=3, checks=(LayerCheck("cpu", "block", 2), LayerCheck("other", "head", 1)))
    outcome = worker.local(order)
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert [(one.node, one.dtype, one.kind, one.rows) for one in report.checked] == [
        ("node-a", "float32", "block", 2), ("node-b", "float32", "head", 1)
    ]  # fmt: skip
    assert all(0 < one.seconds < 1 for one in report.checked)
    assert len(report.losses) == 4


def test_torchrun_joins_pods_with_different_numbers_of_devices(worker, make) -> None:
    gang = make.gang(1, 2)
    order = make.trial(gang, track_memory=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    # Variables that the training operator injects into a pod must not matter.
    injected = {"RANK": "7", "WORLD_SIZE": "9", "PET_NNODES": "4", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "3"}
    pods = [
        worker.start(
            order,
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            port,
            environment={**injected, "TRAINWRIGHT_NODE_NAME": name, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for name in ("node-b", "node-a")
    ]
    second, first = (worker.end(pod) for pod in pods)
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert len(first.reports) == 1
    assert not second.reports
    assert first.reports[0].losses[-1] < first.reports[0].losses[0]


def test_links_are_measured_in_both_directions_and_within_nodes(worker, make) -> None:
    gang = make.gang(2, 1)
    outcome = worker.local(LinkTask(gang, repeats=3))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert isinstance(report, LinkReport)
    expected = {("node-a", "node-b"), ("node-b", "node-a"), ("node-a", "node-a")}
    assert {(link.source, link.target) for link in report.links} == expected
    for link in report.links:
        assert 0 < link.latency_seconds < 0.05
        assert 1e6 < link.bandwidth_bytes_per_second < 1e12
    assert outcome.progress[-1].done == outcome.progress[-1].total


def test_trial_without_a_report_succeeds(worker, make) -> None:
    outcome = worker.local(make.trial(make.gang(1), fault="mute"))
    assert outcome.code == 0
    assert not outcome.reports


def test_a_pod_on_another_node_is_refused(worker, make) -> None:
    environment = {"TRAINWRIGHT_NODE_NAME": "node-z", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    outcome = worker.end(worker.start(make.trial(make.gang(1, 1)), environment=environment))
    assert outcome.code != 0
    (failure,) = outcome.failures
    assert failure.reason == "PlacementNotMet"
    assert "node-z" in failure.message
    assert "node-a, node-b" in failure.message


def test_an_invalid_order_is_refused_in_one_sentence(worker, make) -> None:
    gang = make.gang(1, 1)
    outcome = worker.local(replace(make.trial(gang), plan=make.plan(gang_devices(make.gang(2)), 1, 1)))
    assert outcome.code != 0
    (failure,) = outcome.failures
    assert failure.reason == "OrderInvalid"
    assert "node-a:1" in failure.message


def test_invalid_task_text_is_refused(worker, make) -> None:
    outcome = worker.local("{")
    assert outcome.code != 0
    assert [failure.reason for failure in outcome.failures] == ["OrderInvalid"]


def test_series_runs_plans_on_any_devices_of_the_gang(worker, make) -> None:
    gang = make.gang(2, 1)
    a, b, c = gang_devices(gang)
    plans = (make.plan((a, b, c)), make.plan((c, a), data=2), make.plan((b,)))
    outcome = worker.local(TrialSeriesTask(gang, make.model, plans, warmup_iterations=1, iterations=2))
    assert outcome.code == 0, outcome.errors
    (report,) = outcome.reports
    assert [{(m.node, m.slot) for m in trial.memory} for trial in report.trials] == [
        {(device.node, device.slot) for device in plan.devices} for plan in plans
    ]
    first_rounds = [(part.number, part.trial.iteration_seconds, part.trial.memory) for part in outcome.parts]
    assert first_rounds == [
        (number, trial.iteration_seconds[:1], trial.memory) for number, trial in enumerate(report.trials)
    ]
    first, second, third = report.trials
    assert first.losses == pytest.approx(third.losses, rel=1e-5)
    assert second.losses == pytest.approx(third.losses, rel=1e-5)
