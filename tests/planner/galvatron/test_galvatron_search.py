"""Galvatron-Base and Galvatron-BMW on whole problems."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise
from operator import itemgetter

import galvatron_oracle as oracle
import numpy as np
import pytest

from trainwright.answer.batch_size import best_batch_size
from trainwright.runtime import Runtime
from trainwright.search import Limits, NoFeasiblePlan, SearchControl
from trainwright.search.galvatron.balanced_partition import PartitionTables, best_partition
from trainwright.search.galvatron.galvatron_model import estimate_seconds
from trainwright.search.galvatron.partition_search import SplitTables, memory_balanced_partition
from trainwright.search.galvatron.pipeline_solutions import GroupTablesCache
from trainwright.search.galvatron.search import (
    SolutionPool,
    adjusted_solutions,
    balanced_solutions,
    galvatron_base,
    galvatron_bmw,
)
from trainwright.search.registry import SEARCH_MODULES, load_search
from trainwright.strategy import Sharding

MIB = 2**20
searches = pytest.mark.parametrize("search", [galvatron_base, galvatron_bmw])


@pytest.fixture
def tight(make_cluster, make_problem):
    def make(memory, speeds=(("fast", 2), ("slow", 2)), **sizes):
        return make_problem(make_cluster(speeds, memory=memory), **{"layers": 6, "batch": 8, **sizes})

    return make


def tables(problem):
    return [SplitTables(cut) for cut in GroupTablesCache(problem).pipeline_splits()]


def explored(problem, explore):
    """Eq. 8 and plan of every solution, the least first."""
    exploration = SolutionPool(problem, SearchControl(), tables(problem), steps=1)
    exploration.run(explore)
    return sorted(((f.solution.seconds, f.candidate.plan) for f in exploration.solutions.values()), key=itemgetter(0))


def runs(candidate):
    return [run for stage in candidate.plan.pipelines[0].stages for run in stage.layers]


def test_both_searches_are_registered():
    assert [load_search(SEARCH_MODULES[name]) for name in ("galvatron-base", "galvatron-bmw")] == [
        galvatron_base,
        galvatron_bmw,
    ]


def test_solution_seconds_equal_equation_8_of_its_plan(tight):
    problem = replace(tight(10 * MIB), runtime=Runtime(overlaps_gradients=True))
    found = explored(problem, adjusted_solutions)
    assert found
    for seconds, plan in found:
        assert seconds == pytest.approx(estimate_seconds(plan, problem.cost_context))


def test_search_is_never_slower_than_the_plain_procedure_and_sometimes_faster(tight, record_property):
    pick = random.Random(3)
    wins = solved = whole_wins = whole = 0
    for _ in range(12):
        speeds = [(pick.choice(("fast", "slow")), pick.randint(1, 2)) for _ in range(2)]
        problem = tight(pick.choice((6, 8, 10, 16)) * MIB, speeds, layers=pick.randint(2, 4), batch=4)
        with_one_count = []
        for table in tables(problem):
            start = memory_balanced_partition(table.split)
            if len(table.split.devices) == 1 or start is None:
                continue
            plain = oracle.plain_queue(table.split, start, table.time_balanced(), granules=24)
            ours = min((s.seconds for s in adjusted_solutions(table, float("inf"))), default=float("inf"))
            assert ours <= plain * (1 + 1e-9)
            solved += 1
            wins += ours < plain * (1 - 1e-9)
            if table.split.micro_batches == oracle.plain_micro_batches(4, len(table.split.devices)):
                with_one_count.append(plain)
        least = explored(problem, adjusted_solutions)
        if with_one_count:
            ours = least[0][0] if least else float("inf")
            assert ours <= min(with_one_count) * (1 + 1e-9)
            whole += 1
            whole_wins += ours < min(with_one_count) * (1 - 1e-9)
    record_property("faster_than_the_queue", f"{wins} of {solved} cuts, {whole_wins} of {whole} problems")
    assert 0 < wins < solved
    assert 0 < whole_wins <= whole


def test_bmw_is_never_slower_than_base_by_equation_8(tight):
    for memory in (8, 12, 64):
        for table in tables(tight(memory * MIB)):
            base = min((s.seconds for s in balanced_solutions(table, float("inf"))), default=float("inf"))
            bmw = min((s.seconds for s in adjusted_solutions(table, float("inf"))), default=float("inf"))
            assert bmw <= base


def test_bound_never_exceeds_the_solution(tight):
    for table in tables(tight(10 * MIB)):
        bound = table.lower_bound
        assert table.quick_bound() <= bound * (1 + 1e-9)
        assert all(bound <= s.seconds * (1 + 1e-9) for s in adjusted_solutions(table, float("inf")))


def loose_peak(search, tight, speeds):
    return search(tight(1024 * MIB, speeds), SearchControl(), 1)[0].estimate.peak_memory_bytes


@searches
def test_solution_fits_memory_by_the_exact_estimate(tight, search):
    speeds = (("fast", 2), ("slow", 2))
    peak = loose_peak(search, tight, speeds)
    for share in (1.0, 0.9, 0.8):
        memory = int(share * peak)
        for candidate in search(tight(memory, speeds), SearchControl(), 3):
            assert candidate.estimate.feasible
            assert candidate.estimate.peak_memory_bytes <= memory
    with pytest.raises(NoFeasiblePlan, match="closest"):
        search(tight(peak // 10, speeds), SearchControl(), 3)


@pytest.mark.parametrize("explore", [balanced_solutions, adjusted_solutions])
def test_more_memory_is_never_slower_by_equation_8(tight, explore):
    times = []
    for memory in (2, 6, 7, 8, 10, 64):
        found = explored(tight(memory * MIB), explore)
        times.append(found[0][0] if found else float("inf"))
    assert times[0] == float("inf") > times[-1]
    assert all(less >= more * (1 - 1e-9) for less, more in pairwise(times))


@searches
def test_memory_is_saved_only_when_it_is_tight(tight, search):
    speeds = (("fast", 4),)
    loose = search(tight(1024 * MIB, speeds), SearchControl(), 1)[0]
    assert not any(run.strategy.recompute for run in runs(loose))
    scarce = search(tight(int(0.7 * loose_peak(search, tight, speeds)), speeds), SearchControl(), 1)[0]
    assert any(
        run.strategy.recompute or run.strategy.sharding is Sharding.ZERO3 or run.strategy.tensor > 1
        for run in runs(scarce)
    )


@searches
def test_search_solves_one_device_and_more_devices_than_layers(tight, search):
    alone = search(tight(1024 * MIB, (("fast", 1),)), SearchControl(), 1)[0]
    assert len(alone.plan.devices) == 1
    many = search(tight(1024 * MIB, (("fast", 8),), layers=1, batch=8), SearchControl(), 1)[0]
    assert len(many.plan.devices) == 8
    assert len(many.plan.pipelines[0].stages) <= 3


@searches
def test_search_solves_device_counts_that_are_not_powers_of_two(tight, search):
    found = search(tight(1024 * MIB, (("fast", 3), ("slow", 3)), batch=6), SearchControl(), 2)
    assert all(len(candidate.plan.devices) == 6 for candidate in found)


@searches
def test_limits_are_kept(tight, search):
    problem = replace(tight(1024 * MIB), limits=Limits(max_tensor_degree=1, max_data_degree=2, max_pipeline_degree=2))
    for candidate in search(problem, SearchControl(), None):
        assert len(candidate.plan.pipelines[0].stages) <= 2
        assert all(run.strategy.tensor == 1 and run.strategy.data <= 2 for run in runs(candidate))


@searches
def test_search_is_deterministic_and_returns_a_plan_when_the_budget_is_spent(tight, search):
    problem = tight(10 * MIB)
    first, again = (search(problem, SearchControl(), 3) for _ in range(2))
    assert [c.plan for c in first] == [c.plan for c in again]
    told = []
    spent = search(problem, SearchControl(deadline_seconds=0.0, report=told.append), 3)
    assert spent
    assert spent[0].estimate.feasible
    assert 0 < told[0].done <= told[0].total


def test_partition_equals_brute_force():
    for seed in range(300):
        rng = np.random.default_rng(seed)
        layers, stages, options, m = (int(rng.integers(a, b)) for a, b in ((2, 8), (1, 4), (1, 4), (1, 9)))
        stages = min(stages, layers)
        shape = (stages, layers + 1, layers + 1, options)
        steady = rng.integers(1, 20, shape).astype(float)
        steady[rng.random(shape) < 0.2] = np.inf
        steady[:, np.tril_indices(layers + 1)[0], np.tril_indices(layers + 1)[1]] = np.inf
        last = np.where(np.isfinite(steady), steady + rng.integers(0, 9, shape), np.inf)
        sent = rng.integers(0, 5, (max(stages - 1, 0), layers + 1)).astype(float)
        least = np.inf
        for cuts in combinations(range(1, layers), stages - 1):
            ends = (*cuts, layers)
            spans = list(enumerate(zip((0, *ends), ends, strict=False)))
            exchanged = sum(sent[i, e] for i, e in enumerate(cuts))
            for limit in np.unique(steady[np.isfinite(steady)]):
                sums = [np.where(steady[i, a, b] <= limit, last[i, a, b], np.inf).min() for i, (a, b) in spans]
                least = min(least, (m - 1) * limit + sum(sums) + exchanged)
        found = best_partition(PartitionTables(steady, last, sent), m)
        assert (found.seconds if found else np.inf) == pytest.approx(least)


def test_best_batch_size_is_close_to_the_plain_loop(tight):
    problem = tight(12 * MIB, (("fast", 2),), layers=2)
    best_rate = 0.0
    for size in range(8, 65, 8):
        found = galvatron_base(replace(problem, global_batch_size=size), SearchControl(), 1)
        best_rate = max(best_rate, size / found[0].estimate.iteration_seconds)
    candidates, sizes = best_batch_size(problem, galvatron_base, SearchControl(), 1, largest=64)
    rate = dict(sizes.samples_per_second)[sizes.best]
    assert rate == pytest.approx(max(rate for _, rate in sizes.samples_per_second))
    assert rate >= 0.98 * best_rate
    assert all(size % 8 == 0 and size <= 64 for size, _ in sizes.samples_per_second)
    assert candidates[0].plan.global_batch_size == sizes.best


def test_every_batch_size_has_its_share_of_the_budget(tight):
    problem = tight(12 * MIB, (("fast", 2),), layers=2)
    candidate, *_ = galvatron_base(replace(problem, global_batch_size=8), SearchControl(), 1)
    asked = []

    def search(one, control, _top):
        asked.append((one.global_batch_size, control.deadline_seconds))
        return [candidate]  # as fast whatever the size, so sizes double

    best_batch_size(problem, search, SearchControl(deadline_seconds=60.0, clock=lambda: 0.0), 1, largest=64)
    assert asked == [(8, 10.0), (16, 12.0), (32, 15.0), (64, 20.0), (40, 15.0), (48, 20.0), (56, 30.0)]


def test_batch_size_is_rejected_when_it_never_fits(tight):
    with pytest.raises(NoFeasiblePlan):
        best_batch_size(tight(MIB), galvatron_base, SearchControl(), 1, largest=16)
