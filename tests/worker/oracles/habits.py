"""Entry points of models whose layers have one habit each, which plans would change without a word."""

from __future__ import annotations

import os
import random
import time
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel

WIDTH = 8


def rows(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    drawn = [torch.Generator().manual_seed(hash((seed, iteration, first + row)) % 2**62) for row in range(count)]
    return {
        "inputs": torch.stack([torch.randn(WIDTH, generator=one) for one in drawn]),
        "targets": torch.stack([torch.randn(WIDTH, generator=one) for one in drawn]),
    }


class Distance(nn.Module):
    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made - targets.to(made.dtype)).square().mean(1)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def model(*layers, rows=rows, head=Distance, **fields) -> CustomModel:
    return CustomModel([linear, *layers, head], rows, **fields)


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


def spectral_norm() -> CustomModel:
    """Its vectors are buffers, which follow from the weights and stay in float32."""
    return model(lambda: nn.utils.parametrizations.spectral_norm(linear()))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

    def forward(self, values: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(values.float()) * self.filter, n=WIDTH).to(values.dtype)


def complex_weights() -> CustomModel:
    return model(Spectral)


class Double(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

    def forward(self, values: Tensor) -> Tensor:
        return (values * self.weight).to(values.dtype)


def double_weights() -> CustomModel:
    return model(Double)


DATA = torch.randn(16, WIDTH)


def indexed(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Rows of a data set that a number of torch's chooses, as torch's data loaders do."""
    chosen = [
        DATA[int(torch.randint(16, (), generator=torch.Generator().manual_seed(first + row)))] for row in range(count)
    ]
    return {"inputs": torch.stack(chosen) * 0 + float(torch.ones(()).item()), "targets": torch.zeros(count, WIDTH)}


def reads_by_index() -> CustomModel:
    return model(rows=indexed)


class Embed(nn.Module):
    """Makes float32 of whole numbers, whatever format its weights are in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(torch.arange(WIDTH, device=values.device) * 0.1 + values.float())


def float32_inside() -> CustomModel:
    return model(Embed)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values).bfloat16()


def hands_on_bfloat16() -> CustomModel:
    return model(Autocast)


def steps(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    return {
        **rows(seed=seed, iteration=iteration, first=first, count=count),
        "targets": torch.full((count, WIDTH), 999.0),
    }


class ByStep(nn.Module):
    def forward(self, made: Tensor, targets: Tensor) -> Tensor:
        return (made - targets / 1000).square().mean(1)


def rounded_field() -> CustomModel:
    return model(rows=steps, head=ByStep)


def kept_field() -> CustomModel:
    return model(rows=steps, head=ByStep, keep_float32=["targets"])


def large_targets(**which: int) -> dict[str, Tensor]:
    return {**rows(**which), "targets": torch.full((which["count"], WIDTH), 70_000.0)}


def infinite_field() -> CustomModel:
    return model(rows=large_targets)


def large_field_in_float32() -> CustomModel:
    return model(rows=large_targets, head=ByStep, keep_float32=["targets"])


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


class Noise(nn.Module):
    """Draws from a source of its own."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, values: Tensor) -> Tensor:
        if self.source == "random":
            return values * random.uniform(0.5, 2)
        if self.source == "numpy":
            return values * float(np.random.uniform(0.5, 2))  # noqa: NPY002 (the habit)
        drawn = torch.rand(values.shape, generator=self.generator, device="cpu")
        return values * drawn.to(values.device, values.dtype)


def own_generator() -> CustomModel:
    return model(lambda: Noise("own"))


def pythons_random() -> CustomModel:
    return model(lambda: Noise("random"))


def numpys_random() -> CustomModel:
    return model(lambda: Noise("numpy"))


def drawn_by_numpy() -> nn.Module:
    made = linear()
    drawn = np.random.randn(WIDTH, WIDTH).astype("float32")  # noqa: NPY002 (the habit)
    made.weight.data = torch.from_numpy(drawn).to(made.weight.device)
    return made


def numpy_weights() -> CustomModel:
    return model(drawn_by_numpy)


def hashed(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    found = rows(seed=seed, iteration=iteration, first=first, count=count)
    values = [float(hash(f"row {first + row}") % 7) for row in range(count)]
    return {**found, "targets": found["targets"] + torch.tensor(values)[:, None]}


def rows_by_hash_of_text() -> CustomModel:
    return model(rows=hashed)


def in_ones_own_process(**which: int) -> dict[str, Tensor]:
    return {**rows(**which), "targets": torch.full((which["count"], WIDTH), (os.getpid() % 1000) / 1000)}


def rows_by_process() -> CustomModel:
    return model(rows=in_ones_own_process)


def lazy() -> CustomModel:
    return model(lambda: nn.LazyLinear(WIDTH))


class Flash(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        import flash_attention_of_nobody

        return flash_attention_of_nobody.forward(values)


def missing_module() -> CustomModel:
    return model(Flash)


@torch.library.custom_op("trainwright_habits::double", mutates_args=(), device_types="cuda")
def _double(values: Tensor) -> Tensor:
    return values * 2


@torch.library.custom_op("trainwright_habits::known_double", mutates_args=(), device_types="cuda")
def _known_double(values: Tensor) -> Tensor:
    return values * 2


_known_double.register_fake(torch.empty_like)
_known_double.register_autograd(lambda context, gradient: gradient * 2)


class Kernel(nn.Module):
    def __init__(self, operator) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, values: Tensor) -> Tensor:
        return self.operator(values)


def gpu_kernel() -> CustomModel:
    return model(lambda: Kernel(_double))


def gpu_kernel_with_shapes() -> CustomModel:
    return model(lambda: Kernel(_known_double))


class Dropping(nn.Module):
    """Attention and branches with dropout, inside which the sequence comes before the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3)

    def forward(self, values: Tensor) -> Tensor:
        return self.inner(values.unflatten(1, (2, 4)).transpose(0, 1)).transpose(0, 1).flatten(1)


def dropout() -> CustomModel:
    return model(Dropping, lambda: nn.Dropout(0.5))


class Slow(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return values + 1


def slow() -> CustomModel:
    return model(Slow, linear, nn.ReLU)


def shuffled(*, count: int, **which: int) -> dict[str, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(which["iteration"]))
    return {name: value[order] for name, value in rows(count=count, **which).items()}


def rows_in_an_order_of_the_call() -> CustomModel:
    return model(rows=shuffled)


class Mixup(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return 0.7 * values + 0.3 * values[torch.randperm(len(values), device=values.device)]


def mixup() -> CustomModel:
    return model(Mixup)


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


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.arange(WIDTH) % 2 == 0

    def forward(self, values: Tensor) -> Tensor:
        return torch.where(self.mask, values * 2, values)


def tensor_that_is_no_buffer() -> CustomModel:
    return model(Masked)


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


class Edges(nn.Module):
    """A graph whose edges are read off a matrix as the layer is made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(WIDTH).roll(1, 0).nonzero().T)

    def forward(self, values: Tensor) -> Tensor:
        source, target = self.edges
        return values.index_add(1, target, values[:, source])


def reads_values_as_it_is_made() -> CustomModel:
    return model(Edges)


class SparseGraph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.eye(WIDTH).to_sparse())

    def forward(self, values: Tensor) -> Tensor:
        return torch.sparse.mm(self.matrix, values.T).T


def sparse_matrix() -> CustomModel:
    return model(SparseGraph)
