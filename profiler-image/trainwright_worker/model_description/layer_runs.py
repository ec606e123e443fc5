"""Runs of one layer of a user's model: rows together and alone, with recompute, and in half formats."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright_worker.device import seed_random_numbers
from trainwright_worker.layers.custom import TARGETS, CustomLayers, made_on
from trainwright_worker.layers.custom_constants import plain_attributes
from trainwright_worker.layers.custom_errors import ModelError, needs_gpu
from trainwright_worker.layers.custom_layer import CustomLayer
from trainwright_worker.layers.layer import to_device
from trainwright_worker.layers.row_random_numbers import DrawnShapes, RowRandomNumbers
from trainwright_worker.model_description.check_budget import CheckBudget
from trainwright_worker.model_description.formats import (
    ProductFormats,
    in_format,
    watching,
)

_TOLERANCE: Final = 1e-4
"""Norm of a difference, relative to that of the values, above which float32 results differ."""
_ROUNDED: Final = 0.01
"""Difference that rounding to bfloat16 explains: a product rounds by 0.4 %."""
HALF_TOLERANCE: Final = 0.05
"""Likewise for a half format, whose sums of gradients round several times."""
_GRADIENT_FACTOR: Final = 64.0
_NORM_VALUES: Final = 2**22
_IGNORED: Final = -100
"""Target that torch's losses leave out by default."""


@dataclass
class Findings:
    """Findings that refuse nothing: parts that were left out, remarks, and whether the losses of all rows are exactly 0.

    Attributes:
        unchecked_kinds: names of the kinds of layers some of whose values were left out.
    """

    left_out: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    zero_loss: bool = False
    unchecked_kinds: set[str] = field(default_factory=set)


class Values(NamedTuple):
    """Results and gradients of one run."""

    results: list[Tensor]
    input_gradients: list[Tensor]
    weight_gradients: list[Tensor]

    def difference(self, other: Values) -> float:
        """Return the largest relative difference among the three parts."""
        return max(relative_difference(own, others) for own, others in zip(self, other, strict=True))

    def gradient_difference(self, other: Values, factor: float) -> float:
        """Return the largest relative difference of gradients from the other ones times a factor."""
        pairs = zip(self[1:], other[1:], strict=True)
        return max(relative_difference(own, [factor * value for value in others]) for own, others in pairs)

    def joined(self, other: Values) -> Values:
        """Return the values of both runs' rows."""
        return Values(
            [torch.cat(pair) for pair in zip(self.results, other.results, strict=True)],
            [torch.cat(pair) for pair in zip(self.input_gradients, other.input_gradients, strict=True)],
            [first + more for first, more in zip(self.weight_gradients, other.weight_gradients, strict=True)],
        )


def relative_difference(values: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the norm of the difference relative to that of `others`; equal infinities and NaNs do not differ."""
    squares = scale = 0.0
    for value, other in zip(values, others, strict=True):
        if value.shape != other.shape:
            return float("inf")
        if not (value.is_floating_point() and other.is_floating_point()):
            value, other = value.double(), other.double()  # noqa: PLW2901 - integers and masks have no norm
        difference, size = _norm(value - other), _norm(other)
        if not math.isfinite(difference + size):
            same = (value == other) | (value.isnan() & other.isnan())
            difference = _norm(torch.where(same, 0, value.double() - other.double()))
            size = _norm(torch.where(other.isfinite(), other, 0))
        squares += difference**2
        scale += size**2
    if squares == 0.0:
        return 0.0
    return float((squares / max(scale, 1e-12)) ** 0.5)


def _norm(value: Tensor) -> float:
    """Return the norm, in parts since float32 sums of more squares lose what they add."""
    return math.hypot(*(float(torch.linalg.vector_norm(part)) for part in torch.split(value.flatten(), _NORM_VALUES)))


class LayerRuns:
    """Runs of one layer on a device, each with the weights, buffers and rows that it starts with.

    In float32, or a half format for a layer that has kernels in no other; it is made on the CPU, as the executor does.
    """

    def __init__(
        self,
        layers: CustomLayers,
        number: int,
        boundary: list[Tensor] | None,
        budget: CheckBudget,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layers, self.number, self.dtype = layers, number, dtype
        self._budget, self.device = budget, budget.device
        self.rows = layers.probed_rows
        self._tolerance = _TOLERANCE if dtype is torch.float32 else HALF_TOLERANCE
        self._forked = [self.device] if self.device.type == "cuda" else []
        with made_on(layers, number, "cpu") as self.layer, self.device:
            given = boundary or layers.example(number - 1, self.rows)
        formats = layers.formats(number - 1, dtype)
        self.boundary = [value.detach().to(self.device, own) for value, own in zip(given, formats, strict=True)]
        in_format(self.layer, dtype)
        self.layer.to(self.device)
        self.data = self._fields(0)
        self.state = {name: value.detach().clone() for name, value in _state(self.layer)}
        self.drawn = DrawnShapes()
        self.gradients: list[Tensor] = []

    def _fields(self, first: int) -> dict[str, Tensor]:
        """Return what the layer reads of these rows, and leave the whole model as it is: further runs are of its parts, too."""
        fields = self.layers.fields(first, self.rows) if self.layer.reads else {}
        read = {name: fields[name] for name in self.layer.reads}
        return to_device(read, self.device, self.dtype, self.layers.model.keep_float32)

    def check(self, findings: Findings, *, scales_loss: bool) -> list[Tensor]:
        """Return the results of all rows. Raises ValueError for what a plan would change."""
        every = range(self.rows)
        if self.layer.is_last:
            _leave_out_rows_without_loss(self, findings)
        if self.layers.model.mixes_rows:
            together = self._together(None, findings, scales_loss=scales_loss)
            expected = self.compute(every, recompute=True)
        else:
            first = self._alone()
            together = self._together(first, findings, scales_loss=scales_loss)
            expected = first.joined(self.compute([1]))
        difference = together.difference(expected)
        if self._tolerance < difference <= _ROUNDED and _multiplies_in_halves(self, every):
            findings.remarks.append(
                f"{self.layer.label} multiplies in a half format (autocast), in which rows together "
                f"differ from rows alone by {difference:.2g}"
            )
        elif difference > self._tolerance:
            self._refuse_other_values(every, together)
            again = self._repeated_difference(every)
            if again > self._tolerance:
                raise _rows_error(self, difference)
            findings.remarks.append(
                f"rows of {self.layer.label} together differ from rows alone by "
                f"{difference:.2g} for some values and not for others, as a choice by value does"
            )
        findings.zero_loss = self.layer.is_last and not bool(together.results[0].any())
        return together.results

    def _together(self, first: Values | None, findings: Findings, *, scales_loss: bool) -> Values:
        """Return the values of all rows, `first` are those of the first row alone where a plan may compute it.

        Raises ValueError for what changes with the number of forwards, or the loss's scale.
        """
        every = range(self.rows)
        together = self.compute(every)
        _check_weights(self, together)
        self._check_buffers(every, together, findings)
        before = plain_attributes(self.layer.module)
        few, unscaled = (every, together) if first is None else ([0], first)
        scaled = self.compute(few, gradient_factor=_GRADIENT_FACTOR)
        if changed := sorted(set(plain_attributes(self.layer.module)) - set(before)):
            name = ".".join(part for part in changed[0][:2] if part)
            raise self.layers.error(
                f"{self.layer.label} changes its attribute {name} in every forward, and plans run other numbers of forwards "
                "(micro-batches, replicas, recompute); leave it out, or give what it counts as a field of rows()"
            )
        difference = scaled.gradient_difference(unscaled, _GRADIENT_FACTOR)
        if (
            scales_loss
            and self.dtype is torch.float32
            and difference > self._tolerance
            and self.compute(few).difference(unscaled) <= self._tolerance
        ):
            raise self.layers.error(
                f"{self.layer.label} hands back gradients that do not grow with those that it is given (they differ by {difference:.1%}), "
                "as a hook that clips or an autograd.Function with a loss of its own does, and float16 scales the loss; hand "
                "that loss by row on to the last layer, which adds it, or train in another format (describe --dtype bfloat16)"
            )
        return together

    def losses(self) -> Tensor:
        """Return the losses of all rows, with numbers that are not drawn by row."""
        self._budget.begin_run(self.layer.label)
        self._restore()
        arguments = [value.detach().clone() for value in (*self.boundary, *self.data.values())]
        with torch.random.fork_rng(self._forked), torch.no_grad():
            return self.layer.compute(arguments)[0]

    def _alone(self) -> Values:
        try:
            return self.compute([0], recompute=True)
        except ModelError:
            raise
        except Exception as error:
            if needs_gpu(error):
                raise
            try:
                self.compute(range(self.rows), recompute=True)
            except Exception:  # noqa: BLE001 (the user's)
                raise error from None
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise self.layers.error(
                f"{self.layer.label} fails for one row alone ({words}), but a plan may compute "
                f"single rows; give CustomModel min_rows={self.rows} or more"
            ) from error

    def _refuse_other_values(self, every: Sequence[int], together: Values) -> None:
        """Raise ValueError if the layer repeats itself not at all, or not when it is recomputed."""
        if (difference := self.compute(every).difference(together)) > self._tolerance:
            raise self.layers.error(
                f"{self.layer.label} differs by {difference:.1%} between two forwards of the same rows, seed and weights; keep nothing of "
                "earlier forwards (counters, memories) outside of registered buffers, and draw random numbers from torch's "
                "default generator, which a recomputed forward repeats, not from one of its own"
            )
        difference = self.compute(every, recompute=True).difference(together)
        if difference > self._tolerance:
            raise self.layers.error(
                f"{self.layer.label} differs by {difference:.1%} with recompute, whose first forward takes no gradients and whose second "
                "repeats it; compute the same with and without gradients (torch.is_grad_enabled), and keep what it changes in "
                "registered buffers"
            )

    def _check_buffers(self, every: Sequence[int], together: Values, findings: Findings) -> None:
        """Raise ValueError if the layer reads buffers that it also changes by the rows: replicas would differ in them."""
        changed = self._changed_buffers()
        saved = {attribute for attribute, _ in self.layer.persistent_buffers()}
        findings.remarks += [
            f"{self.layer.label} changes buffer {name.removeprefix('module.')}, which is not persistent: where training resumes from "
            "a checkpoint, it has its first values"
            for name in changed
            if name not in saved
        ]
        if not changed or self.layers.model.whole_batch:
            return
        if self.compute(every, keeps_buffers=True).difference(together) <= self._tolerance:
            return
        states = []
        for row in (0, self.rows - 1):
            self.compute([row] * self.rows)
            states.append([value.clone() for name, value in self.layer.named_buffers() if name in changed])
        name = changed[0].removeprefix("module.")
        if (
            relative_difference(*states) <= self._tolerance
        ):  # such as those of spectral normalisation, which follow from the weights
            findings.remarks.append(
                f"{self.layer.label} computes with buffer {name}, which each forward changes: "
                "plans with more micro-batches change it more often"
            )
            return
        raise self.layers.error(
            f"{self.layer.label} changes buffer {name} by the rows that it computes and also "
            "reads it, so that replicas differ and plans train different models; give CustomModel whole_batch=True"
        )

    def batch_norm(self) -> nn.Module | None:
        return next((first for first in self.layer.modules() if isinstance(first, _BatchNorm)), None)

    def _changed_buffers(self) -> list[str]:
        """Return the buffers that the last run changed."""
        return [name for name, value in self.layer.named_buffers() if not torch.equal(value, self.state[name])]

    def _repeated_difference(self, every: Sequence[int]) -> float:
        """Return the difference between rows together and alone for other values."""
        if self.layers.model.mixes_rows:
            return float("inf")
        with torch.random.fork_rng(self._forked):
            seed_random_numbers(self.number, self.device)
            self.boundary = [
                value + 0.02 * value.abs().mean() * torch.randn_like(value) if value.is_floating_point() else value
                for value in self.boundary
            ]
        self.data = self._fields(2)
        together = self.compute(every)
        return together.difference(self.compute([0]).joined(self.compute([1])))

    def compute(
        self, rows: Sequence[int], *, recompute: bool = False, keeps_buffers: bool = False, gradient_factor: float = 1.0
    ) -> Values:
        """Return results and gradients of these rows, with the numbers that each row draws.

        Buffers are those of the start, or with `keeps_buffers` what the run before made of them. With `recompute` results
        are of the first forward, without gradients, as the next stage gets them.
        """
        self._budget.begin_run(self.layer.label)
        if not keeps_buffers:
            self._restore()
        self.layer.zero_grad()
        chosen = list(rows)
        inputs = [
            value[chosen].clone().requires_grad_(value.is_floating_point())
            for value in (first.detach() for first in self.boundary)
        ]
        arguments = [*inputs, *(value[chosen].clone() for value in self.data.values())]
        handed_on: list[Tensor] | None = None
        with (
            torch.random.fork_rng(self._forked),
            _python_draws_nothing(self),
            watching(self.layers, self.layer),
        ):
            if recompute:  # as the executor does it
                with torch.no_grad(), RowRandomNumbers(chosen, self.drawn, self.device):
                    handed_on = [value.clone() for value in self.layer.compute([value.clone() for value in arguments])]
                self._restore()
            with RowRandomNumbers(chosen, self.drawn, self.device):
                made = self.layer.compute(arguments)
        tracked = [(place, value) for place, value in enumerate(made) if value.requires_grad]
        if tracked:
            torch.autograd.backward(
                [value for _, value in tracked],
                [gradient_factor * self._gradient(place, value, chosen) for place, value in tracked],
            )
        return Values(
            [value.detach() for value in made] if handed_on is None else handed_on,
            [value.grad if value.grad is not None else torch.zeros_like(value) for value in inputs],
            [first.grad if first.grad is not None else torch.zeros_like(first) for first in self.layer.parameters()],
        )

    def forward_in(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the results of all rows in a half format."""
        half = LayerRuns(self.layers, self.number, self.boundary, self._budget, dtype)
        with (
            torch.random.fork_rng(self._forked),
            torch.no_grad(),
            RowRandomNumbers(range(self.rows), self.drawn, self.device),
        ):
            return [value.float() for value in half.layer.compute([*half.boundary, *half.data.values()])]

    def _gradient(self, place: int, value: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the gradient with which these rows of a result are given back."""
        if self.layer.is_last:
            return torch.ones_like(value)
        while len(self.gradients) <= place:
            generator = torch.Generator().manual_seed(len(self.gradients))
            shape = self.layers.boundary(self.number)[len(self.gradients)]
            self.gradients.append(torch.randn(self.rows, *shape, generator=generator))
        return self.gradients[place][list(rows)].to(value)

    def _restore(self) -> None:
        with torch.no_grad():
            for name, value in _state(self.layer):
                if not torch.equal(value, self.state[name]):
                    value.copy_(self.state[name])


def _multiplies_in_halves(runs: LayerRuns, rows: Sequence[int]) -> bool:
    """Return whether a layer takes products of half formats although its weights and rows are float32."""
    with ProductFormats() as formats:
        runs.compute(rows)
    return not formats.seen.isdisjoint((torch.bfloat16, torch.float16))


def _rows_error(runs: LayerRuns, difference: float) -> ValueError:
    norm = runs.batch_norm()
    what = f"its {type(norm).__name__} normalises over them" if norm is not None else "it mixes them"
    way = (
        "give CustomModel min_rows, the rows over which it may normalise at least (or use GroupNorm)"
        if norm is not None
        else "make it depend on each row alone, or give CustomModel whole_batch=True for a loss over the whole batch "
        "(min_rows, if a part of it suffices)"
    )
    size = "100% or more" if difference >= 1 else f"{difference:.1%}"
    return runs.layers.error(
        f"{runs.layer.label} gives rows together other {'losses' if runs.layer.is_last else 'values'} or gradients than each alone "
        f"(by {size}): {what}, and plans split batches in many ways; {way}"
    )


def _by_row(rows: Tensor, values: Tensor) -> Tensor:
    """Return a mask of rows in the dimensions of values."""
    return rows.view(-1, *[1] * (values.dim() - 1))


def _leave_out_rows_without_loss(runs: LayerRuns, findings: Findings) -> None:
    """Remark on losses that are not finite, and give their rows the targets of others, since NaN hides differences."""
    lost = ~runs.losses().isfinite()
    targets = runs.data[TARGETS]
    ignored = targets == _IGNORED
    if lost.all():
        findings.remarks.append(f"the loss of {runs.layer.label} is not finite at first")
        return
    if lost.any():
        runs.data = {**runs.data, TARGETS: torch.where(_by_row(lost, targets), targets[~lost][0], targets)}
        if not ignored[lost].flatten(1).all(1).all():
            findings.remarks.append(f"the loss of {runs.layer.label} is not finite at first")
            return
    elif not ignored.any() or _has_loss_without_targets(runs, targets):
        return
    findings.remarks.append(
        f"the loss of {runs.layer.label} is not finite for a row whose targets are all {_IGNORED}, as one that divides by the "
        "number of the others is; return each row's sum of losses and its weight (losses.sum(1), "
        f"targets.ne({_IGNORED}).sum(1)), or give no such row"
    )


def _has_loss_without_targets(runs: LayerRuns, targets: Tensor) -> bool:
    """Return whether the loss is finite, or refused, where the first row ignores all of its targets, as rows may."""
    data, runs.data = runs.data, {**runs.data, TARGETS: targets.clone()}
    runs.data[TARGETS][0] = _IGNORED
    try:
        return bool(runs.losses().isfinite().all())
    except (RuntimeError, IndexError):  # deliberate: it takes no such target
        return True
    finally:
        runs.data = data


def _check_weights(runs: LayerRuns, together: Values) -> None:
    if runs.layer.is_last and any(not bool((weights >= 0).all()) for weights in together.results[1:]):
        raise runs.layers.error(
            f"{runs.layer.label} returns weights of rows below 0 or NaN; the loss is the sum of "
            "losses divided by that of weights, so count what takes part (targets.ne(-100).sum(1))"
        )


def _state(layer: CustomLayer) -> Iterator[tuple[str, Tensor]]:
    yield from layer.named_parameters()
    yield from layer.named_buffers()


@contextmanager
def _python_draws_nothing(runs: LayerRuns) -> Iterator[None]:
    """Raise ValueError if the body draws from Python's or numpy's random numbers."""
    numpy = sys.modules.get("numpy")
    before = random.getstate(), numpy and numpy.random.get_state()[2]
    yield
    source = None
    if random.getstate() != before[0]:
        source = "Python's random"
    elif numpy and numpy.random.get_state()[2] != before[1]:
        source = "numpy.random"
    if source is not None:
        raise runs.layers.error(
            f"{runs.layer.label} draws from {source} in its forward, which follows no seed and "
            "which recompute does not repeat; draw from torch's default generator"
        )
