"""Simulator of plans for OPT-350M on small synthetic tables, checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opt_350m_simulator import Simulator
from opt_350m_splits import best_fitting
from opt_350m_tables import BUCKET_BYTES, VARIABLE, Tables, ring_seconds
from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.plan import LayerRun, Pipeline, Plan, Stage
from trainwright.profile_imports.bandwidth_curves import BandwidthCurve
from trainwright.strategy import Sharding, Strategy

SLOW, FAST = "V100-16", "A100-40"
BETWEEN = {1: 1e9, 2: 2e9, 4: 4e9}
"""Bytes per second between two nodes, by the devices of each that take part."""
VALUES = (1_000_000, 2_000_000, 3_000_000)
"""Weights of the three layers."""
OUTPUTS = (250_000, 500_000, 750_000)
GIB = 2**30


def seconds(name: str, rows: int, tensor: int, layer: int) -> list[float]:
    """Forward, backward and update seconds, not proportional to the rows."""
    pace = {SLOW: 3.0, FAST: 1.0}[name] * (layer + 1) / tensor
    return [pace * (1 + rows), pace * (2 + 3 * rows), 0.5 * pace / (layer + 1)]


def write(folder: Path, *, kept_values: int) -> Tables:
    layers = {
        str(tensor): {
            str(layer): {
                "params_floats": VALUES[layer] // tensor,
                "act_output_floats": OUTPUTS[layer],
                "act_mem_floats": kept_values * (layer + 1) // tensor,
            }
            for layer in range(3)
        }
        for tensor in (1, 2)
    }
    rates = {
        name: {
            str(mine): {
                other: {str(theirs): [[0.0, 0.0, BETWEEN[min(mine, theirs)] / 1e9], 0.0] for theirs in BETWEEN}
                for other in (SLOW, FAST)
            }
            for mine in BETWEEN
        }
        for name in (SLOW, FAST)
    }
    (folder / "layers.json").write_text(json.dumps(layers))
    (folder / "inter_node_bandwidths.json").write_text(json.dumps(rates))
    for name in (SLOW, FAST):
        (folder / name).mkdir(exist_ok=True)
        table = {
            str(rows): {
                str(tensor): {str(layer): seconds(name, rows, tensor, layer) for layer in range(3)} for tensor in (1, 2)
            }
            for rows in (1, 2, 4)
        }
        (folder / name / "profile.json").write_text(json.dumps(table))
    return Tables(folder)


CLUSTER = Cluster(
    (Accelerator(SLOW, 16 * GIB), Accelerator(FAST, 40 * GIB)),
    tuple(Node(f"{name}-{n}", name, 4, Port(0, 1e9), Port(0, 1e9)) for name in (SLOW, FAST) for n in range(2)),
)


@pytest.fixture
def simulator(tmp_path):
    return Simulator(write(tmp_path, kept_values=1_000_000), CLUSTER)


def stage(name: str, tensor: int, rows: tuple[int, ...], first: int, end: int, **more) -> Stage:
    devices = [Device(f"{name}-{n}", slot) for n in range(2) for slot in range(4)][: tensor * len(rows)]
    return Stage(tuple(devices), (LayerRun(first, end - first, Strategy(tensor, len(rows), **more), rows),))


def plan(*stages: Stage, micro_batches: int = 4) -> Plan:
    rows = sum(stages[0].layers[0].rows)
    return Plan(3, micro_batches * rows, (Pipeline(micro_batches, rows, stages),))


def test_two_stages_by_hand(simulator):
    verdict = simulator.judge(plan(stage(SLOW, 1, (2, 2), 0, 1), stage(FAST, 2, (2, 2), 1, 3)))
    slow = sum(seconds(SLOW, 2, 1, 0)[:2])
    fast = sum(sum(seconds(FAST, 2, 2, layer)[:2]) for layer in (1, 2))
    # Outputs leave the first stage once; the last one's gradients, of its own first layer's size, count twice.
    sent, returned = 2 * 4 * OUTPUTS[0] / 1e9, 2 * (2 * 4 * OUTPUTS[1] / 1e9)
    update = max(seconds(SLOW, 2, 1, 0)[2], seconds(FAST, 2, 2, 1)[2])
    pipeline = 3 * max(slow + sent, fast + returned) + slow + fast + sent + returned + update
    rings = max(4 * VALUES[0], 4 * (VALUES[1] + VALUES[2]) / 2) / 1e9  # 2 (n − 1) / n = 1
    assert verdict.pipeline_seconds == pytest.approx(pipeline)
    assert verdict.gradient_seconds == pytest.approx(rings)
    assert verdict.per_second == pytest.approx(1 / (pipeline + rings))
    assert verdict.fits
    assert verdict.unmodelled == ()


def test_stages_in_the_middle_send_both_ways(simulator):
    verdict = simulator.judge(
        plan(stage(SLOW, 1, (2,), 0, 1), stage(FAST, 1, (2,), 1, 2), _on_second_node(2, 3), micro_batches=1)
    )
    compute = sum(seconds(SLOW, 2, 1, 0)[:2]) + sum(sum(seconds(FAST, 2, 1, layer)[:2]) for layer in (1, 2))
    outputs = [2 * 4 * values / 1e9 for values in OUTPUTS]
    sending = outputs[0] + (outputs[1] + outputs[1]) + 2 * outputs[2]
    assert verdict.seconds == pytest.approx(compute + sending + seconds(SLOW, 2, 1, 0)[2])


def _on_second_node(first: int, end: int) -> Stage:
    return Stage((Device(f"{FAST}-1", 0),), (LayerRun(first, end - first, Strategy(1, 1), (2,)),))


def test_memory_counts_the_later_stages(tmp_path):
    # 24 bytes a value and 2 GB; of two stages the first holds two micro-batches of two rows, 4 bytes a value.
    most = int((16 * GIB - 2e9 - 24 * VALUES[0]) / (2 * 2 * 4))
    two = plan(stage(SLOW, 1, (2,), 0, 1), stage(FAST, 1, (2,), 1, 3))
    verdicts = [Simulator(write(tmp_path, kept_values=kept), CLUSTER).judge(two) for kept in (most, most + 1)]
    assert [verdict.fits for verdict in verdicts] == [True, False]
    assert verdicts[1].memory_shortfall_bytes - verdicts[0].memory_shortfall_bytes == pytest.approx(16)


def test_recomputed_layers_cost_a_forward_and_save_memory(tmp_path):
    tables = write(tmp_path, kept_values=1_000_000_000)
    plain = Simulator(tables, CLUSTER).judge(plan(stage(FAST, 1, (2,), 0, 3)))
    again = Simulator(tables, CLUSTER).judge(plan(stage(FAST, 1, (2,), 0, 3, recompute=True)))
    forwards = 4 * sum(seconds(FAST, 2, 1, layer)[0] for layer in range(3))
    assert again.seconds == pytest.approx(plain.seconds + forwards)
    assert not plain.fits
    assert again.fits
    assert again.unmodelled == ("recomputed layers",)


def test_sharded_optimizer_state_is_divided(simulator):
    plain = simulator.judge(plan(stage(FAST, 1, (1, 1), 0, 3)))
    sharded = simulator.judge(plan(stage(FAST, 1, (1, 1), 0, 3, sharding=Sharding.ZERO1)))
    assert plain.memory_shortfall_bytes - sharded.memory_shortfall_bytes == pytest.approx(4 * sum(VALUES))
    assert sharded.seconds == plain.seconds
    with pytest.raises(ValueError, match="does not know weights that are sharded"):
        simulator.judge(plan(stage(FAST, 1, (1, 1), 0, 3, sharding=Sharding.ZERO3)))


def test_rows_between_measured_ones_are_interpolated(simulator):
    three = simulator.judge(plan(stage(FAST, 1, (3,), 0, 3)))
    two, four = (simulator.judge(plan(stage(FAST, 1, (rows,), 0, 3))) for rows in (2, 4))
    assert three.seconds == pytest.approx((two.seconds + four.seconds) / 2)
    assert three.unmodelled == ("rows that were not measured",)
    eight = simulator.judge(plan(stage(FAST, 1, (8,), 0, 3)))
    assert eight.seconds == pytest.approx(four.seconds + 2 * (four.seconds - two.seconds))


def test_the_slowest_replica_decides(simulator):
    uneven = simulator.judge(plan(stage(FAST, 1, (1, 4), 0, 3)))
    even = simulator.judge(plan(stage(FAST, 1, (4, 4), 0, 3)))
    assert uneven.seconds == pytest.approx(even.seconds)
    assert uneven.unmodelled == ("replicas with different rows",)


def test_pipelines_reduce_whole_gradients(simulator):
    own = Pipeline(4, 2, (stage(FAST, 2, (2,), 0, 3),))
    other = Pipeline(1, 2, (stage(SLOW, 2, (2,), 0, 3),))
    alone = simulator.judge(Plan(3, 8, (own,)))
    both = simulator.judge(Plan(3, 10, (own, other)))
    assert both.pipeline_seconds == pytest.approx(alone.pipeline_seconds)
    assert both.gradient_seconds == pytest.approx(alone.gradient_seconds + 4 * sum(VALUES) / 1e9)
    assert both.unmodelled == ("pipelines with different shares of the batch",)


def test_runs_of_layers_with_their_own_degrees_go_one_after_the_other(simulator):
    devices = tuple(Device(f"{FAST}-0", slot) for slot in range(2))
    mixed = Stage(devices, (LayerRun(0, 1, Strategy(2, 1), (2,)), LayerRun(1, 2, Strategy(1, 2), (1, 1))))
    verdict = simulator.judge(plan(mixed))
    one = sum(seconds(FAST, 2, 2, 0)[:2]) + sum(sum(seconds(FAST, 1, 1, layer)[:2]) for layer in (1, 2))
    assert verdict.pipeline_seconds == pytest.approx(4 * one + seconds(FAST, 2, 2, 0)[2])
    assert verdict.gradient_seconds == pytest.approx(4 * (VALUES[1] + VALUES[2]) / 1e9)
    assert verdict.unmodelled == ("degrees that change inside a stage",)
    # Two runs of one strategy cost the same as one run.
    whole = simulator.judge(plan(stage(FAST, 1, (1, 1), 0, 3)))
    cut = Stage(devices, (LayerRun(0, 2, Strategy(1, 2), (1, 1)), LayerRun(2, 1, Strategy(1, 2), (1, 1))))
    halves = simulator.judge(plan(cut))
    assert (halves.seconds, halves.memory_shortfall_bytes) == pytest.approx(
        (whole.seconds, whole.memory_shortfall_bytes)
    )
    assert halves.unmodelled == ()


def test_degrees_that_were_not_measured_are_refused(simulator):
    with pytest.raises(ValueError, match="not measured at tensor degree 4"):
        simulator.judge(plan(stage(FAST, 4, (2,), 0, 3)))


def test_the_best_of_an_enumeration_fits(tmp_path):
    simulator = Simulator(write(tmp_path, kept_values=600_000_000), CLUSTER)
    plans = [
        plan(stage(FAST, tensor, (rows,), 0, 3), micro_batches=8 // rows) for tensor in (1, 2, 4) for rows in (1, 2, 4)
    ]
    best = best_fitting(simulator, iter(plans))
    assert best is not None
    judged = [simulator.judge(one) for one in plans[:6]]
    assert not all(verdict.fits for verdict in judged)
    assert best[1].seconds == min(verdict.seconds for verdict in judged if verdict.fits)


@given(st.integers(2, 64), st.floats(1e5, 4 * BUCKET_BYTES))
def test_rings_are_split_into_buckets(members, size):
    flat = ring_seconds(size, members, BandwidthCurve((0.0, 0.0, 2.0)))
    assert flat == pytest.approx(2 * (members - 1) / members * size / 2e9)
    rising = BandwidthCurve((0.0, 0.0001, 2.0))
    full = int(size // BUCKET_BYTES)
    parts = [BUCKET_BYTES] * full + [size - full * BUCKET_BYTES]
    expected = sum(2 * (members - 1) * rising.seconds(part / members) for part in parts if part)
    assert ring_seconds(size, members, rising) == pytest.approx(expected)
    assert ring_seconds(size, 1, rising) == 0


@given(st.floats(0.5, 10), st.floats(0, 0.3))
def test_ports_follow_the_curve(constant, slope):
    curve = BandwidthCurve((0.0, slope * constant, constant))
    port = curve.port((2e6, 64e6))
    assert port.latency_seconds >= 0
    for size in (2e6, 8e6, 20e6, 64e6):
        told = port.latency_seconds + size / port.bandwidth_bytes_per_second
        assert told == pytest.approx(curve.seconds(size), rel=0.12)


def test_missing_tables_are_reported_with_the_variable_to_set(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ValueError, match=f"set {VARIABLE}"):
        Tables.of_environment()
