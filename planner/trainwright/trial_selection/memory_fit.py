"""Probability that plans fit into memory."""

from __future__ import annotations

from math import hypot, inf, log

from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Estimate
from trainwright.trial_selection.model_uncertainty import ModelUncertainty
from trainwright.trial_selection.posterior import normal_cdf


def peak_memory_ratio(estimate: Estimate, context: CostContext) -> float:
    """Return the memory share of the fullest device, of what plans may take."""
    return max(peak_bytes / context.memory_of_node[device.node] for device, peak_bytes in estimate.memory_by_device)


def probability_below_one(mean: float, deviation: float) -> float:
    """Return the probability that a memory share is at most 1, given the mean and the deviation of its logarithm."""
    return normal_cdf(-mean / deviation) if deviation else float(mean <= 0)


def fit_probability(estimate: Estimate, context: CostContext) -> float:
    """Return the probability that a plan fits into memory, before any trial."""
    doubts, ratio = ModelUncertainty.of(context), peak_memory_ratio(estimate, context)
    return probability_below_one(log(ratio) if ratio > 0 else -inf, hypot(doubts.memory, doubts.own_memory))
