"""Fixtures shared by several folders: the chart rendered by a real Helm."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import property_tests  # noqa: F401  registers the profiles that the next line loads
import pytest
from hypothesis import settings

from local_cluster.binaries import Binaries
from local_cluster.paths import Folders, default_cache

settings.load_profile("ci")  # `--hypothesis-profile nightly` replaces it

ROOT = Path(__file__).resolve().parents[1]

Helm = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_finish() -> None:
    """Leave thousands of collected tests out of every later garbage collection, which took a tenth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Return a function that runs Helm: `helm("list", "--all-namespaces")`."""
    built = Binaries(Folders(project=ROOT, cache=default_cache(), cluster_name="trainwright")).path("helm")
    program = str(built) if built.exists() else shutil.which("helm")
    if program is None:
        # deliberate: `make test-fast` on a bare machine builds nothing; `make test` builds it first.
        pytest.skip("helm is neither on PATH nor built yet (`make programs` builds it)")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=50)

    return run


@pytest.fixture(scope="session")
def helm_template(helm: Helm) -> Helm:
    """Return a function that renders the chart: `helm_template("--set", "crds.keep=false", kube_version="1.30.0")`."""

    def render(*arguments: str, kube_version: str = "1.34.0") -> subprocess.CompletedProcess[str]:
        chart = str(ROOT / "charts" / "trainwright")
        namespace = () if "--namespace" in arguments else ("--namespace", "trainwright-system")
        return helm("template", "trainwright", chart, *namespace, "--kube-version", kube_version, *arguments)

    return render
