"""What a search is asked and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from trainwright.cluster import Cluster
from trainwright.cost.estimate import Estimate
from trainwright.cost.setting import Setting
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.training import Optimizer


class NoFeasiblePlan(ValueError):  # noqa: N818 - an answer in words, not a defect
    """No plan of the search can run; the message says why."""


@dataclass(frozen=True)
class Problem:
    """Everything that a search may look at.

    Attributes:
        global_batch_size: rows of one iteration (AMP's gbs).
        max_tensor_degree: the largest tensor degree that a plan may use; None leaves it to the model and the profiles.
    """

    cluster: Cluster
    model: Model
    profiles: Profiles
    global_batch_size: int
    max_tensor_degree: int | None = None
    optimizer: Optimizer = "adam"

    def __post_init__(self) -> None:
        if self.global_batch_size < 1:
            raise ValueError(f"global_batch_size must be at least 1, got {self.global_batch_size}")
        if self.max_tensor_degree is not None and self.max_tensor_degree < 1:
            raise ValueError(f"max_tensor_degree must be at least 1, got {self.max_tensor_degree}")

    @cached_property
    def setting(self) -> Setting:
        """What the cost model needs of it."""
        return Setting(self.model, self.cluster, self.profiles, self.optimizer)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan with its estimate."""

    plan: Plan
    estimate: Estimate


class Search(Protocol):
    """Finds feasible candidates, best first, no plan twice. Raises NoFeasiblePlan where there is none."""

    def __call__(self, problem: Problem) -> list[Candidate]: ...
