"""PyTorchJobs that `trainwright export` writes are valid by the training operator's definition."""

from __future__ import annotations

from trainwright.cluster import Device
from trainwright.exports import TARGETS, ExportRequest
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.strategy import Strategy

DEVICES = (Device("n1", 1), Device("n1", 0), Device("n2", 0), Device("n1", 3))


def test_definition_admits_an_export_without_unknown_fields(equipped_api_server, namespace) -> None:
    plan = Plan(3, 4, (Pipeline(1, 4, (Stage(DEVICES, (LayerRun(0, 3, Strategy(1, 4), (1, 1, 1, 1)),)),)),))
    (file,) = TARGETS["pytorchjob"].files(ExportRequest(plan, remarks=("What it costs.",)))
    arguments = ("create", "--validate=strict", "--namespace", namespace, "-f", "-")
    equipped_api_server.kubectl(*arguments, piped=file.text)
    jobs = equipped_api_server.get("pytorchjobs", "--namespace", namespace)["items"]
    specs = [job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"] for job in jobs]
    nodes = [(one["metadata"]["name"], spec["nodeSelector"]) for one, spec in zip(jobs, specs, strict=True)]
    assert nodes == [
        (f"trainwright-{number}", {"kubernetes.io/hostname": node}) for number, node in enumerate(("n1", "n2", "n1"))
    ]
    stored = equipped_api_server.get("configmap", "trainwright-plan", "--namespace", namespace)
    assert list(stored["data"]) == ["plan.json"]
