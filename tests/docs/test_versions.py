"""Table of tested versions: equal to what is pinned, and to what other pages and the chart tell users to install."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from markdown_pages import DOCS, Page
from source_files import ROOT

from local_cluster.binaries import HELM, JOBSET, KUBERNETES, KUEUES, TRAINING_OPERATOR, GoModule
from trainwright_worker.torch_releases import RELEASES

BINARIES = ROOT / "deploy" / "local-cluster" / "binaries"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROW = re.compile(r"^\| ([^|]+) \| ([\d., ]+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def pinned(part: GoModule, module: str) -> str:
    """Return the version of a module that a go.mod pins, without its v."""
    text = (BINARIES / part.name / "go.mod").read_text(encoding="utf-8")
    found = re.search(rf"^\s*(?:require )?{re.escape(module)} v(\S+)", text, re.MULTILINE)
    assert found is not None, f"{part.name} does not pin {module}"
    return found[1]


EXPECTED = {
    "Kubernetes": [pinned(KUBERNETES, "k8s.io/kubernetes")],
    "Kubeflow training operator (PyTorchJob)": [pinned(TRAINING_OPERATOR, "github.com/kubeflow/training-operator")],
    "JobSet": [pinned(JOBSET, "sigs.k8s.io/jobset")],
    "Kueue": [pinned(part, "sigs.k8s.io/kueue") for part in KUEUES.values()],
    "torch in the worker's image": [release.version for release in RELEASES],
    "Helm": [pinned(HELM, "helm.sh/helm/v3")],
    "Python": [PROJECT["project"]["requires-python"].removeprefix(">=")],
}
ROWS = {name: versions.split(", ") for name, versions, _ in ROW.findall(Page(DOCS / "versions.md").text)}


def test_table_has_the_pinned_versions() -> None:
    assert ROWS == EXPECTED


@pytest.mark.parametrize("folder", ["operator", "profiler-image"])
def test_images_have_the_tested_python(folder: str) -> None:
    (version,) = re.findall(r"python:([\d.]+)-slim", (ROOT / folder / "Dockerfile").read_text(encoding="utf-8"))[:1]
    assert [version] == EXPECTED["Python"]


def test_chart_refuses_older_clusters_than_the_table_names() -> None:
    chart = (ROOT / "charts" / "trainwright" / "Chart.yaml").read_text(encoding="utf-8")
    floors = {name: floor for name, _, floor in ROW.findall(Page(DOCS / "versions.md").text)}
    (least,) = re.findall(r'^kubeVersion: ">=(\d+\.\d+)\.0-0"', chart, re.MULTILINE)
    assert floors["Kubernetes"].startswith(f"{least} ")


INSTALLED = {
    "JobSet": r"jobset/releases/download/v([\d.]+)/|JobSet\]?[^\n]{0,40} v(\d[\d.]*\d)",
    "Kubeflow training operator (PyTorchJob)": r"training-operator\.git/[^\s\"]*ref=v([\d.]+)",
}
PAGES = ("docs/install.md", "docs/queues.md", "charts/trainwright/templates/NOTES.txt")


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("part", INSTALLED)
def test_users_are_told_to_install_tested_versions(page: str, part: str) -> None:
    found = re.findall(INSTALLED[part], Path(ROOT / page).read_text(encoding="utf-8"))
    named = {"".join(one) for one in found}
    assert named <= set(EXPECTED[part]), f"{page} names {named}"


@pytest.mark.parametrize(
    "name", ["README.md", "docs/install.md", "docs/custom-models.md", "deploy/examples/custom/Dockerfile"]
)
def test_images_that_pages_name_have_the_version_of_the_project(name: str) -> None:
    tags = re.findall(r"(?:operator|worker):(\d+\.\d+\.\d+)", (ROOT / name).read_text(encoding="utf-8"))
    assert set(tags) == {PROJECT["project"]["version"]}


def test_chart_and_changelog_have_the_version_of_the_project() -> None:
    chart = (ROOT / "charts" / "trainwright" / "Chart.yaml").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PROJECT["project"]["version"]
    assert re.findall(r"^(?:version|appVersion): (.*)$", chart, re.MULTILINE) == [version, version]
    assert re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)[0] == version


def test_a_release_has_at_most_forty_lines_in_the_changelog() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert all(len([line for line in release.splitlines() if line]) <= 40 for release in releases)
