"""Writes what is generated: the CRD in the chart, the plain manifests rendered from it, the README's table of metrics."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from local_cluster.binaries import Binaries
from local_cluster.folders import Folders, default_cache
from trainwright_operator.api import crd
from trainwright_operator.metrics import TABLE

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "trainwright"
DEFINITION = CHART / "files" / "trainingplans.yaml"
MANIFESTS = ROOT / "deploy" / "manifests" / "trainwright.yaml"
README = ROOT / "README.md"
METRICS_BEGIN, METRICS_END = "<!-- metrics: written by make generate -->\n", "<!-- end of metrics -->\n"
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
    """The local cluster's helm, else the one on PATH; None where there is neither."""
    built = Binaries(Folders(project=ROOT, cache=default_cache(), cluster_name="trainwright")).path("helm")
    on_path = shutil.which("helm")
    return built if built.exists() else Path(on_path) if on_path else None


def render(helm: Path) -> str:
    """The plain manifests."""
    command = [
        str(helm),
        "template",
        "trainwright",
        str(CHART),
        "--namespace",
        NAMESPACE,
        "--kube-version",
        KUBE_VERSION,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise SystemExit(f"the chart cannot be rendered:\n{done.stderr.strip()}")
    return HEADER + done.stdout


def metrics_table() -> str:
    """All metrics in Markdown, as the README lists them."""
    rows = [
        f"| `{name}` | {metric.kind} | {', '.join(f'`{label}`' for label in metric.labels)} | {_cell(metric.help)} |"
        for name, metric in TABLE.items()
    ]
    return "\n".join(["| metric | type | labels | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def with_metrics(readme: str) -> str:
    """The README with the table as it is to be."""
    before, begin, rest = readme.partition(METRICS_BEGIN)
    _, end, after = rest.partition(METRICS_END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks {METRICS_BEGIN.strip()} or {METRICS_END.strip()}")
    return f"{before}{begin}\n{metrics_table()}\n{end}{after}"


def main() -> None:
    DEFINITION.write_text(crd.text())
    README.write_text(with_metrics(README.read_text()))
    helm = find_helm()
    if helm is None:
        raise SystemExit("helm is needed to render the manifests; put it on PATH, or run `make cluster-up` once")
    MANIFESTS.write_text(render(helm))
    written = ", ".join(str(path.relative_to(ROOT)) for path in (DEFINITION, README, MANIFESTS))
    print(f"wrote {written}", file=sys.stderr)


if __name__ == "__main__":
    main()
