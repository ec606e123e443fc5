"""Weight of a batch, by which its sum of losses is divided."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from trainwright_worker.device import read_value
from trainwright_worker.layers.custom import CustomLayers
from trainwright_worker.layers.layer import FamilyLayers


class BatchWeight:
    """Weight of a batch: its rows, or the sum of the weights that the last layer of a user's model returns with them.

    Attributes:
        value: of the last batch.
    """

    def __init__(self, layers: FamilyLayers, rows: int, group: dist.ProcessGroup | None) -> None:
        self._rows, self._group = rows, group
        self.is_summed = isinstance(layers, CustomLayers) and layers.weighs_rows
        self.value = float(rows)

    @property
    def per_row(self) -> float:
        """Return the weight of a row of the last batch on average."""
        return self.value / self._rows

    def sum(self, own: Tensor) -> Tensor | None:
        """Sum this rank's weights over all ranks of the plan. Returns the mean of a row, shape (); None if each counts 1."""
        if not self.is_summed:
            return None
        if self._group is not None:
            dist.all_reduce(own, group=self._group)
        return own / self._rows

    def mean_loss(self, loss: Tensor, weight: Tensor) -> float:
        """Return this rank's contribution to the mean, NaN if the batch weighs nothing. Waits for the device."""
        if self.is_summed:
            self.value = read_value(weight)
        return read_value(loss) / self.value if self.value else math.nan
