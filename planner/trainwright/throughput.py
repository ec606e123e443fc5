"""Throughput of a plan: rows, tokens and model FLOPs per second, from its measured iterations."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright.accelerators.data_sheets import data_sheet, has_data_sheet
from trainwright.cluster import Accelerator, Cluster
from trainwright.families import T5, Bert, Family, Gpt, Llama, Moe
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import Plan

PASSES = 3
"""Forward and backward in units of a forward: the backward computes gradients of inputs and of weights."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Throughput of a trial.

    Attributes:
        iteration_seconds: median of the measured iterations.
        spread_seconds: longest minus shortest iteration.
        relative_spread: spread over median.
        tokens_per_second: None if rows are not sequences of tokens.
        model_flops_per_second: what the model needs by the operators of its layers; recomputation does not count.
        utilisation: model FLOPs over the peak of all devices of the plan in the model's dtype (PaLM's model FLOP
            utilisation); None if a device's peak is not known.
    """

    iteration_seconds: float
    spread_seconds: float
    relative_spread: float
    rows_per_second: float
    tokens_per_second: float | None
    model_flops_per_second: float
    utilisation: float | None


def throughput(iteration_seconds: Sequence[float], plan: Plan, model: Model, cluster: Cluster) -> Throughput:
    """Compute the throughput of a plan. Raises ValueError without measured iterations."""
    if not iteration_seconds or min(iteration_seconds) <= 0:
        raise ValueError("a throughput needs at least one measured iteration, each longer than 0 s")
    median = statistics.median(iteration_seconds)
    spread = max(iteration_seconds) - min(iteration_seconds)
    rows = plan.global_batch_size / median
    tokens = tokens_per_row(model.family)
    flops = rows * flops_per_row(model)
    peaks = [peak_flops_per_second(cluster.accelerator_of(device), model.dtype) for device in plan.devices]
    known_peaks = [peak for peak in peaks if peak is not None]
    return Throughput(
        iteration_seconds=median,
        spread_seconds=spread,
        relative_spread=spread / median,
        rows_per_second=rows,
        tokens_per_second=None if tokens is None else rows * tokens,
        model_flops_per_second=flops,
        utilisation=flops / sum(known_peaks) if len(known_peaks) == len(peaks) else None,
    )


def tokens_per_second_per_device(rates: Throughput, plan: Plan) -> float | None:
    """Return a plan's tokens per second for each of its devices; None if rows are not sequences of tokens."""
    return None if rates.tokens_per_second is None else rates.tokens_per_second / len(plan.devices)


def flops_per_row(model: Model) -> float:
    """Return FLOPs of one row's forward and backward through all layers, 2 for each multiply-add."""
    kinds = map(model.kind_of, range(len(model.layers)))
    return sum((1 + (PASSES - 1) * kind.backward_share) * kind.forward_flops_per_row for kind in kinds)


def tokens_per_row(family: Family) -> int | None:
    """Return the tokens read per row (by encoder and decoder together); None if rows have none."""
    if isinstance(family, T5):
        return family.sequence_length + family.decoder_tokens
    if isinstance(family, Gpt | Llama | Bert | Moe):
        return family.sequence_length
    return None


def peak_flops_per_second(accelerator: Accelerator, dtype: Dtype) -> float | None:
    """Return the peak of dense matrix products, emulated or from the data sheet without TF32; None if unknown."""
    if accelerator.emulation is not None:
        return accelerator.emulation.flops_per_second
    return data_sheet(accelerator.name).flops_per_second(dtype) if has_data_sheet(accelerator.name) else None
