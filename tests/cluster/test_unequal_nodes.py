"""Nodes with one, two and four devices: a PyTorchJob for each pod shape, or one JobSet; one rendezvous, one trial."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from trainwright import documents
from trainwright.plan import Plan

ROOT = Path(__file__).resolve().parents[2]
DEFAULT = ROOT / "deploy" / "local-cluster" / "cluster.yaml"


@pytest.fixture
def unequal_nodes(kubectl, tmp_path):
    """Change the running cluster's device counts by an edited config; restore the default afterwards."""
    shape = yaml.safe_load(DEFAULT.read_text())
    for node, devices in zip(shape["nodes"], (1, 2, 4), strict=False):
        node |= {"devices": devices, "accelerator": "emulated-v100"}
    edited = tmp_path / "cluster.yaml"
    edited.write_text(yaml.safe_dump(shape))
    up(edited)
    yield
    up(DEFAULT)


def up(shape: Path) -> None:
    subprocess.run([sys.executable, "-m", "local_cluster", "up", "--file", str(shape)], cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("unequal_nodes")
@pytest.mark.parametrize("launcher", ["PyTorchJob", "JobSet"])
def test_trial_runs_on_nodes_with_one_two_and_four_devices(workbench, small_plan, launcher) -> None:
    plan = small_plan(
        launcher=launcher,
        model={"gpt": {"layers": 8, "hiddenSize": 64, "heads": 4, "sequenceLength": 64, "vocabularySize": 512}},
        training={"globalBatchSize": 7},
        devices={"products": ["emulated-v100"]},
        trials={"topK": 2, "baseline": "None", "warmupIterations": 1, "iterations": 3},
    )
    resource = workbench.wait_measured(workbench.apply(plan))
    states = {trial["name"]: (trial["state"], trial.get("reason")) for trial in resource["status"]["trials"]}
    assert "winner" in resource["status"], states
    winner = documents.parse(resource["status"]["winner"]["plan"], Plan, source="winner.plan")
    assert Counter(device.node for device in winner.devices) == {"node-1": 1, "node-2": 2, "node-3": 4}
