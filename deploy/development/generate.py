"""Command that writes what is generated: the CRD in the chart, the plain manifests, docs/reference, docs/pictures."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from documentation_pictures import FOLDER, PICTURES
from reference_pages import PAGES

from local_cluster.binaries import Binaries
from local_cluster.paths import Folders, default_cache
from trainwright_operator.api import crd

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "trainwright"
DEFINITION = CHART / "files" / "trainingplans.yaml"
MANIFESTS = ROOT / "deploy" / "manifests" / "trainwright.yaml"
REFERENCE = ROOT / "docs" / "reference"
NAMESPACE = "trainwright-system"
KUBE_VERSION = "1.34.0"  # rendered for; helm without a cluster would take its own library's
HEADER = f"""\
# Generated from charts/trainwright by `make generate`; change the chart.
apiVersion: v1
kind: Namespace
metadata:
  name: {NAMESPACE}
"""


def find_helm() -> Path | None:
    """Return the local cluster's helm, else the one on PATH, else None."""
    built = Binaries(Folders(project=ROOT, cache=default_cache(), cluster_name="trainwright")).path("helm")
    on_path = shutil.which("helm")
    return built if built.exists() else Path(on_path) if on_path else None


def render(helm: Path) -> str:
    """Return the plain manifests."""
    command = [
        str(helm),
        "template",
        "trainwright",
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        KUBE_VERSION,
        "--set",  # applied again, they must not narrow what is watched
        "watchNamespaces={*}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise SystemExit(f"the chart cannot be rendered:\n{done.stderr.strip()}")
    return HEADER + done.stdout


def main() -> None:
    DEFINITION.write_text(crd.crd_yaml())
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
    helm = find_helm()
    if helm is None:
        raise SystemExit("helm is needed to render the manifests; put it on PATH, or run `make cluster-up` once")
    MANIFESTS.write_text(render(helm))
    written = ", ".join(str(path.relative_to(ROOT)) for path in (DEFINITION, REFERENCE, FOLDER, MANIFESTS))
    print(f"wrote {written}", file=sys.stderr)


if __name__ == "__main__":
    main()
