"""Updates of the weights by their summed gradients, unit by unit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from trainwright_worker.executor.unit import Unit


class Optimizer(ABC):
    """Updates each unit's part in place by torch's fused operations: every value is read and written once.

    They compute what torch.optim computes. That one loads torch's compiler when it is made, which costs seconds a
    process.

    Attributes:
        state_names: what lives of a unit from one update to the next.
        states: the tensors of these names, of each unit.
        updates: how many there were.
    """

    state_names: ClassVar[tuple[str, ...]]

    def __init__(self, units: Sequence[Unit], learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.units = tuple(units)
        self.states = [[torch.zeros_like(unit.master) for _ in self.state_names] for unit in units]
        self.updates = 0

    def resume(self, updates: int) -> None:
        """Go on behind so many updates, of which `states` are what they left."""
        self.updates = updates

    @property
    def held_tensors(self) -> list[Tensor]:
        """Weights, gradients and optimizer state: what lives between iterations."""
        held = [tensor for unit in self.units for tensor in unit.held_tensors]
        return held + [state for states in self.states for state in states]

    @abstractmethod
    def step(self) -> None:
        """Update every unit's master weights by its summed gradient."""


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum 0.9: one further value a parameter."""

    state_names = ("momentum",)
    _MOMENTUM = 0.9

    @torch.no_grad()
    def step(self) -> None:
        self.updates += 1
        for unit, states in zip(self.units, self.states, strict=True):
            torch._fused_sgd_(
                [unit.master],
                [summed(unit)],
                states,
                lr=self.learning_rate,
                momentum=self._MOMENTUM,
                dampening=0.0,
                weight_decay=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
            )


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015, Algorithm 1): two further values a parameter."""

    state_names = ("mean", "square")
    _DECAYS = (0.9, 0.999)
    _EPSILON = 1e-8

    def __init__(self, units: Sequence[Unit], learning_rate: float) -> None:
        super().__init__(units, learning_rate)
        self.steps = [torch.zeros((), device=unit.master.device) for unit in units]

    def resume(self, updates: int) -> None:
        super().resume(updates)
        for steps in self.steps:
            steps.fill_(updates)

    @torch.no_grad()
    def step(self) -> None:
        self.updates += 1
        for unit, (mean, square), steps in zip(self.units, self.states, self.steps, strict=True):
            steps.add_(1)
            torch._fused_adam_(
                [unit.master],
                [summed(unit)],
                [mean],
                [square],
                [],
                [steps],
                lr=self.learning_rate,
                beta1=self._DECAYS[0],
                beta2=self._DECAYS[1],
                weight_decay=0.0,
                eps=self._EPSILON,
                amsgrad=False,
                maximize=False,
            )


def make_optimizer(name: str, units: Sequence[Unit], learning_rate: float) -> Optimizer:
    return Adam(units, learning_rate) if name == "adam" else Sgd(units, learning_rate)


def summed(unit: Unit) -> Tensor:
    """The unit's summed gradient. Raises RuntimeError where it was not summed in this iteration."""
    if unit.gradient is None:
        raise RuntimeError("an update came before the gradients were summed")
    return unit.gradient
