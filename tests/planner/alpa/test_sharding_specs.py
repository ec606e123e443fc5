"""Sharding specs and conversions between them, against the tables of Alpa's paper and every order of conversion."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import alpa_intra_oracle as oracle
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainwright.cost.operators.sharding_specs import (
    LAYOUTS,
    Axis,
    LinearSeconds,
    Resharding,
    all_gather,
    all_gathers,
    all_reduce,
    all_to_all,
    device_shares,
    divided_axes,
    layout_number,
    reduce_scatter,
)
from trainwright.runtime import CollectiveRatios
from trainwright.search.alpa.intra import LogicalMesh
from trainwright_worker.layers.operators.layouts import conversion_steps

MATRIX = (Axis.INNER, Axis.WIDTH)
R, ROW, COLUMN = Axis.NOTHING, Axis.INNER, Axis.WIDTH
MESH = LogicalMesh(("any",), (2, 4), (1e-5, 2e-6), (1e-9, 1e-10))


@pytest.mark.parametrize(
    ("held", "slices"),
    [
        (layout_number(R, R), [((0, 8), (0, 8))] * 4),
        (layout_number(ROW, COLUMN), [((0, 4), (0, 4)), ((0, 4), (4, 8)), ((4, 8), (0, 4)), ((4, 8), (4, 8))]),
        (layout_number(COLUMN, ROW), [((0, 4), (0, 4)), ((4, 8), (0, 4)), ((0, 4), (4, 8)), ((4, 8), (4, 8))]),
        (layout_number(ROW, R), [((0, 4), (0, 8))] * 2 + [((4, 8), (0, 8))] * 2),
        (layout_number(R, COLUMN), [((0, 8), (0, 4)), ((0, 8), (4, 8))] * 2),
        (layout_number(ROW, ROW), [((0, 2), (0, 8)), ((2, 4), (0, 8)), ((4, 6), (0, 8)), ((6, 8), (0, 8))]),
    ],
)
def test_specs_equal_table_1(held, slices):
    for device, (rows, columns) in zip(oracle.devices((2, 2)), slices, strict=True):
        found = [oracle.part(8, axis, held, device, (2, 2)) for axis in MATRIX]
        assert found == [slice(*rows), slice(*columns)]
        assert device_shares((2, 2))[held] == pytest.approx((rows[1] - rows[0]) * (columns[1] - columns[0]) / 64)


SIZE = 1e6


@pytest.mark.parametrize(
    ("source", "target", "seconds"),
    [
        (layout_number(R, R), layout_number(ROW, COLUMN), 0.0),
        (layout_number(ROW, R), layout_number(R, R), all_gather(MESH, 0).of(SIZE)),
        (layout_number(ROW, COLUMN), layout_number(ROW, R), all_gather(MESH, 1).of(SIZE / 2)),
        (layout_number(ROW, R), layout_number(COLUMN, R), all_gather(MESH, 0).of(SIZE / 2)),  # all-to-all(M / n0, 0)
        (
            layout_number(ROW, COLUMN),
            layout_number(ROW, ROW),
            all_gather(MESH, 1).of(SIZE / 8),
        ),  # all-to-all(M / (n0 n1), 1)
    ],
)
def test_conversion_costs_equal_table_2(source, target, seconds):
    found = Resharding(MESH)
    assert found.fixed_seconds[source, target] + SIZE * found.seconds_per_byte[source, target] == pytest.approx(seconds)


MESHES = st.builds(
    LogicalMesh,
    st.just(("any",)),
    st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 3, 8])),
    st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-3)),
    st.tuples(st.floats(0, 1e-8), st.floats(0, 1e-8)),
)


@given(MESHES, st.integers(0, LAYOUTS - 1), st.integers(0, LAYOUTS - 1), st.floats(1, 1e9))
def test_conversion_takes_the_cheaper_order(mesh, source, target, size):
    assume(min(mesh.shape) == 1 or not disorders_parts(source, target))
    found = Resharding(mesh).seconds(np.array(source), np.array(target), size)
    both = oracle.resharding_seconds(mesh, source, target, size) + oracle.resharding_seconds(mesh, target, source, size)
    assert found == pytest.approx(both, rel=1e-9, abs=1e-15)


def disorders_parts(source: int, target: int) -> bool:
    """Return whether dimension 0 begins or ends to shard an axis that dimension 1 shards before or after."""
    before, after = divided_axes(source), divided_axes(target)
    inner = {before[1], after[1]} - {Axis.NOTHING}
    return before[0] != after[0] and not inner.isdisjoint({before[0], after[0]})


PLACEMENTS = {int(Axis.NOTHING): -1, int(Axis.BATCH): 0, int(Axis.SEQUENCE): 1, int(Axis.WIDTH): 2}


def test_axis_that_moves_to_the_other_dimension_costs_the_messages_of_the_worker():
    mesh = LogicalMesh(("any",), (2, 2), (0.0, 0.0), (1e-9, 1e-9))
    found = Resharding(mesh)
    for source, target in permutations(product(PLACEMENTS, repeat=2), 2):
        placed = [(PLACEMENTS[first], PLACEMENTS[second]) for first, second in (source, target)]
        layout, expected = placed[0], 0.0
        for step in conversion_steps(mesh.shape, (8, 8, 8), *placed):
            after = step.after(layout)
            expected += sent_seconds(mesh, step.dimension, layout, after) + sent_seconds(
                mesh, step.dimension, after, layout
            )
            layout = after
        seconds = found.seconds(np.array(layout_number(*source)), np.array(layout_number(*target)), SIZE)
        assert seconds == pytest.approx(expected), (source, target)


def sent_seconds(mesh: LogicalMesh, dimension: int, layout: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the seconds of changing one dimension of a mesh of 2 × 2: an exchange of a part, or its gathering."""
    if layout[dimension] < 0:
        return 0.0
    part = SIZE / 2 ** sum(placement >= 0 for placement in layout)
    return all_to_all(mesh, dimension).of(part) if after[dimension] >= 0 else all_gather(mesh, dimension).of(2 * part)


@pytest.mark.parametrize("other", [R, ROW])
def test_dimension_1_gathers_an_axis_while_dimension_0_changes_its_shards(other):
    whole, both, behind = layout_number(COLUMN, R), layout_number(COLUMN, COLUMN), layout_number(other, COLUMN)
    found = Resharding(MESH)
    alone = layout_number(other, R)
    steps = [(both, whole), (whole, alone)]
    expected = sum(float(found.one_way_seconds(*step, SIZE)) for step in steps)
    assert found.one_way_seconds(both, behind, SIZE) == pytest.approx(expected)
    assert found.one_way_seconds(both, alone, SIZE) == pytest.approx(expected)
    assert found.one_way_seconds(alone, both, SIZE) == pytest.approx(float(found.one_way_seconds(alone, whole, SIZE)))
    placement = {int(R): -1, int(ROW): 0, int(COLUMN): 1}
    layouts = [tuple(placement[axis] for axis in divided_axes(number)) for number in (both, behind)]
    dimensions = [step.dimension for step in conversion_steps((2, 2), (8, 8), *layouts)]
    assert dimensions == [1, 0, 1]  # the worker's own


@given(MESHES)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(mesh):
    for dimensions in ((), (0,), (1,), (0, 1)):
        assert all_reduce(mesh, dimensions).of(1e6) == pytest.approx(2 * reduce_scatter(mesh, dimensions).of(1e6))
    assert all_reduce(mesh, (0,)).of(1e6) == pytest.approx(2 * all_gather(mesh, 0).of(1e6))


def test_measured_ratios_scale_each_collective_on_its_dimension():
    ratios = (CollectiveRatios(2.0, 3.0, 4.0), CollectiveRatios())
    slow = replace(MESH, ratios=ratios)
    for collective, dimensions, ratio in (
        (all_reduce, (0,), 2.0),
        (all_gathers, (0,), 3.0),
        (reduce_scatter, (0,), 4.0),
        (all_reduce, (1,), 1.0),
    ):
        assert collective(slow, dimensions).of(1e6) == pytest.approx(ratio * collective(MESH, dimensions).of(1e6))
    exchanged = layout_number(ROW, R), layout_number(COLUMN, R)
    seconds = [Resharding(mesh).seconds(*map(np.array, exchanged), 1e6) for mesh in (MESH, slow)]
    assert seconds[1] == pytest.approx(3.0 * seconds[0])  # all-to-alls that were not measured take that of all-gathers
    measured = replace(MESH, ratios=(CollectiveRatios(2.0, 3.0, 4.0, 5.0), CollectiveRatios()))
    assert Resharding(measured).seconds(*map(np.array, exchanged), 1e6) == pytest.approx(5.0 * seconds[0])


def test_all_to_alls_take_the_links_of_their_messages():
    exchanges = LinearSeconds(1e-4, 2e-9), LinearSeconds()
    own = replace(MESH, exchanges=exchanges, ratios=(CollectiveRatios(all_to_all=1.5), CollectiveRatios()))
    assert all_to_all(own, 0).of(1e6) == pytest.approx(1.5 * (1e-4 + 2e-3))
    assert all_gather(own, 0) == all_gather(MESH, 0)


def test_reduction_over_both_axes_crosses_slow_links_with_shards():
    assert all_reduce(MESH, (0, 1)).of(8e6) == pytest.approx(
        all_reduce(MESH, (1,)).of(8e6) + all_reduce(MESH, (0,)).of(2e6)
    )


@pytest.mark.parametrize("wrong", [{"shape": (0, 1)}, {"accelerators": ()}, {"latency_seconds": (-1.0, 0.0)}])
def test_invalid_mesh_is_refused(wrong):
    with pytest.raises(ValueError, match="mesh"):
        LogicalMesh(**{"accelerators": ("any",), "shape": (1, 1), **wrong})
