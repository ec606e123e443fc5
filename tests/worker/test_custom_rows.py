"""Numbers of rows that pass for a dimension of a user's layer, and rows that have no loss."""

from __future__ import annotations

from contextlib import nullcontext

import plain_model
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainwright_worker.layers.custom import CustomModel
from trainwright_worker.model_description import description
from trainwright_worker.model_description.description import describe

WIDTH, TOKENS, WORDS = plain_model.WIDTH, 6, 11
IGNORED = -100


class Directions(nn.Module):
    """Two directions, then the rows, as a recurrent module returns its states."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(2, 1, 1))

    def forward(self, values: Tensor) -> Tensor:
        return self.weights * values


class FirstRows(nn.Module):
    """Hands two rows on, however many it takes."""

    def forward(self, values: Tensor) -> Tensor:
        return values[:2]


class OfTwoRows(nn.Module):
    """Its state is that of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(2, WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return values + self.state


class BothRows(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values @ values.T


class Flat(nn.Module):
    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        return (values.flatten(1).mean(1) - targets.mean(1)).square()


class TwoLosses(nn.Module):
    """Loss of two values, which are not the rows."""

    def forward(self, values: Tensor, targets: Tensor) -> Tensor:
        return (values - targets).square().mean(0)[:2]


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: plain_model.model(Directions, head=Flat), "layer 1 .Directions. returns float32 .2, 8, 8. for 8 rows"),
        (lambda: plain_model.model(FirstRows), "layer 1 .FirstRows. returns float32 .2, 8. for 8 rows, not .8, 8."),
        (
            lambda: plain_model.model(BothRows, head=Flat),
            "layer 1 .BothRows. returns float32 .8, 8. for 8 rows, not .8, 2.",
        ),
        (lambda: plain_model.model(head=TwoLosses), "layer 1 .TwoLosses. returns float32 .2,. for 8 rows, not .8,.;"),
        (lambda: plain_model.model(OfTwoRows), "layer 1 .OfTwoRows. fails for 4 rows on float32 .4, 8."),
    ],
)
def test_a_dimension_that_does_not_grow_with_the_rows_is_refused(monkeypatch, model, told: str) -> None:
    monkeypatch.setattr(plain_model, "made", model, raising=False)
    with pytest.raises(ValueError, match=told):
        describe("plain_model:made", check_seconds=0)


def rows(ignored: dict[int, int]):
    """Return rows of words, the last of which are ignored: as many as given by row."""

    def drawn(*, seed: int, iteration: int, first: int, count: int) -> dict[str, Tensor]:
        words = torch.stack(
            [
                torch.randint(WORDS, (TOKENS,), generator=torch.Generator().manual_seed(seed + 7 * iteration + row))
                for row in range(first, first + count)
            ]
        )
        targets = words.clone()
        for place, row in enumerate(range(first, first + count)):
            targets[place, TOKENS - ignored.get(row, 0) :] = IGNORED
        return {"words": words, "targets": targets}

    return drawn


class Mean(nn.Linear):
    """Loss of the mean over a row's targets that count."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(super().forward(hidden).mT, targets, reduction="none", ignore_index=IGNORED)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.losses(hidden, targets).sum(1) / targets.ne(IGNORED).sum(1)


class Sums(Mean):
    def forward(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return self.losses(hidden, targets).sum(1), targets.ne(IGNORED).sum(1)


class Mixed(Mean):
    """Its losses take part of the row before."""

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return super().forward(hidden + hidden.roll(1, 0), targets)


@pytest.fixture
def remarks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(description, "other_process", lambda *_: nullcontext())  # it would import these layers

    def of(head: type[nn.Module], ignored: dict[int, int]) -> tuple[str, ...]:
        layers = [lambda: nn.Embedding(WORDS, WIDTH), head]
        monkeypatch.setattr(plain_model, "made", lambda: CustomModel(layers, rows(ignored)), raising=False)
        return describe("plain_model:made", dtypes=[torch.float32]).checks.remarks

    return of


WAY = "return each row's sum of losses and its weight"


def test_a_row_without_a_target_is_told_as_such(remarks) -> None:
    (remark,) = remarks(Mean, {0: TOKENS})
    assert remark.startswith("the loss of layer 1 (Mean) is not finite for a row whose targets are all -100")
    assert WAY in remark


def test_a_row_that_may_have_no_target_is_told_before_it_comes(remarks) -> None:
    """Rows that ignore some targets may ignore all."""
    (remark,) = remarks(Mean, {1: 2})
    assert remark.startswith("the loss of layer 1 (Mean) is not finite for a row whose targets are all -100")


@pytest.mark.parametrize("ignored", [{0: TOKENS}, {0: TOKENS, 1: TOKENS}, {1: 2}, {}])
def test_sums_and_weights_need_no_remark(remarks, ignored: dict[int, int]) -> None:
    assert remarks(Sums, ignored) == ()


def test_rows_that_ignore_no_target_need_no_remark(remarks) -> None:
    assert remarks(Mean, {}) == ()


def test_a_row_without_a_loss_hides_no_habit(remarks) -> None:
    with pytest.raises(ValueError, match=r"Mixed.*gives rows together other"):
        remarks(Mixed, {0: TOKENS})
