"""Relations between the estimates of two related settings, for every plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from bound_oracle import lower_bound_seconds
from hypothesis import assume, given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Accelerator, Cluster, Device, Link, Node, Port
from trainwright.cost.context import CostContext
from trainwright.cost.estimate import Estimate, estimate_with_context
from trainwright.families import Gpt
from trainwright.layer import Dtype
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, Schedule, Stage
from trainwright.profiles import LayerProfile, Profiles
from trainwright.runtime import Runtime
from trainwright.strategy import RankOrder, Sharding, Strategy

MODEL = Model.of(Gpt(4, 64, 4, 32, 500), Dtype.FLOAT16)
LAYERS = len(MODEL.layers)
SPEED = {"swift": 1.0, "slow": 2.3}
PROFILES = Profiles(
    tuple(
        LayerProfile(
            name,
            kind.name,
            tensor,
            rows,
            1e-3 * (1 + rows / tensor) * slow,
            2e-3 * (1 + rows) * slow,
            1e-3,
            1000 * rows,
            0,
        )
        for name, slow in SPEED.items()
        for kind in MODEL.kinds
        for tensor in ((1, 2, 4) if kind.is_tensor_parallel else (1,))
        for rows in (1, 4)
    )
)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Four nodes of two real devices; links by ports, some of them given one by one."""
    rate = st.floats(1e5, 1e8)
    nodes = tuple(
        Node(
            f"n{index}",
            draw(st.sampled_from(sorted(SPEED))),
            2,
            Port(draw(st.floats(0, 1e-3)), draw(rate)),
            Port(draw(st.floats(0, 1e-4)), draw(rate)),
        )
        for index in range(4)
    )
    pairs = [(a.name, b.name) for a in nodes for b in nodes]
    given_ones = draw(st.lists(st.sampled_from(pairs), max_size=4, unique=True))
    links = tuple(Link(*pair, draw(st.floats(0, 1e-3)), draw(rate)) for pair in given_ones)
    return Cluster(tuple(Accelerator(name, 10**7) for name in SPEED), nodes, links)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    order = draw(st.permutations([Device(f"n{i}", slot) for i in range(4) for slot in range(2)]))
    parts = draw(st.sampled_from([[order], [order[:4], order[4:]]]))
    pipelines = []
    batch = 0
    for part in parts:
        stages = draw(st.sampled_from([s for s in (1, 2, 4) if s <= len(part)]))
        rows = 4
        size = len(part) // stages
        ends = draw(st.lists(st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1, unique=True))
        made = []
        for number, (first, end) in enumerate(pairwise((0, *sorted(ends), LAYERS))):
            cut = draw(st.integers(first, end - 1))
            runs = []
            for low, high in ((first, cut), (cut, end)):
                if high > low:
                    data = draw(st.sampled_from([d for d in (1, 2, 4) if size % d == 0 and size // d <= 4]))
                    runs.append(
                        LayerRun(
                            low,
                            high - low,
                            Strategy(
                                size // data,
                                data,
                                draw(st.sampled_from(RankOrder)),
                                draw(st.sampled_from(Sharding)),
                                draw(st.booleans()),
                            ),
                            (rows // data,) * data if data != 2 else draw(st.sampled_from([(2, 2), (1, 3)])),
                        )
                    )
            made.append(Stage(tuple(part[number * size : (number + 1) * size]), tuple(runs)))
        batches = draw(st.integers(1, 8))
        batch += batches * rows
        pipelines.append(Pipeline(batches, rows, tuple(made)))
    return Plan(LAYERS, batch, tuple(pipelines), draw(st.sampled_from(Schedule)))


runtimes = st.builds(
    Runtime,
    overlaps_gradients=st.booleans(),
    overlap_slowdown_ratio=st.sampled_from([1.0, 1.3, 2.0]),
    constant_seconds=st.sampled_from([0.0, 1e-3]),
    hides_transfers=st.booleans(),
)
cases = st.builds(lambda cluster, runtime: CostContext(MODEL, cluster, PROFILES, runtime=runtime), clusters(), runtimes)


def assert_same(one: Estimate, other: Estimate) -> None:
    assert one.iteration_seconds == pytest.approx(other.iteration_seconds, rel=1e-9)
    assert one.memory_parts == other.memory_parts


@examples(80)
@given(setting=cases, plan=plans(), names=st.permutations(["w", "x", "y", "z"]), order=st.permutations(range(4)))
def test_renaming_and_reordering_nodes_changes_nothing(
    setting: CostContext, plan: Plan, names: list[str], order: list[int]
) -> None:
    name = dict(zip(("n0", "n1", "n2", "n3"), names, strict=True))
    cluster = setting.cluster
    nodes = tuple(replace(cluster.nodes[i], name=name[cluster.nodes[i].name]) for i in order)
    links = tuple(replace(k, source=name[k.source], target=name[k.target]) for k in reversed(cluster.links))
    pipelines = tuple(
        replace(
            p,
            stages=tuple(replace(s, devices=tuple(Device(name[d.node], d.slot) for d in s.devices)) for s in p.stages),
        )
        for p in plan.pipelines
    )
    renamed = replace(setting, cluster=Cluster(tuple(reversed(cluster.accelerators)), nodes, links))
    assert_same(
        estimate_with_context(replace(plan, pipelines=pipelines), renamed), estimate_with_context(plan, setting)
    )


@examples(80)
@given(setting=cases, plan=plans())
def test_iteration_doubles_when_all_times_double(setting: CostContext, plan: Plan) -> None:
    def slower(port: Port | None) -> Port | None:
        return port and Port(2 * port.latency_seconds, port.bandwidth_bytes_per_second / 2)

    cluster = setting.cluster
    nodes = tuple(replace(n, network=slower(n.network), inside=slower(n.inside)) for n in cluster.nodes)
    links = tuple(
        replace(k, latency_seconds=2 * k.latency_seconds, bandwidth_bytes_per_second=k.bandwidth_bytes_per_second / 2)
        for k in cluster.links
    )
    layers = tuple(
        replace(
            one,
            forward_seconds=2 * one.forward_seconds,
            backward_seconds=2 * one.backward_seconds,
            update_seconds=2 * one.update_seconds,
        )
        for one in PROFILES.layers
    )
    runtime = replace(setting.runtime, constant_seconds=2 * setting.runtime.constant_seconds)
    doubled = CostContext(MODEL, Cluster(cluster.accelerators, nodes, links), Profiles(layers), runtime=runtime)
    before, after = estimate_with_context(plan, setting), estimate_with_context(plan, doubled)
    assert after.iteration_seconds == pytest.approx(2 * before.iteration_seconds, rel=1e-6)
    assert lower_bound_seconds(plan, setting) <= before.iteration_seconds * (1 + 1e-9)
    assert lower_bound_seconds(plan, doubled) == pytest.approx(2 * lower_bound_seconds(plan, setting), rel=1e-9)


@dataclass(frozen=True)
class Better:
    """A setting with one thing improved."""

    name: str
    change: Callable[[CostContext, int, float], CostContext]


def faster_port(setting: CostContext, which: int, factor: float, name: str) -> CostContext:
    nodes = list(setting.cluster.nodes)
    port = getattr(nodes[which % 4], name)
    faster = Port(port.latency_seconds / factor, port.bandwidth_bytes_per_second * factor)
    nodes[which % 4] = replace(nodes[which % 4], **{name: faster})
    return replace(setting, cluster=replace(setting.cluster, nodes=tuple(nodes)))


def faster_nic(setting: CostContext, which: int, factor: float) -> CostContext:
    return faster_port(setting, which, factor, "network")


def faster_inside(setting: CostContext, which: int, factor: float) -> CostContext:
    return faster_port(setting, which, factor, "inside")


def faster_link(setting: CostContext, which: int, factor: float) -> CostContext:
    links = list(setting.cluster.links)
    assume(links)
    link = links[which % len(links)]
    links[which % len(links)] = replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * factor)
    return replace(setting, cluster=replace(setting.cluster, links=tuple(links)))


def faster_device(setting: CostContext, which: int, factor: float) -> CostContext:
    accelerator = sorted(SPEED)[which % 2]
    layers = tuple(
        replace(one, forward_seconds=one.forward_seconds / factor, backward_seconds=one.backward_seconds / factor)
        if one.accelerator == accelerator
        else one
        for one in PROFILES.layers
    )
    return replace(setting, profiles=Profiles(layers))


def more_memory(setting: CostContext, which: int, factor: float) -> CostContext:
    accelerators = list(setting.cluster.accelerators)
    one = accelerators[which % 2]
    accelerators[which % 2] = replace(one, memory_bytes=int(one.memory_bytes * factor))
    return replace(setting, cluster=replace(setting.cluster, accelerators=tuple(accelerators)))


@pytest.mark.parametrize("improve", [faster_nic, faster_inside, faster_link, faster_device, more_memory])
@examples(60)
@given(setting=cases, plan=plans(), which=st.integers(0, 3), factor=st.sampled_from([1.1, 2.0, 10.0]))
def test_better_hardware_never_makes_a_plan_slower_or_too_large(
    improve: Callable[[CostContext, int, float], CostContext],
    setting: CostContext,
    plan: Plan,
    which: int,
    factor: float,
) -> None:
    before, after = estimate_with_context(plan, setting), estimate_with_context(plan, improve(setting, which, factor))
    assert after.iteration_seconds <= before.iteration_seconds * (1 + 1e-7)
    assert after.feasible >= before.feasible
    assert after.peak_memory_bytes == before.peak_memory_bytes
