"""Entry points with habits that every plan trains as one process does."""

from __future__ import annotations

import torch
from plain_model import WIDTH, Distance, linear, rows
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from trainwright_worker.layers.custom import CustomModel


def model(habit, *, first=linear, rows=rows) -> CustomModel:
    return CustomModel([first, habit, habit, linear, Distance], rows)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.outer(self.inner(values).tanh())


def compiled() -> CustomModel:
    return model(lambda: torch.compile(Wide(), backend="aot_eager"))


def normalised_weights() -> CustomModel:
    return model(lambda: nn.utils.parametrizations.weight_norm(linear()))


def weights_normalised_by_a_hook() -> CustomModel:
    """Return a model with the older way, whose weight is a tensor that each forward computes anew."""
    return model(lambda: nn.utils.weight_norm(linear()))


class Routed(nn.Module):
    """Sends each row to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(linear() for _ in range(3))

    def forward(self, values: Tensor) -> Tensor:
        weights, chosen = self.gate(values).softmax(-1).max(-1)
        made = torch.zeros_like(values)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero()[:, 0]
            made = made.index_add(0, places, expert(values[places]) * weights[places, None])
        return values + made


def routed() -> CustomModel:
    return model(Routed)


class Spectral(nn.Module):
    """A filter of frequencies, whose complex weight is two real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_real(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64)).clone())

    def forward(self, values: Tensor) -> Tensor:
        filtered = torch.fft.rfft(values.float()) * torch.view_as_complex(self.filter.float())
        return values + torch.fft.irfft(filtered, WIDTH).to(values.dtype)


def complex_by_parts() -> CustomModel:
    return model(Spectral)


class Doubled(nn.Linear):
    """First layer that changes the rows in place."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values.mul_(2).sub_(0.5))


def changes_its_inputs() -> CustomModel:
    return model(linear, first=Doubled)


class Saved(Dataset):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return torch.full((WIDTH,), number / 40).sin(), torch.full((WIDTH,), number / 7).cos()


def loaded(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
    """Rows of a data set by torch's DataLoader, in an order of the seed."""
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    numbers = [int(order[(iteration * 18 + row) % 40]) for row in range(first, first + count)]
    inputs, targets = next(iter(DataLoader(Subset(Saved(), numbers), batch_size=count)))
    return {"inputs": inputs, "targets": targets}


def data_loader() -> CustomModel:
    return model(Wide, rows=loaded)
