"""Client of kubectl and helm for the demo."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster.binaries import Binaries
from local_cluster.paths import Folders, default_cache, project_root

CALL_DEADLINE_SECONDS = 300
ATTEMPTS, RETRY_SECONDS = 5, 2.0
"""Calls of an API server that is too busy to greet: trials occupy a small machine's processors for seconds."""
TOO_BUSY = "TLS handshake timeout"


@dataclass(frozen=True)
class Kubectl:
    """Local cluster (by kubeconfig) or context of the user."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str = "default"

    @property
    def environment(self) -> dict[str, str]:
        environment = dict(os.environ)
        if self.kubeconfig:
            folders = Folders(project_root(), default_cache(), "trainwright")
            programs = [str(folder) for folder in Binaries(folders).search_path()]
            environment["KUBECONFIG"] = str(self.kubeconfig)
            environment["PATH"] = ":".join([*programs, environment["PATH"]])
        return environment

    def run_program(self, command: list[str]) -> str:
        """Run helm or kubectl against this cluster. End the demo with the program's message on failure."""
        program = shutil.which(command[0], path=self.environment["PATH"])
        if program is None:
            raise SystemExit(f"{command[0]} is not on PATH; install it, or leave CONTEXT out to use the local cluster")
        if self.context:
            command = [*command, "--kube-context" if command[0] == "helm" else "--context", self.context]
        for attempt in range(1, ATTEMPTS + 1):
            done = subprocess.run(
                [program, *command[1:]],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=CALL_DEADLINE_SECONDS,
                check=False,
            )
            if done.returncode == 0:
                return done.stdout
            if TOO_BUSY not in done.stderr or attempt == ATTEMPTS:
                break
            time.sleep(RETRY_SECONDS)
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.strip() or done.stdout.strip()}")

    def run(self, *arguments: str) -> str:
        return self.run_program(["kubectl", *arguments])

    def get_plan(self, name: str) -> dict[str, Any]:
        resource: dict[str, Any] = json.loads(
            self.run("--namespace", self.namespace, "get", "trainingplan", name, "--output", "json")
        )
        return resource

    def fresh_apply(self, manifest: Path) -> str:
        """Apply the manifest after deleting leftovers of an earlier run, and return the plan's name."""
        self.run(
            "--namespace",
            self.namespace,
            "delete",
            "--ignore-not-found",
            "--wait",
            "--timeout=60s",
            "-f",
            str(manifest),
        )
        applied = self.run("--namespace", self.namespace, "apply", "--output", "name", "-f", str(manifest))
        return applied.strip().rpartition("/")[2]
