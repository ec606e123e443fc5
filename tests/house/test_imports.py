"""The standard library stays reachable, and the planner loads without torch and Kubernetes."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def test_the_operator_folder_does_not_shadow_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import operator; assert operator.eq(1, 1); import kopf"],
        cwd=ROOT,
        env={"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_the_planner_loads_without_torch_and_kubernetes() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, kubernetes=None, kopf=None);"
        "import trainwright.cli, trainwright.search, trainwright.worker_api, trainwright.documents"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_requirement_is_a_range_that_holds_its_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    own = project["project"]
    del project["dependency-groups"]["release"]  # no image and no test has it: a pin would make them anew
    del own["optional-dependencies"]["mcp"]  # likewise
    groups = [
        project["build-system"]["requires"],
        own["dependencies"],
        *own["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    pins = (ROOT / "deploy" / "development" / "constraints.txt").read_text()
    tested = {canonicalize_name(name): version for name, version in re.findall(r"(?m)^([\w.-]+)==(\S+)$", pins)}
    for line in (line for group in groups for line in group):
        wanted = Requirement(line)
        assert {one.operator for one in wanted.specifier} == {">=", "<"}, line
        assert wanted.specifier.contains(tested[canonicalize_name(wanted.name)]), line


def test_images_and_checkouts_install_the_tested_versions() -> None:
    for script in ("deploy/development/venv.sh", "operator/Dockerfile", "profiler-image/Dockerfile"):
        (install,) = (
            line for line in (ROOT / script).read_text().splitlines() if "install " in line and " -r " in line
        )
        assert re.search(r" -c \S*constraints\.txt$", install), script


def test_commands_run_without_kubernetes_and_torch_in_the_same_process() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, kubernetes=None, kopf=None, prometheus_client=None, urllib3=None);"
        "import trainwright.cli.tune, trainwright_operator.local.loop, trainwright_operator.search_process;"
        "import trainwright.cli.watch, trainwright.cli.report, trainwright_operator.kubectl.watch, trainwright_operator.kubectl.report"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
