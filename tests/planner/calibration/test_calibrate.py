"""Calibration on synthetic truth: a runtime whose factors are known, measured with noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from trainwright import documents
from trainwright.calibration import DeviceMemory, Evidence, FailedTrial, Trial, Trials, fit
from trainwright.cost.estimate import estimate_with_context
from trainwright.plan import Plan
from trainwright.profiles import Profiles
from trainwright.runtime import ComputeRatio, OwnTrials, Runtime
from trainwright.strategy import Sharding

TRUTH = Runtime(
    compute_ratios=(ComputeRatio("emulated-fast", 1.35), ComputeRatio("emulated-slow", 1.6)),
    link_ratio=0.5,
    constant_seconds=0.3,
    constant_bytes=2**22,
    activation_ratio=1.4,
)
DEGREES = ((8, 1, 1), (4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2), (2, 1, 4))
BATCH = 32
NOISE = 0.05


@pytest.fixture(scope="module")
def setting(make_problem, make_cluster):
    """Slow links between fast nodes and a slow one, so that computing and sending both count."""
    return make_problem(make_cluster(between=4e6), batch=BATCH).cost_context


@pytest.fixture(scope="module")
def plans(make_problem, make_cluster, make_plan):
    problem = make_problem(make_cluster(between=4e6), batch=BATCH)
    layers = len(problem.model.layers)
    return [
        make_plan(problem, _even(layers, stages), data=data, tensor=tensor, rows=rows)
        for stages, data, tensor in DEGREES
        for rows in (1, 2, 4)
        if BATCH % (rows * data) == 0
    ]


def _even(layers, stages):
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def _measured(plan, setting, truth=TRUTH, draw=None, noise=NOISE, **changes):
    found = estimate_with_context(plan, replace(setting, runtime=truth))
    factor, memory_factor = np.exp(draw.normal(0, (noise, noise / 3))) if draw is not None else (1.0, 1.0)
    seconds = found.iteration_seconds * factor
    trial = Trial(plan, seconds, round(found.peak_memory_bytes * memory_factor))
    return replace(trial, **changes)


def _error(trials, setting, runtime=None):
    """Mean absolute error over measured iterations."""
    runtime = runtime or setting.runtime
    predicted = [
        estimate_with_context(trial.plan, replace(setting, runtime=runtime)).iteration_seconds for trial in trials
    ]
    return np.mean([abs(p / trial.iteration_seconds - 1) for p, trial in zip(predicted, trials, strict=True)])


def _memory_error(trials, setting, runtime):
    predicted = [
        estimate_with_context(trial.plan, replace(setting, runtime=runtime)).peak_memory_bytes for trial in trials
    ]
    return np.mean([abs(p / trial.peak_memory_bytes - 1) for p, trial in zip(predicted, trials, strict=True)])


def _five(plans, setting, seed, truth=TRUTH):
    """Five measured trials, and all other plans measured too."""
    draw = np.random.default_rng(seed)
    measured = [_measured(plans[number], setting, truth, draw) for number in draw.permutation(len(plans))]
    return measured[:5], measured[5:]


def _factor(found, name):
    return next(factor for factor in found.factors if factor.name == name)


@pytest.mark.parametrize("seed", range(4))
def test_five_trials_halve_the_error_of_held_out_plans(plans, setting, seed):
    trials, held_back = _five(plans, setting, seed)
    found = fit(Trials(tuple(trials)), setting)

    before, after = _error(held_back, setting), _error(held_back, setting, found.runtime)
    assert before > 0.25
    assert after < before / 2
    assert after < 2.5 * NOISE
    assert _memory_error(held_back, setting, found.runtime) < _memory_error(held_back, setting, Runtime()) / 2
    assert found.time_helps
    assert found.memory_helps
    assert found.time_errors.after <= found.time_errors.left_out < found.time_errors.before


def test_many_trials_recover_the_factors(plans, setting):
    draw = np.random.default_rng(0)
    shares: list[float] = []
    found = fit(Trials(tuple(_measured(plan, setting, draw=draw) for plan in plans[::2])), setting, shares.append)
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] == 1

    assert found.runtime.compute_ratio("emulated-slow") == pytest.approx(1.6, rel=0.08)
    assert found.runtime.compute_ratio("emulated-fast") == pytest.approx(1.35, rel=0.2)  # seldom the slowest
    assert found.runtime.link_ratio == pytest.approx(0.5, rel=0.15)
    assert found.runtime.activation_ratio == pytest.approx(1.4, rel=0.05)
    assert found.runtime.constant_bytes == pytest.approx(2**22, rel=0.05)
    for name, true in (("compute_ratio emulated-slow", 1.6), ("link_ratio", 0.5), ("activation_ratio", 1.4)):
        factor = _factor(found, name)
        assert factor.evidence is Evidence.FITTED
        assert abs(np.log(factor.after / true)) < 3 * factor.deviation


def test_residuals_are_small_when_trials_have_no_noise(plans, setting):
    trials = [_measured(plan, setting) for plan in plans[1::2]]
    found = fit(Trials(tuple(trials)), setting)
    assert found.time_errors.after < 0.01
    assert found.memory_errors.after < 0.005


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fit_resists_one_outlier(plans, setting, seed):
    trials, held_back = _five(plans, setting, seed)
    trials[1] = replace(trials[1], iteration_seconds=3 * trials[1].iteration_seconds)
    found = fit(Trials(tuple(trials)), setting)

    assert _error(held_back, setting, found.runtime) < 0.55 * _error(held_back, setting)
    assert found.trials[1].is_outlier


@pytest.mark.parametrize(("factor", "words"), [(1000.0, "1,000 times the"), (0.001, "0.001 times the")])
def test_trial_that_no_factor_explains_is_named_and_nothing_is_fitted(plans, setting, factor, words):
    trials, _ = _five(plans, setting, 1, truth=Runtime())
    predicted = estimate_with_context(trials[3].plan, setting).iteration_seconds
    for number in (1, 3):
        trials[number] = replace(trials[number], iteration_seconds=factor * predicted, name=f"run {number}")
    with pytest.raises(ValueError, match=r"trials\.2 \(run 3\)") as refusal:
        fit(Trials((*trials[:1], *trials[2:])), setting)
    assert words in str(refusal.value)
    assert "milliseconds" in str(refusal.value)
    with pytest.raises(ValueError, match=r"trials\.1 \(run 1\)[^;]*; so is that of trials\.3;"):
        fit(Trials(tuple(trials)), setting)


@pytest.mark.parametrize(
    ("peak_bytes", "words"),
    [
        (lambda predicted: predicted // 2**20, "9.3e-07 times the prediction of {predicted:,}"),
        (lambda _: 10 * 2**30, "times the prediction of {predicted:,}"),
        (lambda predicted: predicted * 10**6, "more than the largest device's 16.0 GiB"),
    ],
)
def test_memory_that_no_factor_explains_is_named_and_nothing_is_fitted(plans, setting, peak_bytes, words):
    predicted = estimate_with_context(plans[3], setting).peak_memory_bytes
    trial = _measured(plans[3], setting, Runtime(), name="run 3", peak_memory_bytes=peak_bytes(predicted))
    with pytest.raises(ValueError, match=r"trials\.1 \(run 3\): peak_memory_bytes is") as refusal:
        fit(Trials((_measured(plans[0], setting, Runtime()), trial)), setting)
    assert words.format(predicted=predicted) in str(refusal.value)
    assert "check the unit (bytes, not KiB or MiB)" in str(refusal.value)


def test_memory_of_one_device_that_no_factor_explains_is_named(plans, setting):
    trial = _measured(plans[0], setting, Runtime(), peak_memory_bytes=None)
    device = plans[0].devices[2]
    with pytest.raises(ValueError, match=rf"trials\.0 .*: peak_bytes of {device} is 4, "):
        fit(Trials((replace(trial, memory_by_device=(DeviceMemory(device, 4),)),)), setting)


def test_some_gibibytes_of_context_and_sizes_in_gigabytes_are_taken(plans, setting):
    """A context of 3 GiB is 300 times what this model takes; a full device may have a little more than the cluster says."""
    small = _measured(plans[0], setting, Runtime(), peak_memory_bytes=3 * 2**30)
    found = fit(Trials((small,)), setting)
    assert found.runtime.constant_bytes > 2**30
    needed = estimate_with_context(plans[0], setting).peak_memory_bytes
    accelerators = tuple(replace(one, memory_bytes=round(needed / 1.07)) for one in setting.cluster.accelerators)
    full = replace(setting, cluster=replace(setting.cluster, accelerators=accelerators))
    fit(Trials((_measured(plans[0], full, Runtime()),)), full)


def test_trial_whose_memory_is_unlike_the_others_is_an_outlier_of_memory_alone(plans, setting):
    trials = [_measured(plan, setting, Runtime()) for plan in plans[:6]]
    trials[0] = replace(trials[0], peak_memory_bytes=None)
    trials[2] = replace(trials[2], peak_memory_bytes=4 * trials[2].peak_memory_bytes)
    found = fit(Trials(tuple(trials)), setting)
    assert [number for number, one in enumerate(found.trials) if one.is_memory_outlier] == [2]
    assert not any(one.is_outlier for one in found.trials)


def test_failed_trials_alone_are_nothing_to_fit(plans, setting):
    with pytest.raises(ValueError, match="no trial was measured; add one that ran, with its iteration_seconds, under"):
        fit(Trials((), (FailedTrial(plans[0], out_of_memory=True),)), setting)


def test_single_trial_moves_only_the_shared_ratio(plans, setting):
    trials, held_back = _five(plans, setting, 3)
    found = fit(Trials((replace(trials[0], peak_memory_bytes=None),)), setting)

    shared = found.runtime.compute_ratio("emulated-fast")
    assert found.runtime == replace(
        setting.runtime,
        compute_ratios=tuple(ComputeRatio(name, shared) for name in ("emulated-fast", "emulated-slow")),
        own_trials=OwnTrials(1),
    )
    assert _error(held_back, setting, found.runtime) < _error(held_back, setting)
    assert found.memory_errors is None
    assert found.trials[0].iteration_seconds.left_out == found.trials[0].iteration_seconds.before


@pytest.mark.parametrize("count", [1, 5])
def test_factors_stay_when_the_model_was_right_up_to_noise(plans, setting, count):
    for seed in range(2):
        trials, held_back = _five(plans, setting, seed, truth=Runtime())
        found = fit(Trials(tuple(trials[:count])), setting)
        assert _error(held_back, setting, found.runtime) < 3 * NOISE


def test_factors_stay_when_they_do_not_help(plans, setting):
    # One plan measured far faster and far slower than predicted: each alone would mislead about the others.
    right = _measured(plans[0], setting, Runtime())
    trials = [replace(right, iteration_seconds=right.iteration_seconds * factor) for factor in (0.5, 2.0)]
    found = fit(Trials(tuple(trials)), setting)

    assert not found.time_helps
    unfitted = replace(found.runtime, constant_bytes=0, own_trials=None, own_memory_trials=None)
    assert unfitted == setting.runtime
    assert found.time_errors.after == found.time_errors.before < found.time_errors.left_out


@pytest.mark.parametrize("factor", [1 / 19, 19.0])
def test_factors_stay_within_their_bounds(plans, setting, factor):
    trials = [
        replace(
            trial,
            iteration_seconds=trial.iteration_seconds * factor,
            peak_memory_bytes=round(trial.peak_memory_bytes * factor),
        )
        for trial in (_measured(plan, setting, Runtime()) for plan in plans[:5])
    ]
    runtime = fit(Trials(tuple(trials)), setting).runtime
    for accelerator in ("emulated-fast", "emulated-slow"):
        assert 0.1 - 1e-9 <= runtime.compute_ratio(accelerator) <= 10 + 1e-9
    assert 0.05 - 1e-9 <= runtime.link_ratio <= 4 + 1e-9
    assert 1 <= runtime.overlap_slowdown_ratio <= 3 + 1e-9
    assert 0 <= runtime.constant_bytes <= max(trial.peak_memory_bytes for trial in trials)
    assert 0.3 - 1e-9 <= runtime.activation_ratio <= 3 + 1e-9


def test_repeated_trials_give_the_fit_of_one(plans, setting):
    trial = _measured(plans[4], setting)
    found = fit(Trials((trial,) * 5), setting)
    predicted = estimate_with_context(trial.plan, replace(setting, runtime=found.runtime))
    assert predicted.iteration_seconds == pytest.approx(trial.iteration_seconds, rel=0.05)
    assert np.isfinite([factor.deviation for factor in found.factors]).all()


def test_the_order_of_trials_does_not_matter(plans, setting):
    trials, _ = _five(plans, setting, 1)
    one, other = (fit(Trials(tuple(ordered)), setting).runtime for ordered in (trials, trials[::-1]))
    assert one.link_ratio == pytest.approx(other.link_ratio, rel=1e-3)
    assert one.compute_ratio("emulated-slow") == pytest.approx(other.compute_ratio("emulated-slow"), rel=1e-3)


def test_factor_stays_when_no_trial_depends_on_it(plans, setting):
    before = replace(setting.runtime, overlap_slowdown_ratio=1.7, overlaps_gradients=False)
    found = fit(Trials(tuple(_five(plans, setting, 0)[0])), replace(setting, runtime=before))
    factor = _factor(found, "overlap_slowdown_ratio")
    assert factor.evidence is Evidence.NO_INFLUENCE
    assert found.runtime.overlap_slowdown_ratio == pytest.approx(1.7)


def test_factors_beyond_one_ratio_are_held_when_trials_show_no_more(plans, setting):
    truth = Runtime(compute_ratios=tuple(ComputeRatio(f"emulated-{name}", 1.3) for name in ("fast", "slow")))
    found = fit(Trials(tuple(_measured(plan, setting, truth) for plan in plans[:3])), setting)
    assert _factor(found, "compute_ratio emulated-slow").evidence is Evidence.FITTED
    assert _factor(found, "link_ratio").evidence is Evidence.HELD
    assert found.runtime.link_ratio == 1.0


def test_links_inside_nodes_and_between_them_are_told_apart(make_problem, make_cluster, make_plan):
    problem = make_problem(make_cluster(between=4e6, within=8e6), batch=BATCH)
    setting, layers = problem.cost_context, len(problem.model.layers)
    plans = [
        make_plan(problem, _even(layers, stages), data=data, tensor=tensor, rows=rows)
        for stages, data, tensor in ((2, 2, 2), (4, 1, 2), (4, 2, 1), (8, 1, 1), (1, 4, 2), (2, 4, 1))
        for rows in (1, 2, 4)
    ]
    truth = Runtime(link_ratio=1.5, inside_link_ratio=0.4)
    found = fit(Trials(tuple(_measured(plan, setting, truth) for plan in plans)), setting)
    assert found.runtime.inside_ratio < 0.6
    assert found.runtime.link_ratio > 1.2


def test_bytes_of_each_parameter_are_fitted(plans, setting):
    truth = Runtime(copied_bytes_per_parameter=8.0)
    found = fit(Trials(tuple(_measured(plan, setting, truth) for plan in plans[::2])), setting)
    assert found.runtime.copied_bytes_per_parameter == pytest.approx(8.0, rel=0.1)
    assert found.memory_errors is not None
    assert found.memory_errors.left_out < 0.02


def _sharded(plan: Plan, sharding: Sharding) -> Plan:
    pipeline = plan.pipelines[0]
    stages = tuple(
        replace(stage, layers=tuple(run.with_strategy(sharding=sharding) for run in stage.layers))
        for stage in pipeline.stages
    )
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def test_overlapping_plans_determine_the_overlap_slowdown(plans, setting):
    overlapping = [
        _sharded(plan, sharding)
        for plan in plans[::2]
        if plan.pipelines[0].stages[0].layers[0].strategy.data > 1
        for sharding in (Sharding.ZERO2, Sharding.ZERO3)
    ]
    truth = Runtime(overlap_slowdown_ratio=1.6)
    found = fit(Trials(tuple(_measured(plan, setting, truth) for plan in overlapping)), setting)
    assert _factor(found, "overlap_slowdown_ratio").evidence is Evidence.FITTED
    assert found.runtime.overlap_slowdown_ratio == pytest.approx(1.6, abs=0.2)


def test_row_growth_is_corrected_when_it_was_derived(plans, setting):
    derived = Profiles(tuple(replace(layer, samples=int(layer.rows == 1)) for layer in setting.profiles.layers))
    setting = replace(setting, profiles=derived)
    truth = Runtime(row_growth_ratio=0.6)
    trials = tuple(_measured(plan, setting, truth) for plan in plans[1::2])
    found = fit(Trials(trials), setting)
    assert found.runtime.row_growth_ratio == pytest.approx(0.6, abs=0.08)
    assert found.runtime.compute_ratio("emulated-slow") == pytest.approx(1.0, abs=0.1)


def test_memory_by_device_is_compared_by_device(plans, setting):
    trials = []
    for plan in plans[:6]:
        found = estimate_with_context(plan, replace(setting, runtime=TRUTH))
        by_device = tuple(DeviceMemory(device, size) for device, size in found.memory_by_device[::2])
        trials.append(Trial(plan, found.iteration_seconds, memory_by_device=by_device))
    found = fit(Trials(tuple(trials)), setting)
    assert found.runtime.activation_ratio == pytest.approx(1.4, rel=0.03)
    assert found.runtime.constant_bytes == pytest.approx(2**22, rel=0.03)
    assert found.trials[0].peak_bytes.measured == max(memory.peak_bytes for memory in trials[0].memory_by_device)


def test_trials_document_round_trips(plans, setting):
    trials = Trials((_measured(plans[0], setting, name="first"), _measured(plans[1], setting, peak_memory_bytes=None)))
    assert documents.loads(documents.dumps(trials), Trials) == trials
    with pytest.raises(documents.DocumentError, match="at least one measured trial"):
        documents.parse({"trials": []}, Trials)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"iteration_seconds": 0.0}, "iteration_seconds of .* must be above 0"),
        ({"peak_memory_bytes": 0}, "peak_memory_bytes of .* must be above 0"),
        ({"memory_by_device": "strange"}, "must name devices of its plan"),
        ({"memory_by_device": "twice"}, "must name devices of its plan, each once"),
    ],
)
def test_contradictory_trials_are_refused(plans, setting, changes, said):
    trial = _measured(plans[0], setting)
    device = plans[0].devices[0]
    memories = {
        "strange": (DeviceMemory(replace(device, node="elsewhere"), 1),),
        "twice": (DeviceMemory(device, 1), DeviceMemory(device, 2)),
    }
    if "memory_by_device" in changes:
        changes = {"memory_by_device": memories[changes["memory_by_device"]]}
    with pytest.raises(ValueError, match=said):
        replace(trial, **changes)


def test_trial_of_another_cluster_is_refused_by_name(plans, make_problem, make_cluster):
    smaller = make_problem(make_cluster((("fast", 2), ("fast", 2))), batch=BATCH).cost_context
    with pytest.raises(ValueError, match=r"trial 0 \(odd one\): .*node"):
        fit(Trials((Trial(plans[0], 1.0, name="odd one"),)), smaller)


def test_fit_states_its_trials_and_how_far_fits_to_the_others_predict_them(plans, setting):
    draw = np.random.default_rng(1)
    trials = tuple(_measured(plan, setting, draw=draw, peak_memory_bytes=None) for plan in plans[::4])
    fitted = fit(Trials((*trials, trials[0])), setting)
    own, seconds = fitted.runtime.own_trials, [trial.iteration_seconds for trial in fitted.trials]
    logs = [np.log(quantity.measured / quantity.left_out) for quantity in seconds]
    assert fitted.time_helps
    assert own.count == len(trials)
    assert own.error_ratio == pytest.approx(np.sqrt(np.mean(np.square(logs))))
    assert fitted.runtime.own_memory_trials is None
    assert documents.loads(documents.dumps(fitted.runtime), Runtime) == fitted.runtime


def test_fit_states_how_far_fits_to_the_others_predict_the_memory_of_trials_that_state_it(plans, setting):
    draw = np.random.default_rng(2)
    trials = [_measured(plan, setting, draw=draw) for plan in plans[:12:3]]
    trials[0] = replace(trials[0], peak_memory_bytes=None)
    own = fit(Trials(tuple(trials)), setting).runtime.own_memory_trials
    assert own.count == 3
    assert 0 < own.error_ratio < NOISE
