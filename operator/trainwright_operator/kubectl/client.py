"""Calls of kubectl, with the rights of whoever calls it; a failure is one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainwright.outside.plain_text import plain_line, without_controls
from trainwright_operator.api import GROUP, PLURAL

CALL_DEADLINE_SECONDS: Final = 300
ATTEMPTS: Final = 5
RETRY_SECONDS = 2.0
"""Pause before an API server that is too busy to greet is asked again: trials occupy a small machine's processors for seconds."""
_TOO_BUSY: Final = "TLS handshake timeout"
PLANS: Final = f"{PLURAL}.{GROUP}"


class KubectlError(ValueError):
    """Failure of kubectl, in its own words on one line."""

    @property
    def is_missing(self) -> bool:
        """Return whether the object, or its namespace, does not exist."""
        return "(NotFound)" in str(self)

    @property
    def is_forbidden(self) -> bool:
        return "(Forbidden)" in str(self)

    @property
    def has_no_definition(self) -> bool:
        """Return whether the cluster does not know the kind of the object."""
        return "the server doesn't have a resource type" in str(self)


@dataclass(frozen=True)
class Kubectl:
    """kubectl on a cluster.

    Attributes:
        context: of the kubeconfig; None for its present one.
        namespace: None for the context's.
    """

    context: str | None = None
    namespace: str | None = None

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def run(self, *arguments: str) -> str:
        """Return what kubectl prints. Raise KubectlError where it fails, or is not on PATH."""
        return self.run_program("kubectl", *(("--context", self.context) if self.context else ()), *arguments)

    def run_program(self, program: str, *arguments: str) -> str:
        """Run a program of the cluster's users. Raise KubectlError where it fails, or is not on PATH."""
        path = shutil.which(program, path=self.environment.get("PATH"))
        if path is None:
            raise KubectlError(f"{program} is not on PATH; install it")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                done = subprocess.run(
                    [path, *arguments],
                    env=self.environment,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=CALL_DEADLINE_SECONDS,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise KubectlError(f"{program} {arguments[0]} has not ended in {CALL_DEADLINE_SECONDS} s") from None
            if done.returncode == 0:
                return done.stdout
            if _TOO_BUSY not in done.stderr or attempt == ATTEMPTS:
                break
            time.sleep(RETRY_SECONDS)
        raise KubectlError(plain_line(f"{program} failed: {done.stderr.strip() or done.stdout.strip()}"))

    def get(self, *what: str) -> dict[str, Any]:
        """Return an object, or a list of them, without control characters. Raise KubectlError where there is none to be had."""
        where = ("--namespace", self.namespace) if self.namespace is not None else ()
        answer: dict[str, Any] = without_controls(json.loads(self.run("get", *what, *where, "--output", "json")))
        return answer

    def get_plan(self, name: str) -> dict[str, Any]:
        """Return a TrainingPlan. Raise KubectlError with what to do where there is none to be had."""
        try:
            return self.get(PLANS, name)
        except KubectlError as error:
            raise explained(error, f"plan {name}", self.namespace) from None


def explained(error: KubectlError, what: str, namespace: str | None) -> KubectlError:
    """Return the failure to read TrainingPlans (`what`) with what to do about it."""
    where = f" in the namespace {namespace}" if namespace is not None else ""
    if error.has_no_definition:
        return KubectlError("this cluster has no TrainingPlans: the operator is not installed there (docs/install.md)")
    if error.is_missing:
        return KubectlError(f"there is no {what}{where}; `kubectl get trainingplans --all-namespaces` lists them")
    if error.is_forbidden:
        return KubectlError(f"you may not read the {what}{where}: {error}")
    return error


def condition(resource: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the condition of that type, or an empty mapping."""
    conditions = resource.get("status", {}).get("conditions", [])
    return next((each for each in conditions if each["type"] == kind), {})
