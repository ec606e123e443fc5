"""Client of the API server through kubectl."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_cluster.commands import run, succeeds


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with the administrator's kubeconfig."""

    program: Path
    kubeconfig: Path

    def ready(self) -> bool:
        return succeeds([*self._base(), "get", "--raw", "/readyz"], deadline_seconds=5)

    def get(self, *arguments: str) -> dict[str, Any]:
        """Return an object or a list of objects."""
        document: dict[str, Any] = json.loads(self("get", *arguments, "--output", "json"))
        return document

    def apply(self, manifests: str, *, what: str) -> None:
        """Apply manifests on the server side. Idempotent."""
        arguments = ["apply", "--server-side", "--force-conflicts", "--field-manager", "local-cluster"]
        run([*self._base(), *arguments, "--filename", "-"], what=what, text_input=manifests, deadline_seconds=60)

    def accepts(self, manifest: Path) -> bool:
        """Return whether the API server with all webhooks admits a manifest."""
        return succeeds([*self._base(), "create", "--dry-run=server", "--filename", manifest], deadline_seconds=15)

    def __call__(self, *arguments: str) -> str:
        return run([*self._base(), *arguments], what=f"kubectl {arguments[0]}", deadline_seconds=30)

    def _base(self) -> list[str | Path]:
        return [self.program, "--kubeconfig", self.kubeconfig, "--request-timeout=20s"]
