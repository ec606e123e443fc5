"""A training of one's own: optimizers, groups, a schedule and other rows, as a user writes them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from math import cos, pi

import buffered_models
import torch
from torch import Tensor

from trainwright_worker.synthetic_data import token_rows

CLIP_NORM, SEED, ITERATIONS = 0.5, 3, 8


def options(_name: str, shape: tuple[int, ...]) -> dict[str, float]:
    """Return no weight decay for biases and norms."""
    return {"weight_decay": 0.1} if len(shape) > 1 else {"weight_decay": 0.0}


def schedule(iteration: int) -> float:
    """Return two iterations of warm-up, then a cosine."""
    return (iteration + 1) / 2 if iteration < 2 else (1 + cos(pi * (iteration - 2) / (ITERATIONS - 2))) / 2


def held_out(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    return buffered_models.rows(seed + 1, iteration, first, count)


def held_out_tokens(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    tokens, targets = token_rows(8, 32, seed=seed + 1, iteration=iteration, first=first, count=count)
    return {"tokens": tokens, "targets": targets}


class Lion(torch.optim.Optimizer):
    """Sign of a moving average (Chen et al., 2023), with an average of the weights beside it."""

    def __init__(self, params: Iterable, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["direction"] = torch.zeros_like(weight)
                    state["average"] = weight.detach().clone()
                direction = state["direction"]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                # The hyperbolic tangent in place of the sign: a sign of rounding errors differs between plans.
                change = torch.tanh(100 * torch.lerp(weight.grad, direction, 0.9))
                weight.sub_(change, alpha=group["lr"])
                direction.lerp_(weight.grad, 0.01)
                state["average"].lerp_(weight, 0.1)


class Averaged(torch.optim.AdamW):
    """AdamW with an average of the weights, as the page has it."""

    def step(self) -> None:
        super().step()
        for weight, state in self.state.items():
            state.setdefault("average", weight.detach().clone()).lerp_(weight, 0.001)


class LayerScaled(torch.optim.Optimizer):
    """Gradient descent by a norm of each weight, as LARS and LAMB."""

    def __init__(self, params: Iterable, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(weight.grad * (weight.norm() / weight.grad.norm().clamp_min(1e-9)), alpha=group["lr"])


class AllScaled(LayerScaled):
    """Gradient descent by a norm of all weights."""

    def step(self) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm().clamp_min(1e-9)
        for weight in weights:
            weight.sub_(weight.grad / norm, alpha=0.1)


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
    "fused AdamW": partial(torch.optim.AdamW, lr=3e-3, fused=True),
    "Averaged": partial(Averaged, lr=3e-3),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "NAdam": partial(torch.optim.NAdam, lr=3e-3),
    "Lion": partial(Lion, lr=1e-3),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "Muon": partial(torch.optim.Muon, lr=1e-2),
    "LayerScaled": partial(LayerScaled, lr=1e-2),
    "AllScaled": partial(AllScaled, lr=1e-2),
}
