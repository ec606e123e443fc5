"""Two plans of one model: the second takes the links and profiles that pods of the first measured.

The finished plan then serves a tenant who may edit plans alone, and whose job would hold its devices for ever.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from plan_only_tenant import hold_and_give_back

from trainwright_operator.kubectl.client import condition

MEASUREMENTS = ("get", "configmaps", "--selector", "trainwright.dev/measurement", "--output", "json")


@pytest.mark.slow
def test_second_plan_of_a_model_measures_nothing_and_gives_its_winners_devices_back(
    workbench: Any, small_plan: Any
) -> None:
    # Not devices.max, which takes nodes that are free: pods of a test before may still end on some.
    v100 = {"nodeSelector": {"nvidia.com/gpu.product": "emulated-v100"}}
    spec: dict[str, Any] = {"devices": v100, "trials": {"topK": 0}}
    workbench.wait_finished(workbench.apply(small_plan("first", **spec)))
    kept = _kept(workbench)
    assert {labels["trainwright.dev/measured-by"] for labels, _ in kept.values()} == {"first"}
    assert {labels["trainwright.dev/measurement"] for labels, _ in kept.values()} == {"links", "profile"}

    second = workbench.wait_finished(workbench.apply(small_plan("second", **spec)))
    assert condition(second, "Succeeded")["reason"] == "PlannedOnly"
    for kind in ("LinksMeasured", "Profiled"):
        assert "reused from" in condition(second, kind)["message"]
    assert _kept(workbench) == kept  # versions too: nothing was measured anew
    assert _best_plan(second) == _best_plan(workbench.get("first"))

    hold_and_give_back(workbench, "second")


def _best_plan(plan: dict[str, Any]) -> str:
    """Return what is said of the best plan, after how many were found and how long that took."""
    _, _, best = condition(plan, "Planned")["message"].partition("; ")
    assert best
    return best


def _kept(workbench: Any) -> dict[str, tuple[dict[str, str], str]]:
    """Return labels and version of every kept measurement, by name."""
    items = json.loads(workbench.run(*MEASUREMENTS))["items"]
    return {one["metadata"]["name"]: (one["metadata"]["labels"], one["metadata"]["resourceVersion"]) for one in items}
