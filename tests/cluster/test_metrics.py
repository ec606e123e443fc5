"""The operator's metrics, read by a real Prometheus."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from trainwright_demo.install import OPERATOR_NAMESPACE


@dataclass(frozen=True)
class Prometheus:
    """A running server, asked over its API."""

    port: int

    def samples(self, expression: str, *, seconds: float) -> list[dict[str, Any]]:
        """The samples of an instant query, as soon as there are any; none after that many seconds."""
        deadline = time.monotonic() + seconds
        url = f"http://127.0.0.1:{self.port}/api/v1/query?query={urllib.parse.quote(expression)}"
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:  # refused while it is starting
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                if found:
                    return found
            time.sleep(0.5)
        return []


@pytest.fixture
def prometheus(kubectl, tmp_path) -> Iterator[Prometheus]:
    """A Prometheus of the test's own that scrapes the operator's service every second."""
    endpoint = ("endpoints", "trainwright-metrics", "--output", "jsonpath={.subsets[0].addresses[0].ip}")
    address = kubectl.run("--namespace", OPERATOR_NAMESPACE, "get", *endpoint)
    scrape = {"job_name": "trainwright", "static_configs": [{"targets": [f"{address}:9090"]}]}
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (tmp_path / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        yield Prometheus(port)
        process.terminate()


def test_a_real_prometheus_scrapes_what_a_finished_plan_measured(workbench, small_plan, prometheus) -> None:
    trials = {"topK": 2, "baseline": "Megatron", "warmupIterations": 1, "iterations": 3}
    name = workbench.apply(small_plan(trials=trials))
    winner = workbench.wait_finished(name)["status"]["winner"]
    for metric in (
        "trainwright_plan_predicted_seconds",
        "trainwright_plan_measured_seconds",
        "trainwright_prediction_error_ratio_count",
        "trainwright_winner_predicted_rank",
        "trainwright_speedup_over_baseline_ratio",
        "trainwright_phase_duration_seconds_count",
        "trainwright_trials_total",
    ):
        assert prometheus.samples(metric, seconds=30), f"Prometheus has no sample of {metric}"
    mine = f'trainwright_plan_measured_seconds{{namespace="{workbench.namespace}",name="{name}"}}'
    (sample,) = prometheus.samples(mine, seconds=5)
    assert float(sample["value"][1]) == pytest.approx(winner["measuredSeconds"], rel=1e-3)
