"""Observer of an iteration's forwards: absolute losses, where values are not finite, and what depends on the plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainwright.worker_api import LossDependence
from trainwright_worker.layers.layer import Layer, Output


class ForwardObserver:
    """Findings from one rank's forwards of an iteration.

    It reads every output once more and waits for no device, so it observes an iteration that is not timed closely.

    Attributes:
        absolute_loss: absolute losses summed over the rows whose loss this rank counts.
        dependences: what layers do by which the loss depends on the plan.
    """

    def __init__(self, device: torch.device) -> None:
        self.absolute_loss = torch.zeros((), dtype=torch.float32, device=device)
        self.dependences: set[LossDependence] = set()
        self._sums: dict[int, Tensor] = {}
        self._device = device

    def observe(self, number: int, layer: Layer, output: Output, seed: int, *, counts_loss: bool) -> None:
        """Observe a layer's forward, before which torch's generators had that seed if it may draw from them."""
        outputs = output.boundary if output.loss is None else (*output.boundary, output.loss)
        for tensor in outputs:
            if tensor.is_floating_point():
                total = tensor.detach().sum(dtype=torch.float32)
                self._sums[number] = self._sums.get(number, 0.0) + total
        if output.loss is not None and counts_loss:
            absolute = output.loss if output.absolute_loss is None else output.absolute_loss
            self.absolute_loss += absolute.detach()
        if layer.draws_random_numbers and self._has_drawn(seed):
            self.dependences.add(LossDependence.RANDOM_NUMBERS)
        if layer.mixes_rows or any(map(_normalises_by_batch, layer.modules())):
            self.dependences.add(LossDependence.BATCH_NORMALISATION)

    @property
    def first_not_finite(self) -> int | None:
        """Return the first layer with an output that is not finite; None if there is none here. Waits for the device."""
        return next((number for number in sorted(self._sums) if not self._sums[number].isfinite()), None)

    def _has_drawn(self, seed: int) -> bool:
        """Return whether a default generator has moved on since it was seeded."""
        generators = [torch.default_generator]
        if self._device.type == "cuda":
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        return any(
            not torch.equal(generator.get_state(), torch.Generator(generator.device).manual_seed(seed).get_state())
            for generator in generators
        )


def _normalises_by_batch(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.training
