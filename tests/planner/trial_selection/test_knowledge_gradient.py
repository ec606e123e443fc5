"""Posterior of plans, value of a trial and stopping rule, against numerical integration."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, pi, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.trial_selection import ModelUncertainty, Posterior, Rule, StoppingDecision, TrialPosterior, propose
from trainwright.trial_selection.posterior import expected_drop, normal_cdf

GRID = np.linspace(-9, 9, 36_001)
DENSITY = np.exp(-(GRID**2) / 2) / sqrt(2 * pi)

levels = st.floats(-2, 2)
lines = st.lists(
    st.tuples(levels, st.sampled_from([-1.5, -1.0, -0.3, 0.0, 1e-3, 0.3, 1.0]) | levels), min_size=1, max_size=8
)


def integral(values):
    """Over a standard normal number."""
    return float(np.trapezoid(values * DENSITY, GRID))


def random_belief(seed, count):
    draw = np.random.default_rng(seed)
    root = draw.normal(0, 0.05, (count, 3))
    return Posterior(draw.normal(0, 0.05, count), root @ root.T + 0.02**2 * np.eye(count))


def roomy(count):
    """Return a memory posterior by which every plan fits."""
    return Posterior(np.full(count, -5.0), 1e-4 * np.eye(count))


def knowledge(seconds, memory=None, noise=0.01):
    return TrialPosterior(seconds, memory or roomy(len(seconds.means)), noise)


def uncertain_memory(*shares):
    """Return a memory posterior with 10 % shared and 2 % independent standard deviation."""
    return Posterior(np.log(shares), 0.1**2 + 0.02**2 * np.eye(len(shares)))


@given(lines)
def test_expected_drop_of_lines_equals_integration(given_lines):
    level, slope = (np.array(column) for column in zip(*given_lines, strict=True))
    least = np.min(level[:, None] + slope[:, None] * GRID, axis=0)
    drop = expected_drop(level, slope)
    assert drop == pytest.approx(float(level.min()) - integral(least), abs=1e-5)
    assert drop >= 0


@given(st.integers(0, 10_000), st.permutations(range(4)))
def test_sequential_and_joint_updates_agree(seed, order):
    belief, noise = random_belief(seed, 6), 0.02
    seconds = np.exp(np.random.default_rng(seed + 1).normal(0, 0.05, 4))
    one_by_one = belief
    for plan in order:
        one_by_one = one_by_one.after_measurement(plan, float(seconds[plan]), noise=noise)

    gain = belief.covariance[:, :4] @ np.linalg.inv(belief.covariance[:4, :4] + noise**2 * np.eye(4))
    np.testing.assert_allclose(one_by_one.means, belief.means + gain @ (np.log(seconds) - belief.means[:4]), atol=1e-10)
    np.testing.assert_allclose(one_by_one.covariance, belief.covariance - gain @ belief.covariance[:4], atol=1e-10)


@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("mean", [-0.4, -0.05, 0.0, 0.2])
def test_bound_gives_the_moments_of_the_truncated_normal(mean, above):
    belief = Posterior(np.array([mean, 1.0]), np.array([[0.01, 0.005], [0.005, 0.02]]))
    found = belief.after_memory_outcome(0, above=above)

    values = mean + 0.1 * GRID
    kept = (values > 0) if above else (values <= 0)
    whole = integral(kept)
    cut_mean = integral(values * kept) / whole
    cut_variance = integral((values - cut_mean) ** 2 * kept) / whole
    assert found.means[0] == pytest.approx(cut_mean, abs=2e-4)
    assert found.covariance[0, 0] == pytest.approx(cut_variance, rel=0.02)
    assert found.means[1] == pytest.approx(1 + 0.5 * (cut_mean - mean), abs=2e-4)


@pytest.mark.parametrize("mean", [-0.79, -0.81, -3.0, -100.0])
def test_unexpected_out_of_memory_is_believed(mean):
    found = Posterior(np.array([mean]), np.array([[0.01]])).after_memory_outcome(0, above=True)
    assert 0 < found.means[0] < 0.02
    assert 0 < found.covariance[0, 0] < 0.01


def test_truncated_tail_is_continuous():
    near, far = (
        Posterior(np.array([mean]), np.array([[0.01]])).after_memory_outcome(0, above=True)
        for mean in (-0.7999, -0.8001)
    )
    assert near.means[0] == pytest.approx(far.means[0], rel=2e-3)


@given(st.integers(0, 10_000))
def test_gain_is_the_expected_drop_of_the_best_measured_plan(seed):
    known = knowledge(random_belief(seed, 5)).after_seconds(0, 1.02).after_seconds(3, 0.99)
    spread = sqrt(float(known.seconds.covariance[1, 1]) + known.noise**2)
    surprises = [known.after_seconds(1, exp(float(known.seconds.means[1]) + spread * size)) for size in (0, 1)]
    level, there = (
        later.seconds.means[[0, 1, 3]] for later in surprises
    )  # after trials of 0, 3 and 1; linear in the surprise
    best = np.min(level[:, None] + (there - level)[:, None] * GRID, axis=0)
    assert known.expected_gain(1) == pytest.approx(float(known.seconds.means[known.best]) - integral(best), abs=1e-5)
    assert known.expected_gain(1) >= 0


def test_the_regret_of_two_plans_is_the_expected_improvement():
    known = knowledge(Posterior(np.array([0.0, 0.02]), np.diag([0.03**2, 0.04**2])), noise=0.0).after_seconds(0, 1.0)
    ahead, spread = -0.02, 0.04
    exact = ahead * normal_cdf(ahead / spread) + spread * exp(-((ahead / spread) ** 2) / 2) / sqrt(2 * pi)
    assert known.regret == pytest.approx(exact, rel=0.05)


def test_the_regret_falls_with_trials_on_average():
    before = knowledge(random_belief(1, 6)).after_seconds(0, 1.0)
    truths = before.seconds.sample(np.random.default_rng(0).standard_normal((40, 6)))
    trial = propose(before, Rule(0.0, 0.0)).trial
    after = [before.after_seconds(trial, exp(truth[trial])).regret for truth in truths]
    assert np.mean(after) < before.regret
    assert min(after) >= 0


def test_first_proposal_is_a_plan_that_runs():
    known = knowledge(random_belief(4, 5))
    answer = propose(known)
    assert answer.verdict is StoppingDecision.TRY
    assert answer.trial == answer.best == int(np.argmin(known.seconds.means))


def test_first_trial_likely_fits():
    seconds = Posterior(np.log([1.0, 1.1, 1.2]), 0.01 * np.eye(3))
    assert propose(knowledge(seconds, uncertain_memory(1.2, 0.7, 0.5))).trial == 1
    assert propose(knowledge(seconds, uncertain_memory(1.4, 1.3, 1.2))).trial == 2


def test_fit_probability_falls_after_out_of_memory_and_rises_after_a_run():
    known = knowledge(random_belief(2, 3), uncertain_memory(0.95, 0.97, 0.5))
    failed = known.after_failure(0, out_of_memory=True)
    assert failed.fit_probability[0] == 0
    assert failed.fit_probability[1] < known.fit_probability[1] - 0.2
    assert failed.fit_probability[2] > 0.98
    assert failed.untried == [1, 2]
    assert known.after_failure(0, out_of_memory=False).fit_probability[1] == known.fit_probability[1]
    assert known.after_seconds(0, 1.0).fit_probability[1] > known.fit_probability[1]
    measured = known.after_seconds(0, 1.0, memory_share=0.99)
    assert measured.fit_probability[0] == 1
    assert measured.fit_probability[1] < 0.5 < known.fit_probability[1]


@given(st.permutations(range(4)))
def test_the_order_of_trials_does_not_matter_for_memory(order):
    known = knowledge(random_belief(6, 5), uncertain_memory(0.9, 0.95, 1.02, 1.05, 0.98))
    outcomes = [(0, False), (1, False), (2, True), (3, True)]
    for plan, failed in (outcomes[place] for place in order):
        known = known.after_failure(plan, out_of_memory=True) if failed else known.after_seconds(plan, 1.0)
    in_order = knowledge(random_belief(6, 5), uncertain_memory(0.9, 0.95, 1.02, 1.05, 0.98))
    for plan in (0, 1):
        in_order = in_order.after_seconds(plan, 1.0)
    for plan in (2, 3):
        in_order = in_order.after_failure(plan, out_of_memory=True)
    np.testing.assert_allclose(known.memory.means, in_order.memory.means, atol=1e-3)
    assert known.fit_probability[4] == pytest.approx(in_order.fit_probability[4], abs=0.01)


def test_outcomes_on_both_sides_have_the_joint_moments():
    """Compared with draws of the prior that agree with all outcomes."""
    prior = uncertain_memory(0.93, 0.99, 1.01)
    found = prior.after_memory_outcomes({0: False, 2: True})
    values = prior.sample(np.random.default_rng(0).standard_normal((300_000, 3)))
    kept = values[(values[:, 0] <= 0) & (values[:, 2] > 0)]
    np.testing.assert_allclose(found.means, kept.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(found.deviations, kept.std(axis=0), rtol=0.1)


def test_a_plan_that_failed_below_one_that_ran_takes_no_memory_from_others():
    known = knowledge(random_belief(7, 3), uncertain_memory(0.6, 0.9, 0.88))
    for first, second in ((0, 1), (1, 0)):
        tried = known
        for plan in (first, second):
            tried = tried.after_failure(0, out_of_memory=True) if plan == 0 else tried.after_seconds(1, 1.0)
        assert tried.fit_probability[0] == 0
        assert tried.fit_probability[1] == 1
        assert tried.fit_probability[2] > known.fit_probability[2]


def test_gain_is_lower_when_a_plan_may_not_fit():
    seconds = Posterior(np.log([1.0, 0.98, 0.98]), 0.03**2 * np.eye(3))
    known = knowledge(seconds, uncertain_memory(0.3, 1.0, 0.5)).after_seconds(0, 1.0)
    assert known.expected_gain(1) < 0.7 * known.expected_gain(2)
    assert propose(known).trial == 2


def test_a_failed_plan_that_ran_later_counts_as_run():
    known = knowledge(random_belief(3, 3)).after_failure(1, out_of_memory=False).after_seconds(1, 1.0)
    assert known.failed == frozenset()
    assert known.best == 1


def test_proposals_stop_when_regret_or_gain_is_small_or_all_is_tried():
    close = knowledge(Posterior(np.log([1.0, 1.3]), 0.02**2 * np.eye(2))).after_seconds(0, 1.0)
    assert propose(close).verdict is StoppingDecision.REGRET_IS_SMALL
    assert propose(close, Rule(0.0, 0.01)).verdict is StoppingDecision.NOTHING_IS_WORTH_IT
    tried = close.after_seconds(1, 1.3)
    answer = propose(tried)
    assert (answer.verdict, answer.trial, answer.best) == (StoppingDecision.ALL_TRIED, None, 0)
    assert answer.regret < 1e-6


def test_no_plan_is_proposed_when_all_failed():
    known = knowledge(random_belief(5, 2))
    for plan in range(2):
        known = known.after_failure(plan, out_of_memory=True)
    answer = propose(known)
    assert (answer.verdict, answer.trial, answer.best, answer.regret) == (StoppingDecision.ALL_TRIED, None, None, 0.0)


def test_costs_favour_cheaper_trials():
    seconds = Posterior(np.log([1.0, 0.99, 1.0]), 0.04**2 * np.eye(3))
    known = knowledge(seconds).after_seconds(0, 1.0)
    assert propose(known).trial == 1
    assert propose(known, costs=(1.0, 4.0, 1.0)).trial == 2


def test_only_allowed_plans_are_proposed_and_the_others_still_inform():
    known = knowledge(Posterior(np.log([1.0, 0.98, 1.0]), 0.04**2 * np.eye(3)))
    assert propose(known, among={0, 2}).trial == 0
    ran = known.after_seconds(0, 1.0)
    assert propose(ran).trial == 1
    assert propose(ran, among={0, 2}).trial == 2
    answer = propose(ran, among={0})
    assert (answer.verdict, answer.trial, answer.regret) == (StoppingDecision.ALL_TRIED, None, ran.regret)


def test_proposal_is_deterministic():
    known = knowledge(random_belief(8, 12)).after_seconds(3, 0.97)
    assert propose(known) == propose(replace(known))


def test_trial_updates_only_plans_that_share_its_uncertainty():
    shared = np.array([[0.1], [0.1], [0.0]])
    belief = Posterior(np.zeros(3), shared @ shared.T + 0.01**2 * np.eye(3)).after_measurement(0, 1.2, noise=0.01)
    assert belief.means[1] == pytest.approx(log(1.2), rel=0.05)
    assert belief.means[2] == 0


@pytest.mark.parametrize("wrong", [{"own": 0.0}, {"link": -0.1}, {"part": 1.0}])
def test_uncertainty_refuses_invalid_shares(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ModelUncertainty(**wrong)


def test_rule_refuses_invalid_thresholds():
    with pytest.raises(ValueError, match="regret_below"):
        Rule(regret_below=1.0)
