"""The chart's objects for Prometheus and Grafana: rendered on request, and limited to exported metrics."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright_operator.flow.reasons import NEEDS_ACTION
from trainwright_operator.metrics import METRIC_DEFINITIONS, Kind
from trainwright_operator.metrics.plan_events import _RATIO_BUCKETS as RATIO_BUCKETS

ROOT = Path(__file__).resolve().parents[2]
ALERTS = ROOT / "charts" / "trainwright" / "files" / "alerts.yaml"
DASHBOARD = ROOT / "charts" / "trainwright" / "files" / "dashboard.json"
PROMETHEUS_OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")
RULES = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads(DASHBOARD.read_text())["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def exported() -> Iterator[str]:
    """Yield the names of all series."""
    for name, metric in METRIC_DEFINITIONS.items():
        if metric.kind is Kind.HISTOGRAM:
            yield from (f"{name}_bucket", f"{name}_sum", f"{name}_count")
        else:
            yield name


def metric_names(expression: str) -> set[str]:
    """Return the metrics in an expression: words that are not labels, strings or PromQL's own."""
    words = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(by|on) \([^)]*\)', " ", expression)
    return set(re.findall(r"\b[a-z_]+_[a-z_]+\b(?!\s*\()", words))


@pytest.fixture
def only(helm_template):
    """Return a function that finds the chart's one document of a kind."""

    def find(kind: str, setting: str) -> dict[str, Any]:
        done = helm_template("--set", setting, *PROMETHEUS_OPERATOR)
        assert done.returncode == 0, done.stderr
        (found,) = (
            document
            for document in yaml.load_all(done.stdout, yaml.CSafeLoader)
            if document and document["kind"] == kind
        )
        return dict(found)

    return find


@pytest.mark.parametrize("part", ["serviceMonitor", "prometheusRule"])
def test_monitoring_objects_need_the_prometheus_operator(helm_template, part) -> None:
    done = helm_template("--set", f"metrics.{part}.enabled=true")
    assert done.returncode != 0
    assert f"install the Prometheus operator first, or set metrics.{part}.enabled=false" in done.stderr
    assert "add --api-versions monitoring.coreos.com/v1" in done.stderr


def test_monitoring_is_off_by_default(helm_template) -> None:
    done = helm_template(*PROMETHEUS_OPERATOR)
    assert "monitoring.coreos.com" not in done.stdout
    assert "grafana" not in done.stdout


def test_the_service_is_scraped(only) -> None:
    drop = "metricRelabelings[0].action=drop"
    chosen = ",".join(f"metrics.serviceMonitor.{part}" for part in ("enabled=true", "labels.release=prometheus", drop))
    monitor, service = only("ServiceMonitor", chosen), only("Service", chosen)
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {
        "port": service["spec"]["ports"][0]["name"],
        "interval": "30s",
        "metricRelabelings": [{"action": "drop"}],
    }


def test_alerts_equal_those_of_the_file(only) -> None:
    rule = only(
        "PrometheusRule", "metrics.prometheusRule.enabled=true,metrics.prometheusRule.labels.release=prometheus"
    )
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())


def test_release_whose_metrics_are_scraped_is_missed_by_name(only) -> None:
    rule = only("PrometheusRule", "metrics.prometheusRule.enabled=true,metrics.serviceMonitor.enabled=true")
    own = 'absent(trainwright_leader{job="trainwright-metrics", namespace="trainwright-system"})'
    text = ALERTS.read_text().replace("expr: absent(trainwright_leader)", f"expr: {own}")
    assert rule["spec"] == yaml.safe_load(text)
    assert own in str(rule)
    assert only("Service", "metrics.serviceMonitor.enabled=true")["metadata"]["name"] == "trainwright-metrics"


def test_addresses_of_runbooks_are_those_of_the_users_copy(only) -> None:
    base = "https://wiki.example/ops/trainwright.html"
    rule = only("PrometheusRule", f"metrics.prometheusRule.enabled=true,metrics.prometheusRule.runbookBase={base}")
    found = [one["annotations"]["runbook_url"] for one in rule["spec"]["groups"][0]["rules"]]
    assert found == [f"{base}#{one['alert'].lower()}" for one in RULES]


def check_alerts(tmp_path: Path, series: dict[str, str], alert: str, expected: dict[str, list[dict[str, str]]]) -> None:
    """Let Prometheus compute an alert on series of a minute, and compare the labels of those that fire at some times."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    severity = next(rule["labels"]["severity"] for rule in RULES if rule["alert"] == alert)
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {
                "eval_time": time,
                "alertname": alert,
                "exp_alerts": [{"exp_labels": {"severity": severity, **labels}} for labels in fires],
            }
            for time, fires in expected.items()
        ],
    }
    rules = yaml.safe_load(ALERTS.read_text())
    for rule in rules["groups"][0]["rules"]:
        rule["annotations"] = {}
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]}))
    done = subprocess.run(
        [promtool, "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_plan_that_waited_long_for_capacity_is_not_stuck_when_it_goes_on(tmp_path) -> None:
    start = 'trainwright_plan_phase_start_timestamp_seconds{plan_namespace="a",name="p",phase="Profiling",reason="%s"}'
    series = {start % "WaitingForCapacity": "1x600 stale", start % "Running": "_x600 1x600"}
    plan = {"plan_namespace": "a", "name": "p", "phase": "Profiling"}
    check_alerts(tmp_path, series, "TrainwrightPlanStuck", {"5h": [], "10h10m": [], "13h50m": [], "14h10m": [plan]})


def test_plan_that_waits_for_its_turn_in_its_namespace_is_no_alarm(tmp_path) -> None:
    labels = '{plan_namespace="a",name="p",phase="Pending",reason="PlanLimitReached"}'
    series = {f"trainwright_plan_phase_start_timestamp_seconds{labels}": "1x600"}
    for alert in ("TrainwrightPlanStuck", "TrainwrightPlanWaitsForCapacity"):
        check_alerts(tmp_path, series, alert, {"5h": [], "9h": []})


def test_plan_that_gets_no_further_is_stuck_whatever_its_reasons(tmp_path) -> None:
    start = 'trainwright_plan_phase_start_timestamp_seconds{plan_namespace="a",name="p",phase="Profiling",reason="%s"}'
    series = {start % "Starting": "1x150 stale", start % "Running": "_x150 1x150"}
    plan = {"plan_namespace": "a", "name": "p", "phase": "Profiling"}
    check_alerts(tmp_path, series, "TrainwrightPlanStuck", {"3h50m": [], "4h10m": [plan]})


def test_plan_that_is_refused_is_told_of_within_fifteen_minutes_whatever_refuses_it(tmp_path) -> None:
    start = 'trainwright_plan_phase_start_timestamp_seconds{plan_namespace="a",name="p",phase="Profiling",reason="%s"}'
    series = {
        start % "PodsNotCreated": "1x7 stale",
        start % "JobRefused": "_x7 1x40 stale",
        start % "Running": "_x47 1x20",
    }
    plan = {"plan_namespace": "a", "name": "p", "phase": "Profiling"}
    check_alerts(tmp_path, series, "TrainwrightPlanLacks", {"14m": [], "16m": [plan], "40m": [plan], "55m": []})
    others = {start % "WaitingForCapacity": "1x60", start % "Starting": "1x60"}
    check_alerts(tmp_path, others, "TrainwrightPlanLacks", {"50m": []})


def test_alert_of_refusals_knows_every_reason_of_a_lack() -> None:
    (rule,) = (one for one in RULES if one["alert"] == "TrainwrightPlanLacks")
    (reasons,) = re.findall(r'reason=~"([^"]*)"', rule["expr"])
    assert set(reasons.split("|")) == {reason.value for reason in NEEDS_ACTION}


def test_operator_without_the_lease_is_missed_beside_another_of_its_name(tmp_path) -> None:
    leader = 'trainwright_leader{job="trainwright-metrics",namespace="%s"}'
    fires = [{"job": "trainwright-metrics", "namespace": "b"}]
    check_alerts(tmp_path, {leader % "a": "1x20", leader % "b": "0x20"}, "TrainwrightNoOperator", {"10m": fires})


LEADER = '{job="trainwright-metrics",namespace="a",instance="first"}'
STANDBY = LEADER.replace("first", "second")
SEEN = "trainwright_last_reconcile_timestamp_seconds"


@pytest.mark.parametrize("alert", ["TrainwrightNoOperator", "TrainwrightStalled"])
def test_operator_that_waits_for_the_lease_is_no_alarm(tmp_path, alert) -> None:
    series = {
        f"trainwright_leader{LEADER}": "1x30",
        f"{SEEN}{LEADER}": "0+60x30",
        f"trainwright_leader{STANDBY}": "0x30",
    }
    check_alerts(tmp_path, series, alert, {"3m": [], "10m": [], "29m": []})


def test_operator_that_takes_over_in_time_is_no_alarm(tmp_path) -> None:
    series = {
        f"trainwright_leader{LEADER}": "1x10 stale",
        f"trainwright_leader{STANDBY}": "0x11 1x20",
        f"{SEEN}{LEADER}": "0+60x10 stale",
        f"{SEEN}{STANDBY}": "_x11 660+60x20",
    }
    for alert in ("TrainwrightNoOperator", "TrainwrightStalled"):
        check_alerts(tmp_path, series, alert, {"12m": [], "20m": [], "30m": []})


def test_operators_of_which_none_gets_the_lease_are_missed(tmp_path) -> None:
    series = {f"trainwright_leader{one}": "0x30" for one in (LEADER, STANDBY)}
    fires = [{"job": "trainwright-metrics", "namespace": "a"}]
    check_alerts(tmp_path, series, "TrainwrightNoOperator", {"4m": [], "10m": fires})


def test_every_figure_is_taken_over_all_operators_of_a_release() -> None:
    over_all = re.compile(r"\b(sum|count|max|min|count_values|absent)\b")
    for expression in QUERIES:
        assert over_all.search(expression), f"{expression}: a standby would be a line of its own"


def test_dashboard_equals_the_file_and_has_its_label(only) -> None:
    config_map = only("ConfigMap", "metrics.dashboard.enabled=true")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(config_map["data"]["trainwright.json"]) == json.loads(DASHBOARD.read_text())
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}


@pytest.mark.parametrize("expression", [rule["expr"] for rule in RULES] + QUERIES)
def test_expressions_use_only_exported_metrics(expression) -> None:
    named = metric_names(expression)
    assert named
    assert named <= set(exported())


def test_unexported_metric_is_detected() -> None:
    assert metric_names('rate(wrong_total{state="a_b"}[5m]) / on (job, a_b) sum by (a_b) (other_wrong)') == {
        "wrong_total",
        "other_wrong",
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do(rule) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"]["summary"].endswith(".")
    assert len(rule["annotations"]["description"]) > 200


def test_bounds_of_ratios_are_histogram_buckets() -> None:
    bounds = set(re.findall(r'le="([^"]*)"', " ".join([*QUERIES, *(rule["expr"] for rule in RULES)])))
    assert bounds
    assert bounds <= {str(bucket) for bucket in RATIO_BUCKETS}


def test_prometheus_reads_every_expression(tmp_path) -> None:
    queries = [expression.replace("$__range", "1d").replace("$__rate_interval", "2m") for expression in QUERIES]
    rules = [
        *RULES,
        *({"record": f"panel:query:{number}", "expr": expression} for number, expression in enumerate(queries)),
    ]
    assert not any("$" in rule["expr"] for rule in rules)
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
