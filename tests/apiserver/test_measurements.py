"""Kept measurements on a real API server: a plan that reuses them is planned without any job, and kubectl lists them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from kept_measurements import keep_measurements
from operator_process import operator, until

from trainwright_operator.flow.names import EMULATION_ANNOTATION

PAGE = Path(__file__).resolve().parents[2] / "docs" / "measurement.md"


def test_plan_reuses_what_is_kept_and_kubectl_lists_it(equipped_api_server, namespace, training_plan, tmp_path) -> None:
    api = equipped_api_server
    manifest = training_plan("again", {"trials.topK": 0, "training.dtype": "float32", "search.planner": "Megatron"})
    nodes = [one for one in api.get("nodes")["items"] if EMULATION_ANNOTATION in one["metadata"]["annotations"]]
    names = keep_measurements(api, namespace, manifest["spec"], nodes)
    assert {name.partition("-")[0] for name in names} == {"links", "profile"}

    api.create(manifest)
    with operator(api, namespace, tmp_path) as (_, _, log):
        until("an answer", 180, lambda: _condition(api, namespace, "Succeeded")["status"] != "Unknown")
        found = _condition(api, namespace, "Succeeded")
        assert (found["status"], found["reason"]) == ("True", "PlannedOnly"), log.read_text()
    for kind in ("LinksMeasured", "Profiled"):
        assert "reused from" in _condition(api, namespace, kind)["message"]
    assert api.get("pytorchjobs,jobsets", "--namespace", namespace)["items"] == []
    api.kubectl("delete", "trainingplan", "again", "--namespace", namespace)

    (listing,) = re.findall(r"kubectl (get configmaps --selector.*?)```", PAGE.read_text(), re.DOTALL)
    rows = api.kubectl(*listing.replace("\\\n", " ").split(), "--namespace", namespace).splitlines()
    assert rows[0].split() == [
        "NAME",
        "DATA",
        "AGE",
        "MEASUREMENT",
        "ACCELERATOR",
        "TENSOR-DEGREE",
        "DTYPE",
        "MEASURED-BY",
    ]
    assert sorted(row.split()[0] for row in rows[1:]) == sorted(names)
    profiles = [row.split() for row in rows[1:] if row.startswith("profile-")]
    assert {tuple(row[3:]) for row in profiles} >= {("profile", "emulated-v100", "1", "float32", "demo")}
    kept = api.get("configmaps", "--namespace", namespace, "--selector", "trainwright.dev/measurement")["items"]
    assert not any("ownerReferences" in one["metadata"] for one in kept)
    assert all(json.loads(one["data"]["key.json"])["key"] for one in kept)


def _condition(api: Any, namespace: str, kind: str) -> dict[str, Any]:
    status = api.get("trainingplan", "again", "--namespace", namespace).get("status", {})
    found: dict[str, Any] = next((c for c in status.get("conditions", []) if c["type"] == kind), {"status": "Unknown"})
    return found
