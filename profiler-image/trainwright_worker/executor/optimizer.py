"""Optimizer update, gradient norm, clipping and loss scaling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainwright_worker.executor.flat_parameter import FlatParameter, WeightPart


@dataclass(frozen=True)
class GradientScaling:
    """Scaling of gradients inside the optimizer's kernel: no pass over them before, and no wait for their norm.

    Attributes:
        divisor: what gradients are divided by, float32 of shape ().
        overflow: 1 where the update is skipped, since a gradient is infinite or NaN, or the batch weighs nothing, else 0;
            float32 of shape ().
    """

    divisor: Tensor
    overflow: Tensor

    @classmethod
    def of(
        cls, norm: Tensor, loss_scale: float, limit: float | None, weight_per_row: Tensor | None = None
    ) -> GradientScaling:
        """Return the scaling that undoes the loss scale, divides by the weight, and then clips to a limit; None: no clipping.

        `norm` is that of all gradients as they are, scaled, of shape (). `weight_per_row` is that of the whole batch.
        """
        divisor, skips = torch.full_like(norm, loss_scale), ~norm.isfinite()
        if weight_per_row is not None:
            weighs_nothing = weight_per_row == 0
            divisor, skips = torch.where(weighs_nothing, 1.0, weight_per_row) * divisor, skips | weighs_nothing
        if limit is not None:
            divisor = torch.maximum(divisor, norm / limit)
        return cls(divisor.float(), skips.float())


class Optimizer(ABC):
    """Optimizer that updates each rank's master shards in place.

    Attributes:
        name: name of the optimizer in checkpoints.
        updates: number of updates so far, which the executor counts, since the device may skip one.
    """

    name: str

    def __init__(self, flat_parameters: Sequence[FlatParameter]) -> None:
        self.flat_parameters = tuple(flat_parameters)
        self.updates = 0

    @property
    @abstractmethod
    def counts_updates(self) -> bool:
        """Return whether an update depends on the number of those before, which is one for all weights."""

    def begin_resuming(self, *, has_states: bool) -> None:
        """Make room for the states of a checkpoint, if it has some. The weights are read after this, too."""
        del has_states  # the worker's own optimizers always have them
        self.updates = 0

    def resume(self, updates: int) -> None:
        """Continue after `updates` updates, whose results the states already hold."""
        self.updates = updates

    @property
    def resident_tensors(self) -> list[Tensor]:
        """Weights, gradients and optimizer state: tensors that persist between iterations."""
        tensors = [tensor for flat_parameter in self.flat_parameters for tensor in flat_parameter.resident_tensors]
        return tensors + self.state_tensors

    @property
    @abstractmethod
    def state_tensors(self) -> list[Tensor]:
        """All states."""

    @abstractmethod
    def states_of(self, number: int, part: WeightPart) -> dict[str, Tensor]:
        """Return the states of a part of the number-th flat parameter, by their names in checkpoints.

        Those with a value for each of the part's are flat; others belong to the weight as a whole.
        """

    @abstractmethod
    def step(self, scaling: GradientScaling | None) -> None:
        """Update the master weights with the reduced gradients, which become the scaled ones."""


class FusedOptimizer(Optimizer):
    """Optimizer of torch's fused kernels, one call for a flat parameter.

    The results equal torch.optim's, whose construction loads torch's compiler: seconds per process.

    Attributes:
        state_names: names of the state tensors of one flat parameter.
        states: `[flat parameter][state name]` tensors.
    """

    state_names: ClassVar[tuple[str, ...]]

    def __init__(self, flat_parameters: Sequence[FlatParameter], learning_rate: float) -> None:
        super().__init__(flat_parameters)
        self.learning_rate = learning_rate
        self.states = [
            [torch.zeros_like(flat_parameter.master_shard) for _ in self.state_names]
            for flat_parameter in flat_parameters
        ]

    def begin_resuming(self, *, has_states: bool) -> None:
        super().begin_resuming(has_states=has_states)
        for state in self.state_tensors:
            state.zero_()

    @property
    def state_tensors(self) -> list[Tensor]:
        """All states."""
        return [state for states in self.states for state in states]

    def states_of(self, number: int, part: WeightPart) -> dict[str, Tensor]:
        """Return the states of a part, flat."""
        return {name: part.of(state) for name, state in zip(self.state_names, self.states[number], strict=True)}


class Sgd(FusedOptimizer):
    """Stochastic gradient descent with momentum 0.9: one state value per parameter."""

    name = "sgd"
    state_names = ("momentum",)
    counts_updates = False
    _MOMENTUM = 0.9

    @torch.no_grad()
    def step(self, scaling: GradientScaling | None) -> None:
        for flat_parameter, states in zip(self.flat_parameters, self.states, strict=True):
            torch._fused_sgd_(
                [flat_parameter.master_shard],
                [require_summed_gradient(flat_parameter)],
                states,
                lr=self.learning_rate,
                momentum=self._MOMENTUM,
                dampening=0.0,
                weight_decay=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                **_kernel_arguments(scaling),
            )


class Adam(FusedOptimizer):
    """Adam (Kingma and Ba, 2015, Algorithm 1): two state values per parameter."""

    name = "adam"
    state_names = ("mean", "square")
    counts_updates = True
    _DECAYS = (0.9, 0.999)
    _EPSILON = 1e-8

    def __init__(self, flat_parameters: Sequence[FlatParameter], learning_rate: float) -> None:
        super().__init__(flat_parameters, learning_rate)
        self.steps = [torch.zeros((), device=flat_parameter.master_shard.device) for flat_parameter in flat_parameters]

    def resume(self, updates: int) -> None:
        super().resume(updates)
        for steps in self.steps:
            steps.fill_(updates)

    @torch.no_grad()
    def step(self, scaling: GradientScaling | None) -> None:
        for flat_parameter, (mean, square), steps in zip(self.flat_parameters, self.states, self.steps, strict=True):
            steps.add_(1 if scaling is None else 1 - scaling.overflow)
            torch._fused_adam_(
                [flat_parameter.master_shard],
                [require_summed_gradient(flat_parameter)],
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
                **_kernel_arguments(scaling),
            )


def _kernel_arguments(scaling: GradientScaling | None) -> dict[str, Tensor]:
    return {} if scaling is None else {"grad_scale": scaling.divisor, "found_inf": scaling.overflow}


OPTIMIZERS: dict[str, type[FusedOptimizer]] = {optimizer.name: optimizer for optimizer in (Adam, Sgd)}
"""Optimizers by name."""


def make_optimizer(name: str, flat_parameters: Sequence[FlatParameter], learning_rate: float) -> FusedOptimizer:
    return OPTIMIZERS[name](flat_parameters, learning_rate)


def require_summed_gradient(flat_parameter: FlatParameter) -> Tensor:
    """Return the reduced gradient. Raises RuntimeError if it was not reduced in this iteration."""
    if flat_parameter.gradient_shard is None:
        raise RuntimeError("the optimizer step needs reduced gradients")
    return flat_parameter.gradient_shard


_NORM_CHUNK = 2**22
"""Values whose norm is taken at once: where the norm converts its input to float64, as on the CPU, 32 MiB at a time."""


@dataclass(frozen=True)
class SquaredNorm:
    """Flat parameter and the values that this rank counts in the norm, such that over all ranks each value counts once.

    Attributes:
        includes_split: whether it counts values that the tensor degree splits.
        includes_unsplit: whether it counts the others, which every rank of a tensor group holds.
    """

    flat_parameter: FlatParameter
    includes_split: bool
    includes_unsplit: bool

    def square_sum(self) -> Tensor:
        """Return the square sum of this rank's shard of the reduced gradient, shape ()."""
        gradient = require_summed_gradient(self.flat_parameter)
        split_end = min(max(self.flat_parameter.split_size - self.flat_parameter.shard_start, 0), len(gradient))
        total = torch.zeros((), dtype=torch.float64, device=gradient.device)
        for counts, values in (
            (self.includes_split, gradient[:split_end]),
            (self.includes_unsplit, gradient[split_end:]),
        ):
            if counts and len(values):
                parts = torch.split(values, _NORM_CHUNK)
                norms = torch._foreach_norm(parts, 2, dtype=torch.float64)  # noqa: SLF001 (reads each value once on a GPU)
                total += torch.stack(norms).square().sum()
        return total


class LossScale:
    """Dynamic loss scale for float16: halves on overflow, doubles after iterations without one.

    It is equal on all ranks, since all of them see the same norm.

    Attributes:
        quiet_iterations: iterations since the factor last changed.
    """

    INITIAL_FACTOR = 2.0**16
    GROWTH_INTERVAL = 2000

    def __init__(self, *, active: bool) -> None:
        self.active = active
        self.factor = self.INITIAL_FACTOR if active else 1.0
        self.quiet_iterations = 0

    def resume(self, factor: float | None, quiet_iterations: int) -> None:
        """Continue with an earlier run's scale; None if that run did not scale."""
        if self.active and factor is not None:
            self.factor, self.quiet_iterations = factor, quiet_iterations

    def update(self, *, overflowed: bool, weight_per_row: float = 1.0) -> None:
        """Adjust the factor after an iteration.

        It scales sums of losses over the rows: where a row weighs more than 1, it begins to adapt from that of the mean.
        """
        if not self.active:
            return
        self.quiet_iterations = 0 if overflowed else self.quiet_iterations + 1
        if overflowed:
            per_row = max(weight_per_row, 1.0)
            self.factor = max(1.0 / per_row, min(self.factor / 2, self.INITIAL_FACTOR / per_row))
        elif self.quiet_iterations == self.GROWTH_INTERVAL:
            self.factor, self.quiet_iterations = self.factor * 2, 0


class GradientNorm:
    """Norm of all reduced gradients over all ranks of a plan."""

    def __init__(
        self, squared_norms: Sequence[SquaredNorm], group: dist.ProcessGroup | None, device: torch.device
    ) -> None:
        self._squared_norms, self._group, self._device = squared_norms, group, device

    def compute(self) -> Tensor:
        """Return the norm of the gradients as they are, scaled or not, shape (); infinite or NaN if a gradient is."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for norm in self._squared_norms:
            total += norm.square_sum()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total.sqrt()
