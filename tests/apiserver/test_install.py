"""The chart on a real API server: install, upgrade over an older definition, uninstall without loss."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = str(ROOT / "charts" / "trainwright")
DEFINITION = "customresourcedefinition/trainingplans.trainwright.dev"


# Before Helm is asked for: on a bare machine it is one of the programs that are built first.
@pytest.mark.usefixtures("programs")
def test_install_upgrade_and_uninstall_keep_the_definition_current_and_the_plans_safe(bare_api_server, helm) -> None:
    api = bare_api_server
    release = ("trainwright", "--namespace", "trainwright-system", "--kubeconfig", str(api.kubeconfig))

    def succeed(*arguments: str) -> str:
        done = helm(*arguments)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr.lower(), done.stderr
        return done.stdout

    notes = succeed("install", *release[:1], CHART, *release[1:], "--create-namespace")
    assert "kubectl get trainingplans --watch" in notes
    assert "The cluster has neither PyTorchJob nor JobSet yet" in notes
    api.establish(DEFINITION)
    api.kubectl("apply", "--filename", str(ROOT / "deploy/examples/gpt2-medium.yaml"))

    # As if an older version had been installed: a column is missing.
    api.kubectl(
        *("patch", DEFINITION, "--type=json", "--patch"),
        '[{"op": "remove", "path": "/spec/versions/0/additionalPrinterColumns/0"}]',
    )
    assert "PHASE" not in api.kubectl("get", "trainingplans")

    def watched() -> str:
        containers = api.get("deployment/trainwright", *release[1:3])["spec"]["template"]["spec"]["containers"]
        return next(one.get("value", "") for one in containers[0]["env"] if one["name"].endswith("_WATCH_NAMESPACES"))

    assert watched() == "trainwright-system"
    every = ("--set", "watchNamespaces={*}")
    succeed("upgrade", *release[:1], CHART, *release[1:], *every)
    assert watched() == ""
    succeed("upgrade", *release[:1], CHART, *release[1:], "--set", "podAnnotations.note=second")
    assert watched() == "", "an upgrade without the value does not keep what is watched"
    assert "PHASE" in api.kubectl("get", "trainingplans"), "the chart does not upgrade the definition"

    succeed("uninstall", *release)
    assert "gpt2-medium" in api.kubectl("get", "trainingplans")
    left = api.kubectl("get", "clusterroles,clusterrolebindings", "--output", "name")
    assert "trainwright" not in left
    assert not api.get("deployments,services,serviceaccounts", "--all-namespaces", "--selector", "helm.sh/chart")[
        "items"
    ]

    succeed("install", *release[:1], CHART, *release[1:])
    assert "gpt2-medium" in api.kubectl("get", "trainingplans"), "a second installation takes the kept definition over"
