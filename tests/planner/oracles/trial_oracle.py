"""Simulated truths that deviate from a cost model, and baseline strategies of trial selection.

A truth is not drawn from the tested prior: every profile entry and port has an error of its own, accelerators, row
growth and overlap have common errors, and every plan has a residual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt

import numpy as np

from trainwright.cluster import Cluster, Port
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import ComputeRatio
from trainwright.trial_selection import TrialPosterior, propose
from trainwright.trial_selection.knowledge_gradient import Rule
from trainwright.trial_selection.posterior import normal_cdf

NEVER_STOP = Rule(regret_below=0.0, least_gain=0.0)

Strategy = Callable[[TrialPosterior, np.random.Generator], int]


@dataclass(frozen=True)
class Error:
    """Errors of the cost model as standard deviations of logarithms.

    Attributes:
        whole, accelerator, entry: common error of all compute seconds, of one accelerator's, of one profile entry's.
        port: of bandwidths.
        row_growth: of the growth with the rows.
        alike: residual shared by plans of the same degrees.
        own: residual of a single plan.
    """

    whole: float = 0.03
    accelerator: float = 0.09
    entry: float = 0.035
    port: float = 0.3
    row_growth: float = 0.25
    alike: float = 0.0
    own: float = 0.03


@dataclass(frozen=True)
class Run:
    """Relative regret of a strategy after each trial, and whether it has found the fastest plan."""

    regrets: tuple[float, ...]
    found: tuple[bool, ...]


def true_seconds(plans: Sequence[Plan], setting: CostContext, error: Error, draw: np.random.Generator) -> list[float]:
    """Draw the true seconds of every plan."""
    truth = _truth(setting, error, draw)
    shared: dict[tuple[object, ...], float] = {}

    def residual(plan: Plan) -> float:
        degrees = tuple(
            (
                len(one.stages),
                one.micro_batches,
                frozenset((r.strategy.tensor, r.strategy.data) for s in one.stages for r in s.layers),
            )
            for one in plan.pipelines
        )
        return shared.setdefault(degrees, draw.normal(0, error.alike)) + draw.normal(0, error.own)

    return [estimate_with_context(plan, truth).iteration_seconds * exp(residual(plan)) for plan in plans]


def _truth(setting: CostContext, error: Error, draw: np.random.Generator) -> CostContext:
    whole = draw.normal(0, error.whole)
    ratios = tuple(
        ComputeRatio(accelerator.name, exp(whole + draw.normal(0, error.accelerator)))
        for accelerator in setting.cluster.accelerators
    )
    runtime = replace(
        setting.runtime,
        compute_ratios=ratios,
        row_growth_ratio=exp(draw.normal(0, error.row_growth)),
        overlap_slowdown_ratio=1 + 0.3 * exp(draw.normal(0, 0.3)),
    )
    profiles, cluster = _profiles(setting.profiles, error, draw), _cluster(setting.cluster, error, draw)
    return CostContext(setting.model, cluster, profiles, setting.optimizer, runtime)


def _profiles(profiles: Profiles, error: Error, draw: np.random.Generator) -> Profiles:
    off: dict[tuple[str, int, int], float] = {}
    layers = []
    for layer in profiles.layers:
        key = (layer.accelerator, layer.tensor_degree, layer.rows)
        factor = off.setdefault(key, exp(draw.normal(0, error.entry)))
        forward, backward = layer.forward_seconds * factor, layer.backward_seconds * factor
        layers.append(replace(layer, forward_seconds=forward, backward_seconds=backward))
    return replace(profiles, layers=tuple(layers))


def _cluster(cluster: Cluster, error: Error, draw: np.random.Generator) -> Cluster:
    """Ports of nodes with the same accelerator have similar errors, and so have listed links."""
    shared: dict[str, float] = {}

    def factor(kind: str) -> float:
        return shared.setdefault(kind, exp(draw.normal(0, error.port))) * exp(draw.normal(0, error.port / 5))

    def port(given: Port | None, kind: str) -> Port | None:
        return given and replace(given, bandwidth_bytes_per_second=given.bandwidth_bytes_per_second * factor(kind))

    nodes = tuple(
        replace(node, network=port(node.network, "between"), inside=port(node.inside, f"in {node.accelerator}"))
        for node in cluster.nodes
    )
    links = tuple(
        replace(
            link,
            bandwidth_bytes_per_second=link.bandwidth_bytes_per_second
            * factor("between" if link.source != link.target else f"in {cluster.node(link.source).accelerator}"),
        )
        for link in cluster.links
    )
    return replace(cluster, nodes=nodes, links=links)


def run(known: TrialPosterior, truth: Sequence[float], strategy: Strategy, trials: int, seed: Sequence[int]) -> Run:
    """Run `trials` trials; after each the answer is the measured plan that `TrialPosterior` believes fastest."""
    noise = np.random.default_rng([*seed, 1]).normal(0, known.noise, len(truth))
    draw = np.random.default_rng([*seed, 2])
    regrets = []
    for _ in range(trials):
        plan = strategy(known, draw)
        known = known.after_seconds(plan, truth[plan] * exp(noise[plan]))
        assert known.best is not None
        regrets.append(truth[known.best] / min(truth) - 1)
    return Run(tuple(regrets), tuple(regret == 0 for regret in regrets))


def run_by_measurement(truth: Sequence[float], noise: float, trials: int, seed: Sequence[int]) -> Run:
    """Try the plans in the order of their predictions and choose the fastest measured one, as a person does by hand."""
    off = np.random.default_rng([*seed, 1]).normal(0, noise, len(truth))
    measured = [seconds * exp(by) for seconds, by in zip(truth, off, strict=True)]
    best = [min(range(count), key=measured.__getitem__) for count in range(1, trials + 1)]
    regrets = tuple(truth[plan] / min(truth) - 1 for plan in best)
    return Run(regrets, tuple(regret == 0 for regret in regrets))


def proposed(known: TrialPosterior, draw: np.random.Generator) -> int:
    """Choose the trial that `propose` proposes."""
    trial = propose(known, NEVER_STOP).trial
    return known.untried[0] if trial is None else trial


def at_random(known: TrialPosterior, draw: np.random.Generator) -> int:
    return int(draw.choice(known.untried))


def believed_fastest(known: TrialPosterior, draw: np.random.Generator) -> int:
    """Choose the untried plan that the calibrated model predicts fastest."""
    return min(known.untried, key=lambda plan: float(known.seconds.means[plan]))


def expected_improvement(known: TrialPosterior, draw: np.random.Generator) -> int:
    """E[(best − plan)⁺] of the two logarithms, jointly normal (Jones, Schonlau and Welch 1998, Eq. 15)."""
    best = known.best
    assert best is not None
    if not known.measured:
        return best
    means, covariance = known.seconds.means, known.seconds.covariance

    def improvement(plan: int) -> float:
        spread = sqrt(max(covariance[plan, plan] + covariance[best, best] - 2 * covariance[plan, best], 1e-18))
        ahead = float(means[best] - means[plan])
        return ahead * normal_cdf(ahead / spread) + spread * exp(-((ahead / spread) ** 2) / 2) / sqrt(2 * np.pi)

    return max(known.untried, key=improvement)


def mean_error(predicted: Sequence[float], truth: Sequence[float]) -> float:
    """Mean absolute logarithm of measured over predicted."""
    return float(np.mean([abs(log(true / guess)) for true, guess in zip(truth, predicted, strict=True)]))
