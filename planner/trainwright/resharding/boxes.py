"""Boxes of a tensor: one interval per dimension, with their overlaps and cuts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TypeVar

Box = tuple[tuple[int, int], ...]
"""First index and stop index of every dimension."""

Tag = TypeVar("Tag")


def elements(box: Box) -> int:
    """Count the elements of a box."""
    return prod(end - first for first, end in box)


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return found if all(first < end for first, end in found) else None


def split(box: Box, count: float) -> tuple[Box | None, Box | None]:
    """Split a box into a head of about `count` elements and the rest; None for an empty part.

    The cut is in the first dimension that gives exactly `count`, else in the longest, whose slabs are the thinnest.
    """
    size = elements(box)
    if round(count) <= 0:
        return None, box
    if round(count) >= size:
        return box, None
    slabs = [size // (end - first) for first, end in box]
    exact = [dimension for dimension, slab in enumerate(slabs) if round(count) % slab == 0]
    dimension = exact[0] if exact else min(range(len(box)), key=slabs.__getitem__)
    first, end = box[dimension]
    middle = first + round(count / slabs[dimension])
    head, tail = ((*box[:dimension], part, *box[dimension + 1 :]) for part in ((first, middle), (middle, end)))
    return head if middle > first else None, tail if middle < end else None


def split_by_weight(boxes: Iterable[tuple[Box, Tag]], weights: Sequence[float]) -> list[list[tuple[Box, Tag]]]:
    """Cut boxes, laid end to end, into shares in proportion to the weights, as exactly as slabs allow.

    So each share adds at most one box (McNaughton's wrap-around rule).
    """
    waiting = list(boxes)[::-1]
    values, weight = sum(elements(box) for box, _ in waiting), sum(weights)
    shares: list[list[tuple[Box, Tag]]] = []
    given, reached = 0, 0.0
    for number, one in enumerate(weights):
        reached += one
        goal = values if number == len(weights) - 1 else values * reached / weight
        share: list[tuple[Box, Tag]] = []
        while waiting:
            box, tag = waiting.pop()
            head, tail = split(box, goal - given)
            if head is not None:
                share.append((head, tag))
                given += elements(head)
            if tail is not None:
                waiting.append((tail, tag))
                break
        shares.append(share)
    return shares
