"""Alpa's stage DP and clustering against enumeration."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from alpa_inter_oracle import Case, Choice, algorithm_1, best_clusters, choices_of, every_pipeline, least_seconds

from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.search.alpa.inter_operator_dp import StageBoundaryCosts, no_boundary_costs
from trainwright.search.alpa.layer_clusters import cluster_ends, cluster_layers
from trainwright.search.alpa.stage_candidates import (
    UNLIMITED_STAGES,
    StageCandidates,
    concatenate_candidates,
    pareto_candidates,
)
from trainwright.search.alpa.submeshes import Block, DeviceChain
from trainwright.search.alpa.t_max_search import TMaxSearch

Random = random.Random
Instance = tuple[StageCandidates, list[Choice], int, int]


def drawn_crossings(pick: Random, layers: int, devices: int) -> StageBoundaryCosts:
    """Messages that take noticeable time."""
    sent = np.array([0.0, *(pick.uniform(0.0, 1.0) for _ in range(layers - 1)), 0.0])
    paces, latencies = (
        np.array([[pick.choice([0.1, 0.5, 1.0]) for _ in range(devices + 1)] for _ in range(2)]) for _ in range(2)
    )
    return StageBoundaryCosts(sent, paces, latencies)


def crossed(crossings: StageBoundaryCosts) -> tuple[Any, ...]:
    return crossings.message_bytes.tolist(), crossings.seconds_per_byte.tolist(), crossings.latency_seconds.tolist()


def instance(pick: Random, *, tight: bool, blocks: int = 1) -> Instance:
    """Stages on one or two types of devices; times grow with the layers and fall, unevenly, with the devices."""
    layers = pick.randint(1, 5)
    kinds = tuple(
        Block(f"type-{number}", tuple(f"{number}-{node}" for node in range(pick.randint(1, 2))), pick.choice([1, 2, 4]))
        for number in range(blocks)
    )
    line = DeviceChain(kinds)
    work = [pick.uniform(0.2, 3.0) for _ in range(layers)]
    speed = {kind.accelerator: pick.uniform(0.5, 2.0) for kind in kinds}
    found = []
    known: dict[object, StageCandidates] = {}
    for number, berth in enumerate(line.slots()):
        mesh = berth.submesh
        if mesh not in known:
            pace = min(speed[name] for name in mesh.accelerators)
            options = pick.randint(1, 3)
            seconds = np.full((options, layers + 1, layers + 1), np.inf)
            most = np.zeros(seconds.shape, dtype=np.int64)
            for option in range(options):
                for first in range(layers):
                    for end in range(first + 1, layers + 1):
                        efficiency = pick.uniform(0.4, 1.0)
                        seconds[option, first, end] = sum(work[first:end]) / (pace * mesh.size * efficiency)
                        most[option, first, end] = max(pick.randint(-2, 3), 0) if tight else UNLIMITED_STAGES
            known[mesh] = pareto_candidates(
                seconds, most, mesh.size, np.array([pick.choice([0.5, 1.0, 2.0]) for _ in range(options)])
            )
        found.append(known[mesh].in_slot(berth.min_devices_before, berth.max_devices_before, number))
    edges = concatenate_candidates(found)
    return edges, choices_of(edges), layers, line.size


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("tight", [False, True])
def test_best_pipeline_equals_brute_force(*, tight: bool, blocks: int) -> None:
    pick = random.Random(17 * blocks + tight)
    solved = refused = 0
    while solved + refused < 60:
        edges, choices, layers, devices = instance(pick, tight=tight, blocks=blocks)
        if devices > 8 or len(choices) > 220:
            continue
        micro_batches, max_stages = pick.choice([1, 2, 3, 8, 64]), pick.choice([1, 2, 3, layers])
        crossings = (
            drawn_crossings(pick, layers, devices) if pick.random() < 0.5 else no_boundary_costs(layers, devices)
        )
        case = Case(choices, layers, devices, micro_batches, min(max_stages, layers), *crossed(crossings))
        expected = least_seconds(case)
        found = TMaxSearch(edges, crossings, micro_batches, max_stages).solve()
        if np.isinf(expected):
            assert found == []
            refused += 1
            continue
        solved += 1
        assert found[0].seconds(micro_batches) == pytest.approx(expected, rel=1e-9)
        stages = [choices[number] for number in found[0].candidates]
        assert [stage.first for stage in stages] == [0, *(stage.end for stage in stages[:-1])]
        assert stages[-1].end == layers
        assert sum(stage.size for stage in stages) == devices
        assert all(stage.max_stages >= len(stages) - place for place, stage in enumerate(stages))
        assert algorithm_1(case) == pytest.approx(expected)
    assert solved >= 20
    assert refused or not tight


def test_gap_bounds_the_distance_to_the_optimum() -> None:
    pick = random.Random(5)
    checked = 0
    while checked < 40:
        edges, _, layers, devices = instance(pick, tight=True)
        if devices > 8:
            continue
        exact = TMaxSearch(edges, no_boundary_costs(layers, devices), 8, layers).solve()
        rough = TMaxSearch(edges, no_boundary_costs(layers, devices), 8, layers, gap_ratio=0.1, keep_ratio=0.2).solve()
        assert bool(exact) == bool(rough)
        if exact:
            assert rough[0].seconds(8) <= exact[0].seconds(8) / (1 - 0.1) * (1 + 1e-9)
            times = [one.seconds(8) for one in rough]
            assert times == sorted(times)
            assert times[-1] <= times[0] * 1.2 * (1 + 1e-9)
            assert len({len(one.candidates) for one in rough}) == len(rough)
            assert (
                TMaxSearch(edges, no_boundary_costs(layers, devices), 8, layers).solve(exact[0].seconds(8) * 0.99) == []
            )
            checked += 1


def test_more_even_pipelines_are_offered_among_ties_of_eq_2() -> None:
    pick = random.Random(7)
    improved = 0
    for _ in range(20):
        work = [float(pick.randint(1, 6)) for _ in range(8)]
        sums = np.concatenate([[0.0], np.cumsum(work)])
        seconds = sums[None, :] - sums[:, None]
        seconds[seconds <= 0] = np.inf
        edges = pareto_candidates(seconds[None], np.where(np.isfinite(seconds), UNLIMITED_STAGES, 0)[None], 1).in_slot(
            0, 3, 0
        )
        choices = choices_of(edges)
        found = TMaxSearch(edges, no_boundary_costs(8, 4), 8, 8, evened_pipelines=1).solve()
        squares = [sum(choices[number].seconds ** 2 for number in one.candidates) for one in found]
        longest = found[0].longest_seconds
        all_pipelines = every_pipeline(Case(choices, 8, 4, 8, 4))
        alike = [stages for stages in all_pipelines if max(stage.seconds for stage in stages) <= longest]
        assert min(squares) == min(sum(stage.seconds**2 for stage in stages) for stages in alike)
        assert all(one.seconds(8) == found[0].seconds(8) for one in found)
        improved += len(found) > 1
    assert improved


def test_only_options_on_the_front_of_time_and_memory_are_left() -> None:
    seconds = np.full((4, 2, 2), np.inf)
    most = np.zeros((4, 2, 2), dtype=np.int64)
    seconds[:, 0, 1] = [3.0, 1.0, 2.0, 4.0]
    most[:, 0, 1] = [2, 1, 1, 5]
    found = pareto_candidates(seconds, most, 1)
    assert sorted(
        zip(found.seconds.tolist(), found.max_remaining_stages.tolist(), found.option.tolist(), strict=True)
    ) == [
        (1.0, 1, 1),
        (3.0, 2, 0),
        (4.0, 5, 3),
    ]


def test_clusters_equal_brute_force() -> None:
    pick = random.Random(3)
    compared = 0
    for _ in range(200):
        layers = pick.randint(2, 9)
        clusters = pick.randint(1, layers)
        flops = [pick.choice([0.0, 1.0, 2.0, 5.0]) + pick.random() for _ in range(layers)]
        received = [0.0, *(pick.choice([1.0, 2.0, 3.0]) for _ in range(layers - 1))]
        spread = pick.choice([0.2, 0.5, 1.0])
        expected = best_clusters(flops, received, clusters, spread)
        bounds = (0, *cluster_layers(np.array(flops), np.array(received), clusters, spread))
        assert len(bounds) == clusters + 1
        assert all(a < b for a, b in pairwise(bounds))
        assert bounds[-1] == layers
        if expected is not None:
            compared += 1
            sums = [sum(flops[a:b]) for a, b in pairwise(bounds)]
            assert max(received[a] for a in bounds[:-1]) == expected[0]
            assert sum(one * one for one in sums) == pytest.approx(expected[1])
    assert compared > 60


@pytest.mark.parametrize(("layers", "clusters"), [(6, 8), (62, 64), (63, 64), (126, 64), (256, 64)])
def test_many_layers_become_few_even_clusters(layers: int, clusters: int) -> None:
    model = Model.of(Gpt(layers, 64, 4, 32, 100))
    ends = cluster_ends(model)
    assert len(ends) == min(clusters, layers + 2)
    assert ends[-1] == layers + 2
    sizes = np.diff([0, *ends])
    assert sizes.min() >= 1
    assert sizes.max() <= max(1, 1.5 * (layers + 2) / clusters + 2)  # ends weigh little and join a block


def test_table_stays_small_on_a_large_cluster(make_slicing: Callable[[int], TMaxSearch]) -> None:
    """The requested table does not grow with the number of t_max candidates, of which there are thousands."""
    slicing = make_slicing(24)
    assert len(np.unique(slicing.candidates.seconds)) > 1000
    best = slicing.solve()[0]
    assert best.seconds(64) <= 65 * best.longest_seconds * 2


@pytest.fixture
def make_slicing() -> Callable[[int], TMaxSearch]:
    def made(layers: int) -> TMaxSearch:
        pick = np.random.default_rng(1)
        block = Block("type", tuple(str(number) for number in range(8)), 4)
        line = DeviceChain((block,))
        work = np.concatenate([[0.0], np.cumsum(pick.uniform(0.9, 1.1, layers))])
        spans = work[None, :] - work[:, None]
        found = []
        for number, berth in enumerate(line.slots()):
            lost = pick.uniform(1.0, 1.5, spans.shape)
            seconds = np.where(spans > 0, spans * lost / berth.submesh.size, np.inf)
            most = np.where(spans > 0, pick.integers(2, 20, spans.shape), 0)
            found.append(
                pareto_candidates(seconds[None], most[None], berth.submesh.size).in_slot(
                    berth.min_devices_before, berth.max_devices_before, number
                )
            )
        return TMaxSearch(concatenate_candidates(found), no_boundary_costs(layers, line.size), 64, layers)

    return made
