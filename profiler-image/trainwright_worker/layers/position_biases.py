"""Biases of attention scores by relative position: T5's classes of distances, and the look-up of their table."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

FURTHEST = 128
"""Distance from which on all have one class."""


def classes_by_distance(queries: int, keys: int, classes: int, *, both_ways: bool) -> Tensor:
    """The class of every distance key − query from −(queries − 1) to keys − 1, (queries + keys − 1,).

    Half of the classes are single distances, the others grow with its logarithm. Seen `both_ways`, half of all classes
    are for keys ahead of the query; otherwise keys ahead are of class 0, as the query itself is.
    """
    distance = torch.arange(-(queries - 1), keys)
    side = max(1, classes // 2) if both_ways else classes
    ahead = (distance > 0) * (classes // 2 if both_ways else 0)
    distance = distance.abs() if both_ways else (-distance).clamp(min=0)
    single = side // 2
    if single == 0:
        return ahead
    furthest = max(FURTHEST, 2 * single)
    growth = (distance.clamp(min=1).float() / single).log() / math.log(furthest / single)
    grown = single + (growth * (side - single)).long().clamp(max=side - single - 1)
    return ahead + torch.where(distance < single, distance, grown)


def biases(table: Tensor, by_distance: Tensor, queries: int) -> Tensor:
    """What the scores are given, (1, heads, queries, keys).

    Every distance is looked up once; query i then sees the window of distances that begins at its −i.

    Args:
        table: (classes, heads).
        by_distance: as `classes_by_distance` gives it, (queries + keys − 1,).
        queries: how many there are.
    """
    found = functional.embedding(by_distance, table).T
    keys = by_distance.numel() - queries + 1
    return found.unfold(-1, keys, 1).flip(-2).unsqueeze(0)
