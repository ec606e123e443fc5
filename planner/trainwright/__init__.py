"""Trainwright's planner: finds the placement and the parallel degrees that train a model fastest on given devices.

A library of pure functions on plain data, which knows neither Kubernetes nor torch. The names below are its surface; each
loads its module when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainwright.answer import Answer
    from trainwright.answer.sizing import Size
    from trainwright.calibration import Fit, Trial, Trials
    from trainwright.cluster import Cluster
    from trainwright.library import (
        ask,
        calibrate,
        cluster_of,
        estimate,
        explain,
        export,
        find_plans,
        plan_in_words,
        problem,
        read,
        read_config,
        size,
    )
    from trainwright.plan import Plan
    from trainwright.profiles import Profiles
    from trainwright.runtime import Runtime
    from trainwright.search import Candidate, Limits, NoFeasiblePlan, Objective, Problem
    from trainwright.training import Training

    __version__: str

_PLACES: Final = {
    "answer": ("Answer",),
    "answer.sizing": ("Size",),
    "calibration": ("Fit", "Trial", "Trials"),
    "cluster": ("Cluster",),
    "library": (
        "ask",
        "calibrate",
        "cluster_of",
        "estimate",
        "explain",
        "export",
        "find_plans",
        "plan_in_words",
        "problem",
        "read",
        "read_config",
        "size",
    ),
    "plan": ("Plan",),
    "profiles": ("Profiles",),
    "runtime": ("Runtime",),
    "search": ("Candidate", "Limits", "NoFeasiblePlan", "Objective", "Problem"),
    "training": ("Training",),
}
_MODULES: Final = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Answer",
    "Candidate",
    "Cluster",
    "Fit",
    "Limits",
    "NoFeasiblePlan",
    "Objective",
    "Plan",
    "Problem",
    "Profiles",
    "Runtime",
    "Size",
    "Training",
    "Trial",
    "Trials",
    "__version__",
    "ask",
    "calibrate",
    "cluster_of",
    "estimate",
    "explain",
    "export",
    "find_plans",
    "plan_in_words",
    "problem",
    "read",
    "read_config",
    "size",
]


def __getattr__(name: str) -> Any:
    """Load a name of the surface: most users of the package need few of its modules."""
    if name == "__version__":
        return version("trainwright")
    if name not in _MODULES:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}")
    return getattr(import_module(f"trainwright.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the names of the surface."""
    return __all__
