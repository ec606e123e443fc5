"""Cluster programs, built from pinned Go modules and cached by version."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from local_cluster.commands import ClusterError, run
from local_cluster.paths import Folders, fingerprint
from local_cluster.progress import Steps

_LONGEST_BUILD_SECONDS = 1500


@dataclass(frozen=True, slots=True)
class GoModule:
    """Go module whose go.mod pins programs.

    Attributes:
        version_of: module whose version the linker embeds.
        kustomization: module and folder in it of the manifests that match the programs.
    """

    name: str
    programs: dict[str, str]
    version_of: str | None = None
    version_variables: tuple[str, ...] = field(default=())
    kustomization: tuple[str, str] | None = None

    def folder(self, folders: Folders) -> Path:
        return folders.sources / "binaries" / self.name

    def version(self, folders: Folders) -> str | None:
        """Return the pinned version, such as v1.34.4."""
        if self.version_of is None:
            return None
        module = re.search(
            rf"^\s*(?:require )?{re.escape(self.version_of)} (v\S+)",
            (self.folder(folders) / "go.mod").read_text(),
            re.MULTILINE,
        )
        if module is None:
            raise ClusterError(f"{self.folder(folders) / 'go.mod'} does not require {self.version_of}")
        return module[1]

    def linker_flags(self, folders: Folders) -> str:
        version = self.version(folders)
        flags = ["-s", "-w"]
        if version is not None:
            values = {"version": version, "gitVersion": version}
            values |= dict(zip(("gitMajor", "gitMinor"), version.removeprefix("v").split("."), strict=False))
            flags += [f"-X {name}={values[name.rpartition('.')[2]]}" for name in self.version_variables]
        return " ".join(flags)

    def build_folder(self, folders: Folders) -> Path:
        """Return the cache folder of these programs at this version."""
        sources = [file.read_text() for file in sorted(self.folder(folders).iterdir()) if file.is_file()]
        return folders.binaries / f"{self.name}-{fingerprint(*sources, self.linker_flags(folders))}"


_KUBERNETES_VERSION = tuple(
    f"{package}.{name}"
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    for name in ("gitVersion", "gitMajor", "gitMinor")
)

SANDBOX = GoModule("sandbox", {"sandbox": "."})
KUBERNETES = GoModule(
    "kubernetes",
    {
        "kubectl": "k8s.io/kubernetes/cmd/kubectl",
        "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
        "etcd": "go.etcd.io/etcd/server/v3",
        "kubelet": "k8s.io/kubernetes/cmd/kubelet",
        "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
        "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
        "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    },
    "k8s.io/kubernetes",
    _KUBERNETES_VERSION,
)
TRAINING_OPERATOR = GoModule(
    "training-operator",
    {"training-operator": "github.com/kubeflow/training-operator/cmd/training-operator.v1"},
    kustomization=("github.com/kubeflow/training-operator", "manifests/overlays/standalone"),
)
JOBSET = GoModule("jobset", {"jobset": "sigs.k8s.io/jobset"}, kustomization=("sigs.k8s.io/jobset", "config/default"))
KUEUES = {
    release: GoModule(
        f"kueue-{release}",
        {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
        "sigs.k8s.io/kueue",
        kustomization=("sigs.k8s.io/kueue", "config/default"),
    )
    for release in ("0.18", "0.19")
}
"""Releases of Kueue, of which a cluster has one; plans in queues are tested on each."""
KUEUE_RELEASE = "0.19"
"""Release of clusters that name none."""
COREDNS = GoModule("coredns", {"coredns": "github.com/coredns/coredns"})
HELM = GoModule(
    "helm", {"helm": "helm.sh/helm/v3/cmd/helm"}, "helm.sh/helm/v3", ("helm.sh/helm/v3/internal/version.version",)
)
GO_MODULES = (SANDBOX, KUBERNETES, TRAINING_OPERATOR, JOBSET, COREDNS, HELM)
"""Build order: modules that others depend on come first. Kueue, which few need, is left out."""
API_SERVER_PROGRAMS = ("kubectl", "kube-apiserver", "etcd", "helm")
"""Programs of an API server without nodes."""


@dataclass(frozen=True, slots=True)
class Binaries:
    """Built programs; `further`: modules besides those of every cluster."""

    folders: Folders
    further: tuple[GoModule, ...] = ()

    @property
    def modules(self) -> tuple[GoModule, ...]:
        return (*GO_MODULES, *self.further)

    def path(self, program: str) -> Path:
        for part in self.modules:
            if program in part.programs:
                return part.build_folder(self.folders) / program
        raise ClusterError(f"there is no program '{program}' in the local cluster")

    def manifests(self, part: GoModule) -> Path:
        """Return the file of the manifests that match a module's programs."""
        return part.build_folder(self.folders) / "manifests.yaml"

    def search_path(self) -> list[Path]:
        """Return the folders for the user's PATH."""
        return [KUBERNETES.build_folder(self.folders), HELM.build_folder(self.folders)]

    def missing(self, only: Collection[str] | None = None) -> list[tuple[GoModule, str]]:
        """Return the programs to build, in order; with `only`, those of these."""
        wanted = [(part, name) for part in self.modules for name in part.programs if only is None or name in only]
        return [(part, name) for part, name in wanted if not (part.build_folder(self.folders) / name).exists()]

    def build(self, steps: Steps, only: Collection[str] | None = None) -> None:
        """Build missing programs, with `only` those of these; all of them take 15 minutes on two cores."""
        missing = self.missing(only)
        if missing:
            _require_go()
            with steps.step("build the programs", total=len(missing)) as step:
                for part, program in missing:
                    self._build_one(part, program)
                    step.advance(program)
        for part in self.modules:
            if part.kustomization is not None and not self.manifests(part).exists():
                self._render(part, *part.kustomization)

    def _build_one(self, part: GoModule, program: str) -> None:
        target = part.build_folder(self.folders) / program
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{program}.partial")
        options = ["-trimpath", "-buildvcs=false", "-ldflags", part.linker_flags(self.folders), "-o", str(partial)]
        # Without cgo, no C compiler is needed and the programs run in images from scratch.
        run(
            ["go", "build", *options, part.programs[program]],
            what=f"building {program}",
            deadline_seconds=_LONGEST_BUILD_SECONDS,
            environment={**os.environ, "CGO_ENABLED": "0"},
            folder=part.folder(self.folders),
        )
        partial.rename(target)

    def _render(self, part: GoModule, module: str, overlay: str) -> None:
        """Render the manifests of the module itself, which match the program's version."""
        what, source = f"rendering the manifests of {part.name}", self.source(part, module)
        self.manifests(part).parent.mkdir(parents=True, exist_ok=True)
        self.manifests(part).write_text(run([self.path("kubectl"), "kustomize", source / overlay], what=what))

    def source(self, part: GoModule, module: str) -> Path:
        """Return the folder of a module's source at the version that the part pins, downloaded where it is missing."""
        command = ["go", "mod", "download", "-json", module]
        folder: str = json.loads(run(command, what=f"downloading {module}", folder=part.folder(self.folders)))["Dir"]
        return Path(folder)


def _require_go() -> None:
    if shutil.which("go") is None:
        raise ClusterError("the cluster's programs are built with Go; install Go 1.26 or newer and put it on PATH")
    version = re.search(r"go(\d+)\.(\d+)", run(["go", "version"], what="asking Go for its version"))
    if version is None or (int(version[1]), int(version[2])) < (1, 26):
        raise ClusterError("the cluster's programs need Go 1.26 or newer; install it and put it first on PATH")
