"""Names of everything that a plan owns: made from the plan alone, so that a restarted operator finds its children again."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from trainwright_operator.api import GROUP
from trainwright_operator.api.spec import TrainingPlanSpec

PLAN_UID_LABEL: Final = f"{GROUP}/plan-uid"
PLAN_LABEL: Final = f"{GROUP}/plan"
GANG_LABEL: Final = f"{GROUP}/gang"
ROLE_LABEL: Final = f"{GROUP}/role"
RENDEZVOUS_LABEL: Final = f"{GROUP}/rendezvous"
PLACEMENT_GATE: Final = f"{GROUP}/placement"
JOBS_CREATED_ANNOTATION: Final = f"{GROUP}/jobs-created-at"
PLACED_ANNOTATION: Final = f"{GROUP}/placed-at"
SEARCH_STARTED_ANNOTATION: Final = f"{GROUP}/search-started"
"""On the cluster document: when the search began, and for which generation and question."""
EMULATION_ANNOTATION: Final = f"{GROUP}/emulation"
REHEARSE_FAULT_ANNOTATION: Final = f"{GROUP}/rehearse-fault"
"""On a TrainingPlan, to rehearse a fault: `candidate-1=crash` (or hang, mute), several with commas between them."""

MAX_JOB_NAME_LENGTH: Final = 52
"""A pod of a PyTorchJob is called `<job>-worker-<index>` inside the 63 characters of a host name."""
_PLAN_PART_LENGTH: Final = 26
_IDENTITY_LENGTH: Final = 8
_CHANGEABLE: Any = {
    "suspend": True,
    "ttl_seconds_after_finished": True,
    "links": {"deadline_seconds": True},
    "profiling": {"deadline_seconds": True},
    "trials": {
        "top_k": True,
        "per_gang": True,
        "timeline": True,
        "max_failed": True,
        "max_device_hours": True,
        "run_deadline_seconds": True,
        "pending_deadline_seconds": True,
        "stop_when_regret_below": True,
    },
}
"""What a person may change without making the measurements so far worthless."""


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one plan's children. `base` is short, starts with a letter and differs for every plan and question."""

    base: str

    @classmethod
    def of(cls, plan_name: str, plan_uid: str, spec: TrainingPlanSpec) -> Names:
        """The names for this plan as its spec stands: another image or other iterations are measured anew."""
        # Without defaults: a version with one more field finds what was measured before it.
        asked = spec.model_dump(mode="json", exclude=_CHANGEABLE, exclude_defaults=True)
        question = json.dumps({name: part for name, part in asked.items() if part or name not in _CHANGEABLE})
        identity = hashlib.sha256(f"{plan_uid}\n{question}".encode()).hexdigest()[:_IDENTITY_LENGTH]
        part = re.sub(r"[^a-z0-9]+", "-", plan_name.lower()).strip("-")[:_PLAN_PART_LENGTH].strip("-")
        if not part[:1].isalpha():
            part = f"p{part}"[:_PLAN_PART_LENGTH]
        return cls(f"{part}-{identity}")

    def child(self, suffix: str) -> str:
        """The name of a child."""
        return f"{self.base}-{suffix}"

    def owns(self, name: str) -> bool:
        """Whether a child's name was made from this base."""
        return name.startswith(f"{self.base}-")

    def job(self, gang: str, shape: int) -> str:
        """The PyTorchJob of a gang for its shape-th pod shape; the first one hosts the rendezvous."""
        name = self.child(gang if shape == 0 else f"{gang}-s{shape}")
        if len(name) > MAX_JOB_NAME_LENGTH:
            raise ValueError(f"the PyTorchJob name {name} has more than {MAX_JOB_NAME_LENGTH} characters")
        return name

    def order(self, gang: str) -> str:
        """The ConfigMap with a gang's order."""
        return self.child(f"{gang}-order")

    def result(self, gang: str) -> str:
        """The ConfigMap with what came of a gang."""
        return self.child(f"{gang}-result")

    @property
    def discovery(self) -> str:
        return self.child("discovery")

    @property
    def cluster(self) -> str:
        return self.child("cluster")

    @property
    def profiles(self) -> str:
        return self.child("profiles")

    def candidates(self, top_k: int) -> str:
        """The ConfigMap with the candidates; another topK asks for other candidates."""
        return self.child(f"candidates-{top_k}")
