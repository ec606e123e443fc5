"""Time that a plan on a CPU is expected to take, and the smaller model that is offered."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from source_files import ROOT

from trainwright.cluster import Node
from trainwright_operator.local.expected_time import ExpectedTime, flops_per_second
from trainwright_operator.local.manifest import read_manifest

NODES = tuple(Node(f"cpu-{number}", "cpu-x-1-thread", 1) for number in range(2))
RATE = 5e10


def expected(plan: Path) -> ExpectedTime:
    return ExpectedTime(read_manifest(plan).spec, NODES, RATE)


def test_example_takes_two_minutes_at_most_and_gpt2_medium_hours() -> None:
    examples = ROOT / "deploy" / "examples"
    assert expected(examples / "tiny.yaml").seconds <= 120
    assert expected(examples / "gpt2-medium.yaml").seconds > 3600


def test_smaller_model_is_a_valid_spec_of_the_same_family_that_takes_minutes(tmp_path: Path) -> None:
    large = ROOT / "deploy" / "examples" / "gpt2-medium.yaml"
    offer = expected(large).find_smaller()
    assert offer is not None
    fields, seconds = offer
    document = yaml.safe_load(large.read_text())
    assert set(fields) == set(document["spec"]["model"]["gpt"])
    document["spec"]["model"]["gpt"] = fields
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(document))
    assert expected(path).seconds == pytest.approx(seconds)
    assert seconds <= 150


def test_rate_of_a_thread_is_measured() -> None:
    rate = flops_per_second()
    assert rate is not None
    assert 1e8 < rate < 1e13
