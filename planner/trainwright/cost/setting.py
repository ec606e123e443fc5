"""What every cost depends on beside the plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainwright.cluster import Cluster
from trainwright.cost.collectives import Fabric, fabric
from trainwright.layer import LayerKind
from trainwright.model import Model
from trainwright.profiles import LayerCost, Profiles
from trainwright.runtime import Runtime
from trainwright.training import Optimizer


@dataclass(frozen=True)
class Setting:
    """The model, the devices and links that train it, and what its layers cost there."""

    model: Model
    cluster: Cluster
    profiles: Profiles
    optimizer: Optimizer = "adam"
    runtime: Runtime = field(default_factory=Runtime)

    @property
    def fabric(self) -> Fabric:
        return fabric(self.cluster)

    def layer_cost(self, accelerator: str, kind: LayerKind, tensor: int, rows: int) -> LayerCost:
        """Cost of one layer; kinds that are not tensor parallel are computed whole by every rank of the tensor group."""
        return self.profiles.cost(accelerator, kind.name, tensor if kind.is_tensor_parallel else 1, rows)
