"""kubectl and helm of the demo's cluster."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from local_cluster.binaries import Binaries
from local_cluster.paths import Folders, default_cache, project_root
from trainwright_operator.kubectl import client


@dataclass(frozen=True)
class Kubectl(client.Kubectl):
    """Local cluster (by kubeconfig) or context of the user."""

    namespace: str = "default"
    kubeconfig: Path | None = None

    @property
    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.kubeconfig:
            folders = Folders(project_root(), default_cache(), "trainwright")
            programs = [str(folder) for folder in Binaries(folders).search_path()]
            environment["KUBECONFIG"] = str(self.kubeconfig)
            environment["PATH"] = ":".join([*programs, environment["PATH"]])
        return environment

    def helm(self, *arguments: str) -> str:
        return self.run_program("helm", *arguments, *(("--kube-context", self.context) if self.context else ()))

    def fresh_apply(self, manifest: Path) -> str:
        """Apply the manifest after deleting leftovers of an earlier run, and return the plan's name."""
        where = ("--namespace", self.namespace)
        self.run(*where, "delete", "--ignore-not-found", "--wait", "--timeout=60s", "-f", str(manifest))
        applied = self.run(*where, "apply", "--output", "name", "-f", str(manifest))
        return applied.strip().rpartition("/")[2]
