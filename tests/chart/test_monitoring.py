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
DASHBOARDS = {
    "trainwright.json": ALERTS.parent / "dashboard.json",
    "trainwright-quality.json": ALERTS.parent / "quality-dashboard.json",
}
PROMETHEUS_OPERATOR = ("--api-versions", "monitoring.coreos.com/v1")
EVERY_RULE = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
RULES = [rule for rule in EVERY_RULE if "alert" in rule]
RECORDS = [rule for rule in EVERY_RULE if "record" in rule]
BOARDS = {key: json.loads(file.read_text()) for key, file in DASHBOARDS.items()}
PANELS = [panel for board in BOARDS.values() for panel in board["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
VERSIONS = [one["expr"] for board in BOARDS.values() for one in board["annotations"]["list"]]


def exported() -> Iterator[str]:
    """Yield the names of all series."""
    for name, metric in METRIC_DEFINITIONS.items():
        if metric.kind is Kind.HISTOGRAM:
            yield from (f"{name}_bucket", f"{name}_sum", f"{name}_count")
        else:
            yield name


def metric_names(expression: str) -> set[str]:
    """Return the metrics in an expression: words that are not labels, strings or PromQL's own."""
    words = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^]]*\]|\b(by|on) \([^)]*\)|group_left \(\)', " ", expression)
    return set(re.findall(r"(?<![\w:])[a-z_:]+[_:][a-z_:0-9]+\b(?!\s*\()", words))


VARIABLES = {
    f"${variable['name']}"
    for board in BOARDS.values()
    for variable in board["templating"]["list"]
    if variable["type"] == "query"
}


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


def test_alerts_are_changed_one_by_one(only) -> None:
    one = "metrics.prometheusRule.alerts.TrainwrightPlanWaitsForCapacity"
    rule = only(
        "PrometheusRule",
        f"metrics.prometheusRule.enabled=true,{one}.threshold=7200.5,{one}.for=7m,{one}.labels.severity=info,"
        "metrics.prometheusRule.alerts.TrainwrightPlanStuck.enabled=false,metrics.prometheusRule.alertLabels.team=ml",
    )
    found = {one["alert"]: one for one in rule["spec"]["groups"][0]["rules"]}
    assert rule["spec"]["groups"][1:] == yaml.safe_load(ALERTS.read_text())["groups"][1:]
    expected = {one["alert"]: one | {"labels": one["labels"] | {"team": "ml"}} for one in RULES}
    del expected["TrainwrightPlanStuck"]
    changed = expected["TrainwrightPlanWaitsForCapacity"]
    changed |= {"expr": changed["expr"].replace("> 3600", "> 7200.5"), "for": "7m"}
    changed["labels"]["severity"] = "info"
    assert found == expected


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("TrainwrightNoOperator.threshold=2", "this alert has no threshold"),
        ("TrainwrightPlanWaits.threshold=2", "TrainwrightPlanWaits"),
    ],
)
def test_settings_without_an_effect_are_refused(helm_template, setting, message) -> None:
    settings = f"metrics.prometheusRule.enabled=true,metrics.prometheusRule.alerts.{setting}"
    done = helm_template("--set", settings, *PROMETHEUS_OPERATOR)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_alert_has_one_threshold_at_most() -> None:
    numbers = {rule["alert"]: re.findall(r"(?<!=)> ([0-9.]+)", rule["expr"]) for rule in RULES}
    assert all(len(found) <= 1 for found in numbers.values()), numbers
    schema = json.loads((ROOT / "charts" / "trainwright" / "values.schema.json").read_text())
    settings = schema["properties"]["metrics"]["properties"]["prometheusRule"]["properties"]["alerts"]
    assert settings["propertyNames"]["enum"] == list(numbers)


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


PLAN = 'plan_namespace="a",name="%s"'
OF_PHASE = f"trainwright_plan_phase_wait_seconds{{{PLAN}}}"
EARLIER = f"trainwright_plan_earlier_wait_seconds{{{PLAN}}}"
PHASE = f'trainwright_plan_phase_start_timestamp_seconds{{{PLAN},phase="Profiling",reason="%s"}}'
WAITING = f'trainwright_plan_waiting_since_timestamp_seconds{{{PLAN},reason="%s"}}'
OF_OPERATOR = ',instance="%s"}'
STUCK = {"plan_namespace": "a", "name": "p", "phase": "Profiling"}


def steps(*parts: tuple[int, float | None]) -> str:
    """Return the values of a series: minutes and their value, None where it has none. Promtool's time begins at 0."""
    return " ".join(
        f"_x{minutes}" if value is None else f"{value}x{minutes - 1}" for minutes, value in parts if minutes
    )


def test_plan_that_waited_long_for_capacity_is_not_stuck_when_it_goes_on(tmp_path) -> None:
    series = {
        WAITING % ("p", "WaitingForCapacity"): "0x599 stale",
        PHASE % ("p", "WaitingForCapacity"): "0x599 stale",
        PHASE % ("p", "Running"): "_x600 0x600",
        OF_PHASE % "p": steps((600, 0), (600, 36000)),
    }
    check_alerts(tmp_path, series, "TrainwrightPlanStuck", {"5h": [], "10h10m": [], "13h50m": [], "14h10m": [STUCK]})


def test_plan_that_waits_for_its_turn_in_its_namespace_is_no_alarm(tmp_path) -> None:
    series = {
        PHASE % ("p", "PlanLimitReached"): "0x600",
        WAITING % ("p", "PlanLimitReached"): "0x600",
        EARLIER % "p": "0x600",
    }
    for alert in ("TrainwrightPlanStuck", "TrainwrightPlanWaitsForCapacity", "TrainwrightPlanLacks"):
        check_alerts(tmp_path, series, alert, {"5h": [], "9h": []})


def test_plan_that_gets_no_further_is_stuck_whatever_its_reasons(tmp_path) -> None:
    series = {
        PHASE % ("p", "Starting"): "0x150 stale",
        PHASE % ("p", "Running"): "_x150 0x150",
        OF_PHASE % "p": "0x300",
    }
    check_alerts(tmp_path, series, "TrainwrightPlanStuck", {"3h50m": [], "4h10m": [STUCK]})


def by_pods(series: str, every_minutes: int, pods: int, start: int = 0) -> dict[str, str]:
    """Return a series with one value as pods export it that replace each other, each after a minute without any."""
    of_pod = series.removesuffix("}") + OF_OPERATOR
    return {
        of_pod % number: f"{steps((every_minutes * number, None), (every_minutes - 1, start))} stale"
        for number in range(pods)
    }


@pytest.mark.parametrize("every_hours", [1, 3])
def test_waits_and_phases_go_on_across_restarts_of_the_operator(tmp_path, every_hours) -> None:
    every = 60 * every_hours
    earlier = by_pods(EARLIER % "p", every, 12 // every_hours)
    stuck = by_pods(PHASE % ("p", "Running"), every, 12 // every_hours)
    of_phase = by_pods(OF_PHASE % "p", every, 12 // every_hours)
    after = {"3h50m": [], "4h10m": [STUCK], "6h1m": [STUCK], "11h30m": [STUCK]}
    check_alerts(tmp_path, stuck | of_phase | earlier, "TrainwrightPlanStuck", after)
    waiting = by_pods(WAITING % ("p", "WaitingForCapacity"), every, 12 // every_hours)
    fires = [{"plan_namespace": "a", "reason": "WaitingForCapacity"}]
    after = {"50m": [], "1h10m": fires, "3h1m": fires, "6h1m": fires, "11h30m": fires}
    check_alerts(tmp_path, waiting | earlier, "TrainwrightPlanWaitsForCapacity", after)


def test_plan_that_waits_and_tries_by_turns_is_told_of(tmp_path) -> None:
    """11 hours of 50 minutes of waiting and 10 of trying each."""
    since, earlier = [], []
    for hour in range(11):
        since.append(f"{steps((50, hour * 3600))} stale {steps((9, None))}")
        earlier.append(steps((50, hour * 3000), (10, (hour + 1) * 3000)))
    series = {WAITING % ("p", "WaitingForCapacity"): " ".join(since), EARLIER % "p": " ".join(earlier)}
    fires = [{"plan_namespace": "a", "reason": "WaitingForCapacity"}]
    after = {"55m": [], "1h20m": fires, "1h55m": fires, "2h5m": fires, "10h30m": fires, "10h55m": fires}
    check_alerts(tmp_path, series, "TrainwrightPlanWaitsForCapacity", after)


def test_plan_that_waited_long_in_former_phases_is_stuck_after_four_hours_of_the_present_one(tmp_path) -> None:
    series = {
        PHASE % ("p", "Running"): "36000x900",
        OF_PHASE % "p": "0x900",
        EARLIER % "p": "36000x900",
    }
    check_alerts(tmp_path, series, "TrainwrightPlanStuck", {"13h50m": [], "14h10m": [STUCK]})


def test_hundred_waiting_plans_are_one_alert(tmp_path) -> None:
    series = {WAITING % (f"p{number}", "WaitingForQuota"): "0x100" for number in range(100)}
    series |= {EARLIER % f"p{number}": "0x100" for number in range(100)}
    fires = [{"plan_namespace": "a", "reason": "WaitingForQuota"}]
    check_alerts(tmp_path, series, "TrainwrightPlanWaitsForCapacity", {"1h30m": fires})


def test_plan_that_is_refused_is_told_of_after_fifteen_minutes_whatever_refuses_it(tmp_path) -> None:
    series = {
        WAITING % ("p", "PodsNotCreated"): "0x7 stale",
        WAITING % ("p", "JobRefused"): "_x8 480x40 stale",
        EARLIER % "p": steps((7, 0), (40, 480), (40, 2880)),
    }
    fires = [{"plan_namespace": "a", "reason": "JobRefused"}]
    check_alerts(
        tmp_path, series, "TrainwrightPlanLacks", {"14m": [], "16m": fires, "22m": fires, "47m": fires, "1h15m": []}
    )
    others = {WAITING % ("p", "WaitingForCapacity"): "0x60", EARLIER % "p": "0x60"}
    check_alerts(tmp_path, others, "TrainwrightPlanLacks", {"50m": []})


FINISHED = 'trainwright_plans_finished_total{job="j",plan_namespace="a",result="%s",reason="%s"}'


def test_failing_plans_are_told_of_by_namespace(tmp_path) -> None:
    series = {
        FINISHED % ("failed", "NoFeasiblePlan"): "0x10 2x10 4x40",
        FINISHED % ("failed", "other"): "0x60",
        FINISHED % ("succeeded", "BestTrialSelected"): "0x30 1x30",
    }
    fires = [{"job": "j", "plan_namespace": "a"}]
    check_alerts(tmp_path, series, "TrainwrightPlansFail", {"9m": [], "18m": [], "35m": fires})
    good = {FINISHED % ("succeeded", "BestTrialSelected"): "0x10 9x50", FINISHED % ("failed", "other"): "0x20 4x40"}
    check_alerts(tmp_path, good, "TrainwrightPlansFail", {"50m": []})


RATIO = 'trainwright_trial_predicted_over_measured_ratio_%s{job="j",accelerator="T4",kind="time"%s}'


@pytest.mark.parametrize(("within", "fires"), [(3, True), (12, False)])
def test_first_trials_of_an_operator_count(tmp_path, within, fires) -> None:
    """15 trials of one pass are on a series that stood at 0 before."""
    series = {
        RATIO % ("bucket", ',le="0.8"'): "0x20 1x60",
        RATIO % ("bucket", ',le="1.2"'): f"0x20 {1 + within}x60",
        RATIO % ("count", ""): "0x20 15x60",
    }
    expected = [{"job": "j", "accelerator": "T4"}] if fires else []
    check_alerts(tmp_path, series, "TrainwrightPredictionsAreOff", {"15m": [], "1h": expected})


@pytest.mark.parametrize(
    ("series", "alert", "expected"),
    [
        ({'trainwright_searches{job="j",state="waiting"}': "9x60"}, "TrainwrightSearchesQueueUp", {"job": "j"}),
        (
            {'trainwright_plan_unclaimed{job="j",plan_namespace="a",name="p",release="other"}': "1x60"},
            "TrainwrightNamespaceUnclaimed",
            {"job": "j", "plan_namespace": "a", "release": "other"},
        ),
        (
            {'trainwright_plan_internal_error{plan_namespace="a",name="p"}': "1x60"},
            "TrainwrightPlanInternalError",
            {"plan_namespace": "a", "name": "p"},
        ),
        (
            {
                'trainwright_reconcile_errors_total{job="j"}': "0+6x60",
                'trainwright_reconcile_total{job="j"}': "0+10x60",
            },
            "TrainwrightReconcileErrors",
            {"job": "j"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_alerts_fire(tmp_path, series, alert, expected) -> None:
    check_alerts(tmp_path, series, alert, {"50m": [expected]})


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


@pytest.mark.parametrize("seen", ["0+60x5 300x30", "_x36"], ids=["stops", "never begins"])
def test_operator_that_gets_nothing_done_is_missed(tmp_path, seen) -> None:
    series = {f"trainwright_leader{LEADER}": "1x40", f"{SEEN}{LEADER}": seen}
    labels = {"job": "trainwright-metrics", "namespace": "a", "instance": "first"}
    fires = {"1m": [], "4m": [labels]} if seen.startswith("_") else {"5m": [], "9m": [], "12m": [labels]}
    check_alerts(tmp_path, series, "TrainwrightStalled", fires)


def test_operators_of_which_none_gets_the_lease_are_missed(tmp_path) -> None:
    series = {f"trainwright_leader{one}": "0x30" for one in (LEADER, STANDBY)}
    fires = [{"job": "trainwright-metrics", "namespace": "a"}]
    check_alerts(tmp_path, series, "TrainwrightNoOperator", {"4m": [], "10m": fires})


def test_every_figure_is_taken_over_all_operators_of_a_release() -> None:
    over_all = re.compile(r"\b(sum|count|max|min|count_values|absent)\b")
    for expression in QUERIES:
        assert over_all.search(expression), f"{expression}: a standby would be a line of its own"


def test_dashboards_equal_the_files_and_have_their_label(only) -> None:
    config_map = only("ConfigMap", "metrics.dashboard.enabled=true")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {key: json.loads(text) for key, text in config_map["data"].items()} == BOARDS
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    for board in BOARDS.values():
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS)


def test_names_of_plans_link_where_the_installation_says(only) -> None:
    address = "https://console.example/plans/${__data.fields.plan_namespace}/${__data.fields.name}?a=1&b=2"
    config_map = only("ConfigMap", f"metrics.dashboard.enabled=true,metrics.dashboard.planLink={address}")
    for text in config_map["data"].values():
        tables = [panel for panel in json.loads(text)["panels"] if panel["type"] == "table"]
        assert tables
        for table in tables:
            (links,) = (
                change["value"]
                for override in table["fieldConfig"]["overrides"]
                for change in override["properties"]
                if change["id"] == "links"
            )
            assert [link["url"] for link in links] == [address]


def test_colours_of_single_numbers_mean_something() -> None:
    """Grafana's own default is green, and red from 80."""
    for panel in PANELS:
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]


@pytest.mark.parametrize("expression", [rule["expr"] for rule in EVERY_RULE] + QUERIES + VERSIONS)
def test_expressions_use_only_exported_metrics(expression) -> None:
    named = metric_names(expression)
    assert named
    assert named <= {*exported(), *(rule["record"] for rule in RECORDS)}


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
    assert bounds <= {*(str(bucket) for bucket in RATIO_BUCKETS), "+Inf"}


def test_prometheus_reads_every_expression(tmp_path) -> None:
    queries = [re.sub(r"\$__\w+", "1d", expression) for expression in [*QUERIES, *VERSIONS]]
    rules = [
        *EVERY_RULE,
        *({"record": f"panel:query:{number}", "expr": expression} for number, expression in enumerate(queries)),
    ]
    assert {found for rule in rules for found in re.findall(r"\$\w+", rule["expr"])} == VARIABLES
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
