"""Weights and gradients in flat buffers: one all-reduce sums a buffer's gradients, one pass updates its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class ParameterBuffer:
    """Several parameters side by side; each of them sees its part of the buffer as its data and its gradient.

    Micro-batches add to the gradients, one all-reduce sums them. Each replica's loss is a sum over its own rows
    divided by the tokens of the global batch, so replicas with unequal rows need nothing but the plain sum.

    Attributes:
        contributes: whether this rank's gradients count; owners that hold the same ones as another give zeros.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None = None, *, contributes: bool = True
    ) -> None:
        self._group = group
        self._contributes = contributes
        self.values = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self.gradients = torch.zeros_like(self.values)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.data = self.values[start:stop].view(parameter.shape)
            parameter.grad = self.gradients[start:stop].view(parameter.shape)
            start = stop

    def clear(self) -> None:
        self.gradients.zero_()

    def reduce(self) -> None:
        """Sum the gradients over the group; afterwards every member holds those of the whole batch."""
        if self._group is None:
            return
        if not self._contributes:
            self.gradients.zero_()
        dist.all_reduce(self.gradients, group=self._group)


class Optimizer(ABC):
    """Updates whole buffers in place by torch's fused operations: each value is read and written once.

    They compute what torch.optim computes. That one loads torch's compiler when it is made, which costs seconds a
    process.
    """

    def __init__(self, buffers: Sequence[ParameterBuffer], learning_rate: float, states: int) -> None:
        self.learning_rate = learning_rate
        self.buffers = tuple(buffers)
        self.states = [[torch.zeros_like(buffer.values) for _ in range(states)] for buffer in buffers]

    def held_tensors(self) -> list[Tensor]:
        """Weights, gradients and optimizer state: what lives through an iteration."""
        held = [tensor for buffer in self.buffers for tensor in (buffer.values, buffer.gradients)]
        return held + [state for states in self.states for state in states]

    @abstractmethod
    def step(self) -> None:
        """Update every weight by its gradient."""


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum 0.9: one further value a parameter."""

    _MOMENTUM = 0.9

    def __init__(self, buffers: Sequence[ParameterBuffer], learning_rate: float) -> None:
        super().__init__(buffers, learning_rate, states=1)

    @torch.no_grad()
    def step(self) -> None:
        for buffer, states in zip(self.buffers, self.states, strict=True):
            torch._fused_sgd_(
                [buffer.values],
                [buffer.gradients],
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

    _DECAYS = (0.9, 0.999)
    _EPSILON = 1e-8

    def __init__(self, buffers: Sequence[ParameterBuffer], learning_rate: float) -> None:
        super().__init__(buffers, learning_rate, states=2)
        self._steps = [torch.zeros((), device=buffer.values.device) for buffer in buffers]

    @torch.no_grad()
    def step(self) -> None:
        for buffer, (mean, square), steps in zip(self.buffers, self.states, self._steps, strict=True):
            steps.add_(1)
            torch._fused_adam_(
                [buffer.values],
                [buffer.gradients],
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


def make_optimizer(name: str, buffers: Sequence[ParameterBuffer], learning_rate: float) -> Optimizer:
    return Adam(buffers, learning_rate) if name == "adam" else Sgd(buffers, learning_rate)
