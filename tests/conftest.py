"""What tests of several folders share: the chart, rendered by a real Helm."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from local_cluster.binaries import Binaries
from local_cluster.folders import Folders, default_cache

ROOT = Path(__file__).resolve().parents[1]

HelmTemplate = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def helm_template() -> HelmTemplate:
    """Renders the chart: `helm_template("--set", "crds.keep=false", kube_version="1.30.0")`."""
    built = Binaries(Folders(project=ROOT, cache=default_cache(), cluster_name="trainwright")).path("helm")
    helm = str(built) if built.exists() else shutil.which("helm")
    if helm is None:
        pytest.skip("helm is neither on PATH nor built yet (`make cluster-up` builds it)")

    def render(*arguments: str, kube_version: str = "1.34.0") -> subprocess.CompletedProcess[str]:
        command = [helm, "template", "trainwright", str(ROOT / "charts" / "trainwright")]
        command += ["--namespace", "trainwright-system", "--kube-version", kube_version, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)

    return render
