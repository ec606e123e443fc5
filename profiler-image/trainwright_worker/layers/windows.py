"""Square windows of a square image, which may be shifted: cutting it into them and putting them together again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Windows:
    """How an image's positions fall into windows.

    Attributes:
        side: positions along the image's side.
        window: positions along a window's side, which divides the image's.
        shift: positions by which the windows are moved down and right; what they leave over at the image's one edge
            and what they lack at the other make windows together.
    """

    side: int
    window: int
    shift: int = 0

    @property
    def count(self) -> int:
        """Windows of one row."""
        return (self.side // self.window) ** 2

    def cut(self, values: Tensor) -> Tensor:
        """From (rows, side², width) to (rows × count, window², width)."""
        image = torch.unflatten(values, 1, (self.side, self.side))
        if self.shift:
            image = image.roll((-self.shift, -self.shift), (1, 2))
        a_side, width = self.side // self.window, values.shape[-1]
        tiles = image.view(-1, a_side, self.window, a_side, self.window, width).transpose(2, 3)
        return tiles.reshape(-1, self.window**2, width)

    def join(self, windows: Tensor) -> Tensor:
        """From (rows × count, window², width) to (rows, side², width): undoes `cut`."""
        a_side, width = self.side // self.window, windows.shape[-1]
        tiles = windows.view(-1, a_side, a_side, self.window, self.window, width).transpose(2, 3)
        image = tiles.reshape(-1, self.side, self.side, width)
        if self.shift:
            image = image.roll((self.shift, self.shift), (1, 2))
        return image.flatten(1, 2)

    def apart(self) -> Tensor:
        """Which two positions of a window come from opposite edges of the image: (count, window², window²), bool."""
        beyond = (torch.arange(self.side) >= self.side - self.shift).long()
        region = (2 * beyond[:, None] + beyond).view(1, -1, 1)
        tiles = Windows(self.side, self.window).cut(region).squeeze(-1)
        return tiles[:, :, None] != tiles[:, None, :]

    def relative_places(self, largest: int) -> Tensor:
        """The number of the place that a window's position has to another one, of (2 × largest - 1)²: (window², window²).

        Args:
            largest: side of the largest window that a table of such places is for.
        """
        place = torch.arange(self.window)

        def distance(places: Tensor) -> Tensor:
            return places[:, None] - places + largest - 1

        down, across = distance(place.repeat_interleave(self.window)), distance(place.repeat(self.window))
        return down * (2 * largest - 1) + across
