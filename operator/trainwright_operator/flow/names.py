"""Names of a plan's children, derived from the plan alone so that a restarted operator finds them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainwright.layer import Dtype
from trainwright_operator.api import GROUP
from trainwright_operator.api.spec import AUTO, TrainingPlanSpec

PLAN_UID_LABEL: Final = f"{GROUP}/plan-uid"
PLAN_LABEL: Final = f"{GROUP}/plan"
PLAN_ANNOTATION: Final = PLAN_LABEL
"""Annotation of a gang's objects and pods: namespace and name of the plan, with a slash between them."""
GANG_LABEL: Final = f"{GROUP}/gang"
ROLE_LABEL: Final = f"{GROUP}/role"
RENDEZVOUS_LABEL: Final = f"{GROUP}/rendezvous"
LOG_LABEL: Final = f"{GROUP}/log"
"""Label of pods whose logs are read, besides the one that hosts the rendezvous."""
HANDED_OVER_LABEL: Final = f"{GROUP}/handed-over-by"
"""Label of a job that a plan handed over, and of its pods: the plan's name. They have no label of the plan's gangs, so that
no version of the operator takes them for one."""
HANDED_OVER_ANNOTATION: Final = f"{GROUP}/plan-uid"
"""Annotation of the same objects: the plan's uid."""
OWNED_ANNOTATION: Final = f"{GROUP}/owned"
"""Annotation of such a job that its plan owns, which stays where somebody deletes the plan and orphans what it owns."""
TASK_SUFFIX: Final = "-order"
"""End of the names of ConfigMaps with tasks, which hold the secrets of gangs."""
PLACEMENT_GATE: Final = f"{GROUP}/placement"
JOBS_CREATED_ANNOTATION: Final = f"{GROUP}/jobs-created-at"
JOB_END_ANNOTATION: Final = f"{GROUP}/job-end"
"""Annotation of the record of a plan's own job: why it ends or ended, when that was decided, and more words."""
HELD_SINCE_ANNOTATION: Final = f"{GROUP}/held-since"
"""Annotation of the same record: since when the job's pods hold devices."""
HELD_BEFORE_ANNOTATION: Final = f"{GROUP}/held-seconds"
"""Annotation of the same record: for how many seconds they did before that."""
PINNED_ANNOTATION: Final = f"{GROUP}/pinned-at"
PLACED_ANNOTATION: Final = f"{GROUP}/placed-at"
SEARCH_STARTED_ANNOTATION: Final = f"{GROUP}/search-started"
"""Annotation of the cluster document: the search's last start, its number, and the generation and request."""
MEASUREMENT_LABEL: Final = f"{GROUP}/measurement"
"""Label of a kept measurement: `profile` or `links`. Its name begins with the same word."""
MEASURED_BY_LABEL: Final = f"{GROUP}/measured-by"
ACCELERATOR_LABEL: Final = f"{GROUP}/accelerator"
DTYPE_LABEL: Final = f"{GROUP}/dtype"
TENSOR_DEGREE_LABEL: Final = f"{GROUP}/tensor-degree"
EXPIRES_ANNOTATION: Final = f"{GROUP}/expires-at"
"""Annotation of a kept measurement: when the operator deletes it."""
EMULATION_ANNOTATION: Final = f"{GROUP}/emulation"
REHEARSE_FAULT_ANNOTATION: Final = f"{GROUP}/rehearse-fault"
"""Annotation of a TrainingPlan that injects faults: `candidate-1=crash` (or hang, mute), comma-separated."""

DOCUMENT_KEY: Final = "document.json"
"""Key of the document in a ConfigMap."""
MAX_JOB_NAME_LENGTH: Final = 52
"""Length limit, because a PyTorchJob's pod is named `<job>-worker-<index>` within the 63 characters of a host name, and
a JobSet's `<job>-<replicated job>-0-<index>-<five characters>`."""
_FIRST_DTYPE: Final = "float32"
"""Former default of training.dtype, absent from the names of plans that have it."""
_PLAN_PART_LENGTH: Final = 26
_IDENTITY_LENGTH: Final = 8
_IDENTITIES: Final = 16**_IDENTITY_LENGTH
_HEXADECIMAL: Final = re.compile(rf"[0-9a-f]{{{_IDENTITY_LENGTH}}}")
_NON_IDENTITY_FIELDS: Any = {
    "apply": True,
    "job": True,
    "launcher": True,
    "priority": True,
    "queue_priority_class": True,
    "replan": True,
    "settling_seconds": True,
    "suspend": True,
    "ttl_seconds_after_finished": True,
    "wait_deadline_seconds": True,
    "links": {"deadline_seconds": True, "max_age_seconds": True},
    "profiling": {"deadline_seconds": True, "max_age_seconds": True},
    "trials": {
        "top_k": True,
        "per_gang": True,
        "timeline": True,
        "max_failed": True,
        "max_device_hours": True,
        "run_deadline_seconds": True,
        "pending_deadline_seconds": True,
        "stop_when_regret_below": True,
        "framework": True,
    },
}
"""Fields that the user may change without invalidating measurements."""


def _base(plan_name: str, unique: str) -> str:
    """Return a short name that starts with a letter and is unique for the text."""
    part = re.sub(r"[^a-z0-9]+", "-", plan_name.lower()).strip("-")[:_PLAN_PART_LENGTH].strip("-")
    if not part[:1].isalpha():
        part = f"p{part}"[:_PLAN_PART_LENGTH]
    return f"{part}-{hashlib.sha256(unique.encode()).hexdigest()[:_IDENTITY_LENGTH]}"


def handover_name(plan_name: str, plan_uid: str) -> str:
    """Return the name of the job that a plan hands over, the same whatever its spec asks for: there is one."""
    return f"{_base(plan_name, plan_uid)}-job"


def is_handover_name(name: str, plan_uid: str) -> bool:
    """Return whether an object with this name is of the job of the plan with that uid; copies have other names."""
    ending = handover_name("p", plan_uid).removeprefix("p")
    return re.fullmatch(rf".+{re.escape(ending)}(-\d+)?", name) is not None


@dataclass(frozen=True, slots=True)
class Names:
    """Names of one plan's children; `base` is short, starts with a letter and is unique for each plan and identity.

    Attributes:
        revision: number of the discovery that the children belong to, from 1.
        first_base: base of the first revision, which the discoveries of all revisions are named after.
    """

    base: str
    revision: int = 1
    first_base: str = ""

    @classmethod
    def of(cls, plan_name: str, plan_uid: str, spec: TrainingPlanSpec) -> Names:
        """Return the names for the plan's current spec: a changed image or iteration count changes all names."""
        # Exclude defaults, so that a version with a new field finds older measurements.
        identity = spec.model_dump(mode="json", exclude=_NON_IDENTITY_FIELDS, exclude_defaults=True)
        if identity["training"].get("dtype") == _FIRST_DTYPE:
            del identity["training"]["dtype"]
        elif spec.training.dtype == AUTO:
            identity["training"]["dtype"] = AUTO
        question = json.dumps(
            {name: part for name, part in identity.items() if part or name not in _NON_IDENTITY_FIELDS}
        )
        base = _base(plan_name, f"{plan_uid}\n{question}")
        return cls(base, first_base=base)

    def at_revision(self, number: int) -> Names:
        """Return the names of the children of another revision: the identity of each is one higher than the last one's."""
        part, _, first = self.first_base.rpartition("-")
        identity = (int(first, 16) + number - 1) % _IDENTITIES
        return Names(f"{part}-{identity:0{_IDENTITY_LENGTH}x}", number, self.first_base)

    def at_present(self, stored: Iterable[str]) -> Names:
        """Return the names of the present revision, the last one whose discovery is among the stored ConfigMaps."""
        prefix = f"{self.first_base}-discovery-"
        numbers = (name.removeprefix(prefix) for name in stored if name.startswith(prefix))
        return self.at_revision(max((int(number) for number in numbers if number.isdecimal()), default=1))

    def child(self, suffix: str) -> str:
        """Return the name of a child."""
        return f"{self.base}-{suffix}"

    def owns(self, name: str) -> bool:
        """Return whether a child's name has this base."""
        return name.startswith(f"{self.base}-")

    def revision_of(self, name: str) -> int | None:
        """Return the revision, up to this one, whose base a child's name has, or None."""
        part, _, first = self.first_base.rpartition("-")
        identity = name[len(part) + 1 :][:_IDENTITY_LENGTH]
        if not name.startswith(f"{part}-") or not _HEXADECIMAL.fullmatch(identity):
            return None
        number = (int(identity, 16) - int(first, 16)) % _IDENTITIES + 1
        return number if number <= self.revision else None

    def job(self, gang: str, shape: int) -> str:
        """Return the name of a gang's PyTorchJob with that number, of which the first hosts the rendezvous, or of its JobSet."""
        name = self.child(gang if shape == 0 else f"{gang}-s{shape}")
        if len(name) > MAX_JOB_NAME_LENGTH:
            raise ValueError(f"the job name {name} has more than {MAX_JOB_NAME_LENGTH} characters")
        return name

    def task(self, gang: str) -> str:
        """Return the name of the ConfigMap with a gang's task."""
        return self.child(f"{gang}{TASK_SUFFIX}")

    def result(self, gang: str) -> str:
        """Return the name of the ConfigMap with a gang's result."""
        return self.child(f"{gang}-result")

    def attempt(self, gang: str, number: int) -> str:
        """Return the name of the ConfigMap about a gang's attempt that the cluster ended."""
        return self.child(f"{gang}-attempt-{number}")

    @property
    def discovery(self) -> str:
        name = f"{self.first_base}-discovery"
        return name if self.revision == 1 else f"{name}-{self.revision}"

    @property
    def cluster(self) -> str:
        return self.child("cluster")

    @property
    def profiles(self) -> str:
        return self.child("profiles")

    def profiles_in(self, dtype: Dtype) -> str:
        """Return the name of the ConfigMap with the profiles of a further number format."""
        return self.child(f"profiles-{dtype}")

    def candidates(self, top_k: int) -> str:
        """Return the name of the ConfigMap with the candidates, which depend on topK."""
        return self.child(f"candidates-{top_k}")
