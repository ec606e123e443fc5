"""Machines, and the clusters made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.accelerators import cluster_of, data_sheet, machine, machines
from trainwright.accelerators.data_sheets import plain
from trainwright.accelerators.machines import MachinePort, machine_file
from trainwright.cluster import MAX_DEVICES, Cluster, Link, Port
from trainwright.cost.network import link_matrices
from trainwright.documents import dumps, loads

MACHINES = [pytest.param(each, id=each.name) for each in machines()]
COUNTS = st.dictionaries(st.sampled_from([each.name for each in machines()]), st.integers(1, 4), min_size=1, max_size=5)


@pytest.mark.parametrize("each", MACHINES)
def test_a_machine_carries_known_accelerators_and_names_its_sources(each):
    sources = machine_file().sources
    assert data_sheet(each.accelerator).name == each.accelerator
    figures = [each.network, each.inside, each.price_per_hour]
    assert {figure.source for figure in figures if figure is not None} <= set(sources)
    if each.price_per_hour is not None:
        assert sources[each.price_per_hour.source].as_of


def test_every_source_is_used_and_has_an_address_unless_it_is_an_assumption():
    sources = machine_file().sources
    figures = [figure for each in machines() for figure in (each.inside, each.network, each.price_per_hour) if figure]
    kinds = machine_file().networks.values()
    assert {figure.source for figure in (*figures, *kinds)} == set(sources)
    assert all(source.url or source.title.startswith("Assumption") for source in sources.values())


@pytest.mark.parametrize("each", MACHINES)
def test_prices_were_checked_and_assumptions_were_not(each):
    sources = machine_file().sources
    if each.price_per_hour is not None:
        assert each.price_per_hour.checked
    for port in (each.inside, each.network):
        assert port is None or not (sources[port.source].title.startswith("Assumption") and port.checked)


@pytest.mark.parametrize("each", MACHINES)
def test_several_devices_are_linked_no_faster_than_their_data_sheet(each):
    if each.devices == 1:
        assert each.inside is None
    else:
        link = data_sheet(each.accelerator).link_bytes_per_second.value
        assert 0 < each.inside.bandwidth_bytes_per_second <= link


def test_names_and_aliases_are_unique_per_machine():
    names = [plain(name) for each in machines() for name in (each.name, *each.aliases)]
    assert len(set(names)) == len(names)


def test_cluster_of_amp_has_its_machines():
    cluster = cluster_of({"p3.8xlarge": 3, "g4dn.12xlarge": 1})
    assert [node.name for node in cluster.nodes] == ["p3.8xlarge-1", "p3.8xlarge-2", "p3.8xlarge-3", "g4dn.12xlarge-1"]
    assert [node.devices for node in cluster.nodes] == [4, 4, 4, 4]
    inside = [cluster.link(node.name, node.name).bandwidth_bytes_per_second for node in cluster.nodes]
    assert inside == [170e9 / 8] * 3 + [50e9 / 8]
    assert cluster.link("p3.8xlarge-1", "g4dn.12xlarge-1").bandwidth_bytes_per_second == 10e9 / 8


def test_training_reaches_a_share_of_ethernet_and_of_one_card_for_eight_devices():
    shares = {each.name: each.node("node").network.reached_ratio for each in machines()}
    assert shares["g4dn.12xlarge"] == 0.6
    assert shares["p3dn.24xlarge"] == 0.4
    assert shares["dgx-a100"] == shares["p3.8xlarge"] == 1  # a card for each device; what TCP reaches
    card = cluster_of({"g4dn.12xlarge": 2}).link("g4dn.12xlarge-1", "g4dn.12xlarge-2")
    assert card.bandwidth_bytes_per_second == pytest.approx(0.6 * 6.25e9)


def test_a_measured_link_counts_in_full():
    assumed = cluster_of({"g4dn.12xlarge": 2})
    names = [node.name for node in assumed.nodes]
    links = tuple(Link(a, b, 50e-6, 5e9) for a, b in (names, names[::-1]))
    measured = replace(assumed, links=links)
    assert measured.link(*names).bandwidth_bytes_per_second == 5e9
    assert link_matrices(measured).bandwidth[0, 1] == 5e9 > link_matrices(assumed).bandwidth[0, 1]


def test_a_share_of_bandwidth_is_above_zero_and_at_most_one():
    for ratio in (0.0, 1.5):
        with pytest.raises(ValueError, match="reached_ratio must be above 0 and at most 1"):
            Port(0.0, 1e9, reached_ratio=ratio)


@given(COUNTS)
def test_a_cluster_has_all_devices_and_costs_what_its_machines_cost(counts):
    cluster = cluster_of(counts)
    wanted = {name: machine(name) for name in counts}
    assert len(cluster.devices) == sum(wanted[name].devices * count for name, count in counts.items())
    prices = {each.name: each.price_per_hour for each in cluster.accelerators}
    machine_prices = [wanted[name].price_per_hour for name, count in counts.items() for _ in range(count)]
    if all(price is not None for price in machine_prices):
        total = sum(prices[node.accelerator] * node.devices for node in cluster.nodes)
        assert total == pytest.approx(sum(price.value for price in machine_prices))
    else:
        assert None in prices.values()


@given(COUNTS)
def test_cluster_document_round_trips(counts):
    cluster = cluster_of(counts)
    assert loads(dumps(cluster), Cluster) == cluster


def test_alias_and_name_add_up_to_one_machine():
    cluster = cluster_of({"p4d": 1, "P4D.24xlarge": 1})
    assert [node.name for node in cluster.nodes] == ["p4d.24xlarge-1", "p4d.24xlarge-2"]


def test_a_single_device_needs_no_link_inside():
    (node,) = cluster_of({"g4dn.xlarge": 1}).nodes
    assert node.inside is None
    assert isinstance(node.network, Port)


@pytest.mark.parametrize("each", MACHINES)
def test_a_stream_between_machines_uses_one_nic_of_a_rate_that_cards_have(each):
    port = each.node("a").network
    assert each.inside is None or each.inside.nics == 1
    if each.network.nics == 1:
        assert port.flow_bytes_per_second is None
    else:
        assert port.flow_bytes_per_second * 8 / 1e9 in {100, 200, 400}
        assert port.flow_bytes_per_second * each.network.nics == port.bandwidth_bytes_per_second


def test_a_stream_reaches_a_quarter_of_a_machine_of_four_nics():
    cluster = cluster_of({"p4d": 1, "p5": 1})
    link = cluster.link("p4d.24xlarge-1", "p5.48xlarge-1")
    assert (link.bandwidth_bytes_per_second, link.flow_bytes_per_second) == (400e9 / 8, 100e9 / 8)


def test_a_port_without_nics_is_refused():
    with pytest.raises(ValueError, match="at least one NIC, got 0"):
        MachinePort(0.0, 1e9, "assumed", nics=0)


def test_an_unknown_machine_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"machine 'p3.9xlarge'; choose one that has one, such as p3.8xlarge"):
        cluster_of({"p3.9xlarge": 1})


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused(count):
    with pytest.raises(ValueError, match=f"at least one p3.2xlarge, got {count}"):
        cluster_of({"p3.2xlarge": count})


def test_too_many_machines_are_refused():
    with pytest.raises(ValueError, match=f"at most {MAX_DEVICES} devices"):
        cluster_of({"p3.2xlarge": MAX_DEVICES + 1})
