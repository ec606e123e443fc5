"""The pods that an order is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainwright.cluster import Emulation


@dataclass(frozen=True, slots=True)
class GangNode:
    """A node of a gang: one pod with one process per slot."""

    name: str
    slots: tuple[int, ...]
    accelerator: str

    def __post_init__(self) -> None:
        if not self.slots or tuple(sorted(set(self.slots))) != self.slots:
            raise ValueError(f"node {self.name}: slots must be ascending and not empty, got {list(self.slots)}")


@dataclass(frozen=True, slots=True)
class Gang:
    """The pods that start together: one for each node, the first one hosts the rendezvous.

    Attributes:
        emulations: device tables by accelerator, for the emulated ones alone; empty on real devices.
        backend: `nccl` where the devices are GPUs, `gloo` else.
        collective_timeout_seconds: a collective that takes longer means that a peer hangs.
        deadline_seconds: the whole order; the worker gives up by itself then, with stacks.
    """

    nodes: tuple[GangNode, ...]
    backend: Literal["gloo", "nccl"] = "gloo"
    emulations: tuple[tuple[str, Emulation], ...] = ()
    collective_timeout_seconds: float = 120.0
    deadline_seconds: float = 900.0

    @property
    def is_emulated(self) -> bool:
        """Whether devices are emulated: then nodes share a machine, and its processors."""
        return bool(self.emulations)

    def accelerator_of(self, node: str) -> str:
        """The accelerator of a node of the gang."""
        return next(one.accelerator for one in self.nodes if one.name == node)

    def emulation_of(self, accelerator: str) -> Emulation | None:
        """The device table of an accelerator, or None where its speed is its own."""
        return dict(self.emulations).get(accelerator)
