"""Plan under way on this machine: its state directory, its gangs and its search."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from trainwright_operator.api import API_VERSION, KIND
from trainwright_operator.api.status import TrainingPlanStatus
from trainwright_operator.flow.actions import StoredRole
from trainwright_operator.flow.snapshot import DryRun
from trainwright_operator.local.gang_process import WORKER, GangProcess
from trainwright_operator.local.machine import Machine
from trainwright_operator.local.manifest import Manifest
from trainwright_operator.local.search import SearchProcess
from trainwright_operator.local.store import FileStore, write_whole

STATE_VERSION: Final = 1
"""Version of the state directory's files; another one's are not read."""
NAMESPACE: Final = "local"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a plan over edits and interruptions.

    Attributes:
        spec: text that changes with the spec; `generation` counts its changes, from 1.
    """

    uid: str
    created_at: datetime
    generation: int
    spec: str

    @classmethod
    def load(cls, folder: Path, spec: str, now: datetime) -> Identity:
        """Return the identity in a state directory, with a higher generation if the spec changed. Raise ValueError for another version's."""
        path = folder / "plan.json"
        stored = _read_json(path)
        if stored is None:
            identity = cls(os.urandom(8).hex(), now, 1, spec)
        elif stored.get("version") != STATE_VERSION:
            raise ValueError(
                f"{folder}: the state is of version {stored.get('version')}, and this program reads {STATE_VERSION}; remove the "
                "directory, or continue with the program that wrote it"
            )
        else:
            changed = stored["spec"] != spec
            created_at = datetime.fromisoformat(stored["created_at"])
            identity = cls(stored["uid"], created_at, stored["generation"] + changed, spec)
        fields = {**asdict(identity), "created_at": identity.created_at.isoformat(), "version": STATE_VERSION}
        write_whole(path, json.dumps(fields, indent=1))
        return identity


@dataclass
class TunedPlan:
    """Plan with all that this machine holds of it."""

    manifest: Manifest
    machine: Machine
    folder: Path
    identity: Identity
    status: TrainingPlanStatus
    maps: FileStore
    kept: FileStore
    image: str
    gangs: dict[str, GangProcess] = field(default_factory=dict)
    search: SearchProcess = field(default_factory=SearchProcess)
    dry_run: DryRun | None = None
    is_suspended: bool = False

    @classmethod
    def load(cls, manifest: Manifest, machine: Machine, folder: Path, kept: Path) -> TunedPlan:
        """Return the plan as a state directory has it, or a new one. Processes of an earlier run are gone, so their gangs begin anew."""
        folder.mkdir(parents=True, exist_ok=True)
        identity = Identity.load(folder, manifest.identity, datetime.now(UTC))
        maps = FileStore(folder / "maps")
        for stored in maps.all():
            if stored.role == StoredRole.TASK:
                maps.delete(stored.name)
        status = _read_status(folder / "status.yaml")
        return cls(manifest, machine, folder, identity, status, maps, FileStore(kept, is_shared=True), worker_digest())

    @property
    def running(self) -> list[GangProcess]:
        return [gang for gang in self.gangs.values() if gang.is_running]

    def set_status(self, status: TrainingPlanStatus) -> None:
        """Store the status as `kubectl get --output yaml` would show it."""
        self.status = status
        resource = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self.manifest.name, "generation": self.identity.generation},
            "status": status.dump(),
        }
        write_whole(
            self.folder / "status.yaml", yaml.safe_dump(resource, sort_keys=False, width=120, allow_unicode=True)
        )

    def stop(self) -> None:
        """End all processes."""
        self.search.stop()
        for gang in self.gangs.values():
            gang.stop()

    def kill(self) -> None:
        """End all processes at once."""
        self.search.stop()
        for gang in self.gangs.values():
            gang.kill()


def worker_digest() -> str:
    """Return the identity of what measures, in the place of an image's digest: the worker's code and torch's version."""
    spec = importlib.util.find_spec(WORKER)
    assert spec is not None
    assert spec.origin is not None
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return f"local@sha256:{digest.hexdigest()}"


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None where there is no file, or none that was written whole."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def _read_status(path: Path) -> TrainingPlanStatus:
    """Return the status in a file; an unreadable one is rebuilt from what is stored."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        return TrainingPlanStatus.model_validate(document["status"])
    except (FileNotFoundError, yaml.YAMLError, ValueError, TypeError, KeyError):
        return TrainingPlanStatus()
