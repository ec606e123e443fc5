"""Entry points whose layers have a habit with rows, memory or gradients each, which plans would change without a word."""

from __future__ import annotations

import os
import time
from functools import partial

import torch
from plain_model import WIDTH, Distance, linear, model, rows
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel


class Contrast(nn.Module):
    """A loss against the other rows of the batch."""

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        scores = made @ targets.to(made.dtype).T
        return functional.cross_entropy(scores, torch.arange(len(made), device=made.device), reduction="none")


def contrast() -> CustomModel:
    return model(head=Contrast)


def contrast_over_the_batch() -> CustomModel:
    return model(head=Contrast, whole_batch=True)


def batch_norm() -> CustomModel:
    return model(lambda: nn.BatchNorm1d(WIDTH))


def wide_batch_norm(min_rows: int = 1) -> CustomModel:
    """Its statistics are over space, too, so that one row is enough to compute."""
    layers = [lambda: nn.Unflatten(1, (2, 4)), lambda: nn.BatchNorm1d(2), lambda: nn.Flatten(1)]
    return model(lambda: nn.Sequential(*(make() for make in layers)), min_rows=min_rows)


def wide_batch_norm_of_two_rows() -> CustomModel:
    return wide_batch_norm(2)


class Codebook(nn.Module):
    """Nearest of some vectors, which follow the values by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        nearest = torch.cdist(values.float(), self.codes.float()).argmin(1)
        with torch.no_grad():
            mean = torch.zeros_like(self.codes).index_add_(0, nearest, values.detach().float())
            chosen = self.codes[nearest].to(values.dtype)
            self.codes.lerp_(mean, 0.2)
        return values + (chosen - values).detach()


def codebook() -> CustomModel:
    return model(Codebook)


def codebook_over_the_batch() -> CustomModel:
    return model(Codebook, whole_batch=True)


class Doubled(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values.mul_(2)


class DoubledInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs.mul_(2).sub_(0.5))


def relu_in_place() -> CustomModel:
    return model(partial(nn.ReLU, inplace=True))


def doubles_its_inputs() -> CustomModel:
    return CustomModel([DoubledInputs, Distance], rows)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((), 5.0))

    def forward(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=4.6)
        return values * self.scale


def clamps_its_weight() -> CustomModel:
    return model(Scaled)


class Slow(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return values + 1


def tells_its_processes() -> CustomModel:
    raise OSError(f"{os.environ['LOCAL_WORLD_SIZE']} processes share this host")


def slow() -> CustomModel:
    return model(Slow, linear, nn.ReLU)


class WithLoss(torch.autograd.Function):
    """Adds the gradient of a loss of its own, as libraries of experts do for their balance."""

    @staticmethod
    def forward(context, values: Tensor, loss: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(gradient[:, 0])


class Balanced(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return WithLoss.apply(values, values.square().mean(1))


def loss_by_a_function() -> CustomModel:
    return model(Balanced)


class Reversed(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        made = values * 2
        if made.requires_grad:
            made.register_hook(lambda gradient: -0.5 * gradient)
        return made


def reversed_gradient() -> CustomModel:
    return model(Reversed)


class Annealed(Distance):
    """Counts its forwards, long before the count changes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        self.step += 1
        return super().forward(made, targets) * (1.0 if self.step < 1000 else 0.1)


def counts_forwards() -> CustomModel:
    return model(head=Annealed)


class AnnealedByBuffer(Distance):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))

    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        self.step += 1
        return super().forward(made, targets) * (self.step / 1000).to(made.dtype)


def counts_forwards_in_a_buffer() -> CustomModel:
    return model(head=AnnealedByBuffer)


class ByMode(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values if torch.is_grad_enabled() else values * 2


def reads_the_gradient_mode() -> CustomModel:
    return model(ByMode)


class ActNorm(nn.Module):
    """Takes its weights from the first rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.size = nn.Parameter(torch.ones(()))
        self.is_ready = False

    def forward(self, values: Tensor) -> Tensor:
        if not self.is_ready:
            self.size.data.copy_(1 / values.std())
            self.is_ready = True
        return values * self.size


def weights_of_the_first_rows() -> CustomModel:
    return model(ActNorm)


LEFT: dict[str, Tensor] = {}


class Leaves(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        LEFT["values"] = values
        return values * 2


class Takes(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values + LEFT["values"]


def skip_through_a_global() -> CustomModel:
    return model(Leaves, Takes)


class Applied(nn.Module):
    """Computes by a function that it is given."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Tensor) -> Tensor:
        return self.function(values)


def _doubled(values: Tensor) -> Tensor:
    return values * 2


def _averaged(values: Tensor) -> Tensor:
    return values * values.detach().mean()


def functions_by_layer() -> CustomModel:
    return model(partial(Applied, _doubled), partial(Applied, _averaged))
