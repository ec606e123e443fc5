"""Layer assignments that do not look at costs: equally many blocks, or parameters, in every stage."""

from __future__ import annotations

from itertools import accumulate

from trainwright.model import Model


def even_blocks(model: Model, stages: int) -> tuple[int, ...] | None:
    """Ends of stages with equally many blocks (tensor-parallel layers) of whatever kind; None where there are too few.

    Other layers stay with the block before them; those before the first block join the first stage.
    """
    blocks = [layer for layer in range(len(model.layers)) if model.kind_of(layer).is_tensor_parallel]
    if len(blocks) < stages:
        return None
    return (*(blocks[number * len(blocks) // stages] for number in range(1, stages)), len(model.layers))


def even_parameters(model: Model, stages: int) -> tuple[int, ...]:
    """Ends of stages of which the largest holds as few parameters as can be, every stage at least one layer."""
    layers = len(model.layers)
    sums = [0, *accumulate(model.kind_of(layer).parameters for layer in range(layers))]
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (max(largest, sums[end] - sums[first]), (*ends, end))
                for first, (largest, ends) in best.items()
                if first < end
            )
            for end in range(stage, layers - (stages - stage) + 1)
        }
    return best[layers][1]
