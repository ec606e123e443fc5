"""Prometheus on loopback for tests, and the queries of dashboards, alerts and the page."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FILES = Path(__file__).resolve().parents[2] / "charts" / "trainwright" / "files"
PAGE = FILES.parents[2] / "docs" / "metrics-and-alerts.md"
DASHBOARDS = {name: json.loads((FILES / name).read_text()) for name in ("dashboard.json", "quality-dashboard.json")}
PANELS = [panel for dashboard in DASHBOARDS.values() for panel in dashboard["panels"] if panel["type"] != "row"]
Query = tuple[str, str]
"""Title of a panel and letter of its query."""


def panel_queries(span: str, **variables: str) -> dict[Query, str]:
    """Return the expressions of both dashboards. `span`: of the time shown; variables that are not given are everything."""
    values = {"release": ".*", "namespace": ".*", "accelerator": ".*", "planner": ".*", **variables}
    values |= {"__rate_interval": "5m", "__range": span}
    return {
        (panel["title"], target["refId"]): re.sub(r"\$(\w+)", lambda found: values[found[1]], target["expr"])
        for panel in PANELS
        for target in panel["targets"]
    }


def page_queries() -> list[str]:
    """Return the queries that answer the questions of the page."""
    return re.findall(r"```text\n(.*?)```", PAGE.read_text(), re.DOTALL)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus, queried over its API."""

    port: int

    def samples(self, expression: str, *, seconds: float) -> list[dict[str, Any]]:
        """Return the samples of an instant query as soon as there are any; none after `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(OSError):  # refused while it is starting
                found = self.query(expression)
                if found:
                    return found
            time.sleep(0.5)
        return []

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Return the samples of an instant query, now or at a Unix time."""
        found: list[dict[str, Any]] = self._get("query", query=expression, **({} if at is None else {"time": at}))
        return found

    def values(self, expression: str, *labels: str, at: float | None = None) -> dict[str, float]:
        """Return the values of an instant query by these labels, with commas between."""
        return {
            ",".join(one["metric"].get(label, "") for label in labels): float(one["value"][1])
            for one in self.query(expression, at)
        }

    def series(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of a range query."""
        found: list[dict[str, Any]] = self._get("query_range", query=expression, start=start, end=end, step=step)
        return found

    def _get(self, what: str, **parameters: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]["result"]


@contextmanager
def prometheus(folder: Path, jobs: Mapping[str, tuple[int, list[str]]], rules: Any = None) -> Iterator[Prometheus]:
    """Run a Prometheus until the block ends. `jobs`: seconds between scrapes, and targets; of `rules`, a rule file."""
    configuration: dict[str, Any] = {
        "global": {"evaluation_interval": "5s"},
        "scrape_configs": [
            {
                "job_name": name,
                "scrape_interval": f"{seconds}s",
                "scrape_timeout": f"{seconds}s",
                "static_configs": [{"targets": targets}],
            }
            for name, (seconds, targets) in jobs.items()
        ],
    }
    if rules is not None:
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
        configuration["rule_files"] = ["rules.yaml"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    command = [
        *("setpriv", "--pdeathsig", "KILL", "prometheus", f"--config.file={folder / 'prometheus.yml'}"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}"),
        "--storage.tsdb.retention.time=1y",
    ]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        yield Prometheus(port)
        process.terminate()
