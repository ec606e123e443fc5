"""Comparison of a whole module with its layers: losses and gradients of the same weights and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn

from trainwright_worker.layers.custom import TARGETS, CustomModel
from trainwright_worker.layers.custom_errors import describe_error

ROWS: Final = 1, 2, 3
TOLERANCE: Final = 1e-5
"""Largest difference of float32 losses and gradients, relative to their norm, that the order of sums makes."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Relative differences for one number of rows; `refusal` is why the whole module computes none of them."""

    rows: int
    losses: float = 0.0
    gradients: float = 0.0
    refusal: str = ""

    @property
    def is_equal(self) -> bool:
        """Return whether the layers compute what the whole module does."""
        return max(self.losses, self.gradients) <= TOLERANCE

    def sentence(self) -> str:
        """Return what it says."""
        what = f"{self.rows} row{'s' if self.rows > 1 else ''}"
        if self.refusal:
            return f"{what}: the whole module refuses them ({self.refusal})"
        return f"{what}: losses of the layers differ by {self.losses:.1g} from the whole module's, gradients by {self.gradients:.1g}"


def differences(
    build: Callable[[], nn.Module],
    whole_losses: Callable[[nn.Module, Mapping[str, Tensor]], Tensor],
    model: CustomModel,
) -> Iterator[Difference]:
    """Yield the differences for some numbers of rows, of one training step each on the CPU."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        whole = build()
        for count in ROWS:
            try:
                other = deepcopy(whole)
            except RuntimeError:  # it holds a tensor that is computed from weights
                torch.manual_seed(0)
                whole = build()
                torch.manual_seed(0)
                other = build()
            rows = model.rows(seed=0, iteration=0, first=0, count=count)
            try:
                expected = _trained(whole, partial(whole_losses, whole, rows))
            except Exception as error:  # noqa: BLE001 - deliberate: of the user's code, told as a refusal
                yield Difference(count, refusal=describe_error(error, otherwise="it needs more"))
                continue
            layers = [make(other) for make in model.layers]
            computed = _trained(other, partial(_in_layers, layers, rows))
            yield Difference(count, _relative([computed[0]], [expected[0]]), _relative(computed[1], expected[1]))
            whole.zero_grad()


def _trained(module: nn.Module, losses: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the losses and the gradients of all weights, with the same random numbers whenever it is called."""
    torch.manual_seed(1)
    computed = losses()
    torch.autograd.backward(computed.mean())
    gradients = [
        torch.zeros_like(weight) if weight.grad is None else weight.grad.clone() for weight in module.parameters()
    ]
    return computed.detach(), gradients


def _in_layers(layers: Sequence[nn.Module], rows: Mapping[str, Tensor]) -> Tensor:
    boundary = tuple(value for name, value in rows.items() if name != TARGETS)
    for layer in layers[:-1]:
        made = layer(*boundary)
        boundary = tuple(
            value.clone() for value in (made if isinstance(made, tuple) else (made,))
        )  # as a stage gets them
    losses = layers[-1](*boundary, rows[TARGETS])
    assert isinstance(losses, Tensor)
    return losses


def _relative(values: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = list(zip(values, expected, strict=True))
    difference = sum(float((value.double() - other.double()).square().sum()) for value, other in pairs)
    scale = sum(float(other.double().square().sum()) for other in expected)
    return 0.0 if difference == 0 else float((difference / max(scale, 1e-30)) ** 0.5)
