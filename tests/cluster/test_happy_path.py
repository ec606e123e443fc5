"""A plan over the whole mixed cluster: discovered, measured, profiled, planned, tried and answered."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright import documents
from trainwright.plan import Plan
from trainwright_demo.install import OPERATOR_NAMESPACE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    plan: dict[str, Any] = yaml.safe_load((ROOT / "deploy/examples/gpt2-small-emulated.yaml").read_text())
    return plan


def test_the_example_ends_with_a_winner_that_beats_the_baseline_and_was_predicted(workbench, example, tmp_path) -> None:
    name = workbench.apply(example)
    resource = workbench.wait_finished(name)
    status = resource["status"]
    states = {found["type"]: found["status"] for found in status["conditions"]}
    for kind in ("Accepted", "NodesDiscovered", "LinksMeasured", "Profiled", "Planned", "TrialsCompleted", "Succeeded"):
        assert states[kind] == "True", status["conditions"]

    winner = status["winner"]
    assert winner["speedupOverBaseline"] > 1.2
    assert winner["emulated"] is True
    measured = [trial for trial in status["trials"] if trial.get("measuredSeconds")]
    assert {trial["role"] for trial in measured} == {"Candidate", "Baseline"}
    assert winner["measuredSeconds"] == min(trial["measuredSeconds"] for trial in measured)
    assert statistics.fmean(abs(trial["predictionError"]) for trial in measured) < 0.10, measured

    plan = documents.parse(winner["plan"], Plan, source="winner.plan")
    assert len(plan.devices) == status["cluster"]["devices"] == 8

    columns = workbench.run("get", "trainingplan", name)
    assert f"{winner['measuredSeconds']:.2f}"[:4] in columns, columns
    events = json.loads(workbench.run("get", "events", "--output", "json"))["items"]
    reasons = {event["reason"] for event in events if event["involvedObject"]["kind"] == "TrainingPlan"}
    assert len(reasons) >= 6, reasons
    assert_prometheus_has_scraped(workbench, name, tmp_path)


def assert_prometheus_has_scraped(workbench, name: str, folder: Path) -> None:
    """A real Prometheus scrapes the operator's service and answers with the plan's figures."""
    address = workbench.kubectl.run(
        "--namespace",
        OPERATOR_NAMESPACE,
        "get",
        "endpoints",
        "trainwright-metrics",
        "--output",
        "jsonpath={.subsets[0].addresses[0].ip}",
    )
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "1s"},
                "scrape_configs": [{"job_name": "trainwright", "static_configs": [{"targets": [f"{address}:9090"]}]}],
            }
        )
    )
    with subprocess.Popen(
        [
            "prometheus",
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            "--web.listen-address=127.0.0.1:39090",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as prometheus:
        try:
            for metric in (
                "trainwright_plan_predicted_seconds",
                "trainwright_plan_measured_seconds",
                "trainwright_prediction_error_ratio_count",
                "trainwright_winner_predicted_rank",
                "trainwright_speedup_over_baseline_ratio",
                "trainwright_phase_duration_seconds_count",
                "trainwright_trials_total",
            ):
                assert query(metric, seconds=30), f"Prometheus has no sample of {metric}"
            (sample,) = query(
                f'trainwright_plan_measured_seconds{{namespace="{workbench.namespace}",name="{name}"}}', seconds=5
            )
            assert float(sample["value"][1]) == pytest.approx(
                workbench.get(name)["status"]["winner"]["measuredSeconds"]
            )
        finally:
            prometheus.terminate()


def query(expression: str, *, seconds: float) -> list[dict[str, Any]]:
    """The samples of an instant query, as soon as there are any."""
    deadline = time.monotonic() + seconds
    url = f"http://127.0.0.1:39090/api/v1/query?query={urllib.parse.quote(expression)}"
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                if result:
                    return result
        except OSError:
            pass  # it is still starting
        time.sleep(0.5)
    return []
