"""The operator, installed by its Helm chart."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright_demo.kubectl import Kubectl

ROOT = Path(__file__).resolve().parents[3]
OPERATOR_NAMESPACE = "trainwright-system"
HELM_TIMEOUT = "180s"


def install_operator(kubectl: Kubectl, *, local: bool) -> None:
    """Installs (or upgrades) the chart.

    On another context the images are the chart's own, or OPERATOR_IMAGE and WORKER_IMAGE.
    """
    values = ROOT / "deploy" / "local-cluster" / "values.yaml"
    command = ["helm", "upgrade", "--install", "trainwright", str(ROOT / "charts" / "trainwright")]
    command += ["--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", HELM_TIMEOUT]
    command += ["--values", str(values)] if local else []
    if image := os.environ.get("OPERATOR_IMAGE"):
        repository, _, tag = image.rpartition(":")
        command += ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]
    if image := os.environ.get("WORKER_IMAGE"):
        command += ["--set", f"worker.image={image}"]
    kubectl.run_program(command)
    if local:
        # The image keeps its name when the code changes: a new pod takes the new one.
        kubectl.run("--namespace", OPERATOR_NAMESPACE, "rollout", "restart", "deployment/trainwright")
        kubectl.run(
            "--namespace",
            OPERATOR_NAMESPACE,
            "rollout",
            "status",
            "deployment/trainwright",
            f"--timeout={HELM_TIMEOUT}",
        )
