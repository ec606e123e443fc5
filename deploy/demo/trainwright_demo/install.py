"""Installation of the operator by its Helm chart."""

from __future__ import annotations

import os
from pathlib import Path

from trainwright_demo.kubectl import Kubectl

ROOT = Path(__file__).resolve().parents[3]
OPERATOR_NAMESPACE = "trainwright-system"
HELM_TIMEOUT = "180s"


def install_operator(kubectl: Kubectl, *, local: bool) -> None:
    """Install or upgrade the chart.

    On another context the images are the user's OPERATOR_IMAGE and WORKER_IMAGE, from a registry that its nodes reach.
    """
    values = ROOT / "deploy" / "local-cluster" / "values.yaml"
    command = ["upgrade", "--install", "trainwright", str(ROOT / "charts" / "trainwright")]
    command += ["--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", HELM_TIMEOUT]
    command += ["--values", str(values)] if local else []
    if not local:
        repository, tag = split_image(os.environ["OPERATOR_IMAGE"])
        command += ["--set", f"image.repository={repository}", "--set", f"image.tag={tag}"]
        command += ["--set", f"worker.image={os.environ['WORKER_IMAGE']}", "--set", "watchNamespaces={*}"]
    kubectl.helm(*command)
    if local:
        # The image keeps its name when the code changes, so only a restart uses the new one.
        kubectl.run("--namespace", OPERATOR_NAMESPACE, "rollout", "restart", "deployment/trainwright")
        kubectl.run(
            "--namespace",
            OPERATOR_NAMESPACE,
            "rollout",
            "status",
            "deployment/trainwright",
            f"--timeout={HELM_TIMEOUT}",
        )


def check_images() -> None:
    """End the demo with a message unless both images are set: no default image is trusted by name."""
    for variable in ("OPERATOR_IMAGE", "WORKER_IMAGE"):
        if ":" not in os.environ.get(variable, "").rpartition("/")[2]:
            raise SystemExit(
                f"with --context the demo needs {variable}=REGISTRY/NAME:TAG, an image that its nodes can pull; "
                "docs/install.md says how to build both"
            )


def split_image(image: str) -> tuple[str, str]:
    """Split an image into repository and tag; `host:5000/name:tag` has its tag after the last slash."""
    folder, slash, name = image.rpartition("/")
    name, _, tag = name.partition(":")
    return f"{folder}{slash}{name}", tag


def remove(kubectl: Kubectl, plan: Path) -> None:
    """Remove the plan with its children, then the operator, from a context. The CRD stays."""
    kubectl.run("--namespace", kubectl.namespace, "delete", "--ignore-not-found", "--wait", "-f", str(plan))
    kubectl.helm("uninstall", "trainwright", "--namespace", OPERATOR_NAMESPACE, "--ignore-not-found")
