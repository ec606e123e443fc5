"""Manifests that `tune` refuses in one sentence, with nothing started."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_plan import PLAN

from trainwright_operator.local.manifest import read_manifest

JOB = {"image": "i", "command": ["c"]}
FRAMEWORK = {**JOB, "stepTimeRegex": "s"}
REFUSED = {
    "queue": ({"queueName": "q"}, "spec.queueName: only a cluster has that"),
    "framework": ({"trials": {"framework": FRAMEWORK}}, "spec.trials.framework: only a cluster has that"),
    "node selector": ({"devices": {"nodeSelector": {"a": "b"}}}, "spec.devices.nodeSelector: only a cluster"),
    "job": ({"apply": "Run", "job": JOB}, "spec.apply: Run hands the winner to a cluster"),
    "suspended": ({"suspend": True}, "spec.suspend: is true"),
    "unknown field": ({"colour": "red"}, "spec.colour: no such field"),
    "wrong type": ({"training": {"globalBatchSize": "many"}}, "spec.training.globalBatchSize: "),
    "no model": ({"model": {}}, "exactly one family"),
    "sizes": (
        {"model": {"gpt": {"layers": 1, "hiddenSize": 9, "heads": 2, "sequenceLength": 8, "vocabularySize": 8}}},
        "hiddenSize",
    ),
    "tolerance": ({"search": {"tolerance": 0.9}}, "spec.search: tolerance is a share"),
    "effort": ({"search": {"effort": 0.01}}, "spec.search.effort: effort is at least 0.1"),
    "prices": ({"search": {"objective": "Cost"}}, "spec: search.objective Cost needs the price"),
    "hours": ({"trials": {"maxDeviceHours": 0.001}}, "spec.trials: maxDeviceHours is used up"),
    "resource": ({"devices": {"resourceName": "gpus"}}, "spec.devices: resourceName must be an extended resource"),
    "invisible character": ({"devices": {"products": ["a\u200b"]}}, "U+200B"),
}


def plan(**spec: Any) -> dict[str, Any]:
    document = copy.deepcopy(PLAN)
    document["spec"] |= spec
    return document


@pytest.mark.parametrize("name", REFUSED)
def test_spec_is_refused(plan_file: Callable[..., Path], name: str) -> None:
    spec, words = REFUSED[name]
    with pytest.raises(ValueError, match=r"plan\.yaml: ") as refusal:
        read_manifest(plan_file(**spec))
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds 0 documents"),
        (f"{yaml.safe_dump(PLAN)}---\n{yaml.safe_dump(PLAN)}", "holds 2 documents; tune takes one"),
        ("a: [", "not YAML"),
        ("[1]", "expected a TrainingPlan"),
        (yaml.safe_dump(PLAN | {"kind": "ConfigMap"}), "expected a TrainingPlan (kind: TrainingPlan), got ConfigMap"),
        (yaml.safe_dump(PLAN | {"apiVersion": "v1"}), "apiVersion: expected trainwright.dev/v1alpha1, got v1"),
        (yaml.safe_dump(PLAN | {"metadata": {"name": "Tiny"}}), "metadata.name: expected a lower-case letter"),
        (yaml.safe_dump(PLAN | {"metadata": {"name": "a" * 41}}), "40 characters at most"),
        (yaml.safe_dump(PLAN | {"metadata": {}}), "metadata.name"),
        (yaml.safe_dump(PLAN | {"spec": None}), "spec: missing"),
    ],
)
def test_document_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.yaml: ") as refusal:
        read_manifest(path)
    assert words in str(refusal.value)


def test_trials_share_gangs_unless_the_spec_says_how_many(plan_file: Callable[..., Path]) -> None:
    assert read_manifest(plan_file()).spec.trials.per_gang == 8
    assert read_manifest(plan_file(trials={"perGang": 2})).spec.trials.per_gang == 2
