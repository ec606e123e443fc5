"""Torch's own optimizers, or a user's, on the parts of the weights that a rank updates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from trainwright.plan import Plan
from trainwright_worker.device import read_value
from trainwright_worker.executor.flat_parameter import FlatParameter, WeightPart, publish_updates
from trainwright_worker.executor.optimizer import GradientScaling, Optimizer, require_summed_gradient

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer of groups of parameters, as torch's classes do: `partial(torch.optim.AdamW, lr=3e-4)`."""

Options = Mapping[str, Any]

STEP: Final = "step"
TORCH_STATES: Final = {"mean": "exp_avg", "square": "exp_avg_sq", "momentum": "momentum_buffer"}
"""Names in torch's optimizers of the states of the worker's own."""

_CHECKPOINT_NAMES: Final = {torch_name: name for name, torch_name in TORCH_STATES.items()}
_OWN_NAMES: Final = {"Adam": "adam", "AdamW": "adam", "SGD": "sgd"}
"""Names of torch's optimizers that have the states of the worker's own."""


@dataclass(frozen=True, slots=True)
class OptimizerChoice:
    """Optimizer of a user's training.

    Attributes:
        options: returns those of a weight, given its name and shape; weights with equal options are one group.
    """

    make: MakeOptimizer
    options: Callable[[str, tuple[int, ...]], Options] = lambda _name, _shape: {}


class TorchOptimizer(Optimizer):
    """Torch optimizer that updates a rank's parts of the weights: in their shapes where a part is the weight, else flat.

    Raises ValueError if an update of a part needs other values than the part's.
    """

    def __init__(
        self, flat_parameters: Sequence[FlatParameter], choice: OptimizerChoice, plan: Plan, device: torch.device
    ) -> None:
        super().__init__(flat_parameters)
        self._parts: list[tuple[FlatParameter, WeightPart, nn.Parameter]] = []
        self._parameters: dict[tuple[int, str], nn.Parameter] = {}
        groups: list[dict[str, Any]] = []
        options_of_groups: list[Options] = []
        for number, flat_parameter in enumerate(self.flat_parameters):
            for part in flat_parameter.own_parts:
                parameter = nn.Parameter(_shaped(part.of(flat_parameter.master_shard), part))
                self._parts.append((flat_parameter, part, parameter))
                self._parameters[number, part.weight.name] = parameter
                options = choice.options(part.weight.name, part.weight.full_shape)
                if options not in options_of_groups:
                    options_of_groups.append(options)
                    groups.append({"params": [], **options})
                groups[options_of_groups.index(options)]["params"].append(parameter)
        checks = [_UpdateCheck(choice.make, options, device) for options in options_of_groups or [{}]]
        for check in checks:
            check.run(plan)
        self.name = _OWN_NAMES.get(checks[0].name, checks[0].name)
        self._optimizer = choice.make(groups) if groups else None
        self._rates = [group.get("lr") for group in self.groups]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Groups of the parameters of this rank, as torch's optimizers have them."""
        return [] if self._optimizer is None else self._optimizer.param_groups

    def scale_rates(self, factor: float) -> None:
        """Set the learning rate of each group to its first one times a factor."""
        for group, rate in zip(self.groups, self._rates, strict=True):
            if rate is None:
                raise ValueError(
                    f"{self.name} has no learning rate (lr) for a schedule to scale; leave out the schedule"
                )
            group["lr"] = rate * factor

    def exchange(self, name: str) -> None:
        """Exchange the weights and a state with a value for each of theirs, and publish the weights."""
        for _, _, parameter in self._parts:
            state = self._state_of(parameter)
            values = state.get(name)
            if not isinstance(values, Tensor) or values.shape != parameter.shape:
                raise ValueError(
                    f"{self.name} has no state {name} of the shape of the weights; it has {', '.join(state) or 'none'}"
                )
            weight = parameter.detach()
            kept = weight.clone()
            weight.copy_(values)
            values.copy_(kept)
        publish_updates(self.flat_parameters)

    def begin_resuming(self, *, has_states: bool) -> None:
        """Make room for states: torch's optimizers make them in their first update, here one with gradients of 0."""
        super().begin_resuming(has_states=has_states)
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        if has_states:
            for _, _, parameter in self._parts:
                parameter.grad = torch.zeros_like(parameter)
            self._update(self._optimizer)

    def resume(self, updates: int) -> None:
        """Continue after `updates` updates, whose results the states already hold."""
        super().resume(updates)
        for state in self._states:
            steps = state.get(STEP)
            if isinstance(steps, Tensor):
                steps.fill_(updates)
            elif steps is not None:
                state[STEP] = updates

    @property
    def counts_updates(self) -> bool:
        return any(STEP in state for state in self._states)

    @property
    def _states(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else list(self._optimizer.state.values())

    @property
    def state_tensors(self) -> list[Tensor]:
        """All states."""
        return [value for state in self._states for value in state.values() if isinstance(value, Tensor)]

    def states_of(self, number: int, part: WeightPart) -> dict[str, Tensor]:
        """Return the states of a part, but for the number of updates, which every checkpoint has once."""
        parameter = self._parameters[number, part.weight.name]
        return {
            _CHECKPOINT_NAMES.get(name, name): value.view(-1) if value.shape == parameter.shape else value
            for name, value in self._state_of(parameter).items()
            if name != STEP and isinstance(value, Tensor)
        }

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return the states of a parameter, none before its first update."""
        return {} if self._optimizer is None else self._optimizer.state.get(parameter, {})

    def step(self, scaling: GradientScaling | None) -> None:
        """Update the master weights with the reduced gradients, which become the scaled ones."""
        if self._optimizer is None or (scaling is not None and read_value(scaling.overflow)):
            return
        gradients = [_shaped(part.of(require_summed_gradient(of)), part) for of, part, _ in self._parts]
        if scaling is not None:
            torch._foreach_div_(gradients, scaling.divisor)
        for (_, _, parameter), gradient in zip(self._parts, gradients, strict=True):
            parameter.grad = gradient
        self._update(self._optimizer)

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            optimizer.step()
        for _, _, parameter in self._parts:
            parameter.grad = None


def _shaped(values: Tensor, part: WeightPart) -> Tensor:
    """Return values of a part in the shape of the weight, if they are all of it."""
    is_whole = part.stop - part.first == part.weight.parameter.numel()
    return values.view(part.weight.parameter.shape) if is_whole else values


_States = Sequence[tuple[torch.Size, Mapping[str, Any]]]
"""Shapes of parameters, and their states."""


class _UpdateCheck:
    """Updates of random weights, which must be the same where each rank updates some of them.

    Attributes:
        name: class of the optimizer.
    """

    _ITERATIONS = 3
    _RATE = 1e-2
    _TOLERANCE = 1e-3  # of the largest change of a weight, whose rounding is 1e-5 of that

    def __init__(self, make: MakeOptimizer, options: Options, device: torch.device) -> None:
        self._make, self._options, self._device = make, options, device
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(self._ITERATIONS + 1, 64, 128, generator=generator)
        values[1:] *= torch.logspace(-2, 1, 64)[:, None]  # the halves have other norms
        self._weights, *self._gradients = values.flatten(1).to(device)
        self.name = type(self._made([nn.Parameter(self._weights.view(64, 128))])).__name__

    def _made(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return self._make([{"params": parameters, **self._options}])

    def run(self, plan: Plan) -> None:
        """Raise ValueError if a rank of the plan cannot update its weights, or parts of them, without those of other ranks."""
        divides = any(
            stage.operators is not None or any(run.strategy.divides_weights for run in stage.layers)
            for stage in plan.stages
        )
        what, way = "some weights", "take one whose update needs no other value, such as AdamW, SGD or Lion"
        whole: list[tuple[int, ...]] = [(32, 128)] * 2
        half: tuple[int, ...] = (32, 128)
        if divides:
            what, way = "parts of a weight", f"{way}, or a plan without ZeRO and tensor degrees"
            whole, half = [(64, 128)], (-1,)
        try:
            together, states = self._change(whole, self._weights, self._gradients)
            _check_states(states, divides=divides)
            if len(plan.devices) == 1:
                return
            halves = zip(*(values.chunk(2) for values in (self._weights, *self._gradients)), strict=True)
            alone = torch.cat([self._change([half], weights, gradients)[0] for weights, *gradients in halves])
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.name} cannot update {what}, as each rank does ({reason}); {way}") from error
        if not (together - alone).abs().max() <= self._TOLERANCE * together.abs().max():
            raise ValueError(
                f"{self.name} updates {what} otherwise alone, as each rank does, than with the others; {way}"
            )

    def _change(
        self, shapes: Sequence[Sequence[int]], weights: Tensor, gradients: Sequence[Tensor]
    ) -> tuple[Tensor, _States]:
        """Return the change of flat weights, updated in parts of these shapes, and the states of the parts."""
        parts = weights.clone().chunk(len(shapes))
        parameters = [nn.Parameter(part.view(*shape)) for part, shape in zip(parts, shapes, strict=True)]
        optimizer = self._made(parameters)
        for group in optimizer.param_groups:
            if group.get("lr") is not None:
                group["lr"] = self._RATE
        with torch.random.fork_rng([self._device] if self._device.type == "cuda" else []), torch.no_grad():
            for gradient in gradients:
                for parameter, part in zip(parameters, gradient.clone().chunk(len(shapes)), strict=True):
                    parameter.grad = part.view(parameter.shape)
                optimizer.step()
        change = torch.cat([parameter.detach().flatten() for parameter in parameters]) - weights
        return change, [(parameter.shape, optimizer.state.get(parameter, {})) for parameter in parameters]


def _check_states(states: _States, *, divides: bool) -> None:
    """Raise ValueError if a checkpoint could not hold a state."""
    for shape, state in states:
        for name, value in state.items():
            is_kept = isinstance(value, Tensor) and (not divides or value.shape in {shape, torch.Size()})
            if not is_kept and name != STEP and value is not None:
                kind = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"it keeps {name}, {kind}, for a weight of shape {tuple(shape)}, which a checkpoint cannot hold"
                )
