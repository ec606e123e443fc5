"""Page of an answer on a real API server: stored by the operator, read by a user's kubectl, and never what a plan fails by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kept_measurements import keep_measurements
from operator_process import condition, deny, operator, until
from real_api_server import BINARIES
from typer.testing import CliRunner

from trainwright.cli import app
from trainwright_operator.flow.answer_page import MAX_PAGE_BYTES
from trainwright_operator.flow.names import EMULATION_ANNOTATION

NAME = "drawn"


@pytest.fixture
def planned_at_once(equipped_api_server: Any, namespace: str, training_plan: Callable[..., dict[str, Any]]) -> Any:
    """Create a plan that has its answer by what is kept, and return the API server."""
    api = equipped_api_server
    manifest = training_plan(NAME, {"trials.topK": 0, "training.dtype": "float32", "search.planner": "Megatron"})
    nodes = [item for item in api.get("nodes")["items"] if EMULATION_ANNOTATION in item["metadata"]["annotations"]]
    keep_measurements(api, namespace, manifest["spec"], nodes)
    api.create(manifest)
    return api


def report_of(api: Any, namespace: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get("trainingplan", NAME, "--namespace", namespace).get("status", {}).get("report", {})
    return found


def test_the_operator_stores_the_page_and_kubectl_reads_it(
    planned_at_once, namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = planned_at_once
    with operator(api, namespace, tmp_path):
        reference = until("a page", 180, lambda: report_of(api, namespace))
    stored = api.get("configmap", reference["configMap"], "--namespace", namespace)
    plan = api.get("trainingplan", NAME, "--namespace", namespace)
    (owner,) = stored["metadata"]["ownerReferences"]
    assert owner["uid"] == plan["metadata"]["uid"]  # it is deleted with the plan
    assert len(stored["binaryData"]["report.html.gz"]) < MAX_PAGE_BYTES
    assert not stored.get("data")

    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    monkeypatch.setenv("PATH", str(BINARIES.path("kubectl").parent), prepend=":")
    target = tmp_path / "page.html"
    words = ["report", NAME, f"--namespace={namespace}", f"--output={target}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    page = target.read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert condition(api, namespace, NAME, "Succeeded")["message"].split(";")[0] in page
    missing = CliRunner().invoke(app, ["report", "other", f"--namespace={namespace}"])
    assert missing.exit_code == 2
    assert "there is no plan other in the namespace" in " ".join(missing.output.split())


def test_a_page_that_the_api_server_refuses_is_no_failure_of_the_plan(planned_at_once, namespace, tmp_path) -> None:
    api = planned_at_once
    deny(
        api,
        namespace,
        operation="CREATE",
        group="",
        resource="configmaps",
        expression="!has(object.metadata.labels) || object.metadata.labels['trainwright.dev/role'] != 'page'",
        message="no pages here",
    )
    with operator(api, namespace, tmp_path):
        report = until("the refusal", 180, lambda: report_of(api, namespace))
    assert "it could not be stored" in report["problem"]
    assert "no pages here" in report["problem"]
    assert "configMap" not in report
    assert condition(api, namespace, NAME, "Succeeded")["status"] == "True"
