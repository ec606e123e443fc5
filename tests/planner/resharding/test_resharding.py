"""Cross-mesh resharding: everyone gets its tile, with no more bytes between nodes than there must be."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from resharding_oracle import least_crossing, loaded, play, region

from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.network import Network
from trainwright.resharding import (
    Delivery,
    MessagePlan,
    ShardedTensor,
    Tile,
    mesh_axes,
    message_plan,
    resharding_seconds,
)

NETWORK, INSIDE, LATENCY = 1e6, 1e8, 1e-5
NODES = "abcd"
DEVICES = tuple(Device(node, slot) for node in NODES for slot in range(8))
A, B, C, D = (DEVICES[i : i + 8] for i in range(0, 32, 8))
R, S0, S1, S01 = (), (0,), (1,), (0, 1)


def fabric(latency: float = LATENCY) -> Network:
    ports = Port(latency, NETWORK), Port(latency, INSIDE)
    return Network(Cluster((Accelerator("x", 2**40),), tuple(Node(name, "x", 8, *ports) for name in NODES)))


FABRIC = fabric()


def assert_delivers(plan: MessagePlan, source: ShardedTensor, target: ShardedTensor) -> None:
    """Played through on values: every target device ends with its tile."""
    values = np.arange(float(np.prod(source.shape))).reshape(source.shape)
    memory = play(plan, loaded(source, (*source.devices, *target.devices), values))
    for tile in target.tiles:
        for device in tile.holders:
            assert np.array_equal(memory[device][region(tile.box)], values[region(tile.box)]), device


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...], devices: tuple[Device, ...]) -> ShardedTensor:
    """Uneven intervals of every dimension; tiles dealt out to devices of any node, some with replicas."""
    cuts = []
    room = len(devices)
    for size in shape:
        parts = draw(st.integers(1, min(size, room, 3)))
        room //= parts
        inner = (
            draw(st.lists(st.integers(1, size - 1), min_size=parts - 1, max_size=parts - 1, unique=True))
            if size > 1
            else []
        )
        cuts.append(list(pairwise((0, *sorted(inner), size))))
    boxes = [()]
    for dimension in cuts:
        boxes = [(*box, part) for box in boxes for part in dimension]
    order = draw(st.permutations(devices))
    extra = [draw(st.integers(0, len(boxes) - 1)) for _ in order[len(boxes) :]]
    used = draw(st.integers(len(boxes), len(order)))
    held = list(zip([*boxes, *(boxes[number] for number in extra)], order, strict=True))[:used]
    return ShardedTensor.of(shape, held)


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[ShardedTensor, ShardedTensor]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    pool = tuple(draw(st.permutations((*A[:3], *B[:3], *C[:2], *D[:1]))))
    count = draw(st.integers(1, 5))
    shared = draw(st.integers(0, 1))
    return draw(shardings(shape, pool[:count])), draw(shardings(shape, pool[count - shared : count + 4]))


@given(reshardings())
@examples(150)
def test_every_device_gets_its_tile_with_minimal_bytes_between_nodes(pair: tuple[ShardedTensor, ShardedTensor]) -> None:
    """Against trying all messages: without relays for DIRECT, with any relays for the others."""
    source, target = pair
    for delivery in Delivery:
        plan = message_plan(source, target, FABRIC, 3, delivery)
        assert_delivers(plan, source, target)
        least = least_crossing(source, target, relays=delivery is not Delivery.DIRECT)
        assert plan.crossing_bytes() == 3 * least


@given(reshardings())
@examples(40)
def test_default_delivery_is_the_fastest_and_sends_nothing_twice(
    pair: tuple[ShardedTensor, ShardedTensor],
) -> None:
    source, target = pair
    seconds = {delivery: message_plan(source, target, FABRIC, 3, delivery).seconds(FABRIC) for delivery in Delivery}
    assert resharding_seconds(source, target, FABRIC, 3) == pytest.approx(min(seconds.values()))
    for one in message_plan(source, target, FABRIC, 3, Delivery.GATHERED).rounds:
        arrived: dict[Device, set[tuple[int, ...]]] = {}
        for send in one.sends:
            indices = set(np.ndindex(*(end - first for first, end in send.slice)))
            moved = {tuple(i + first for i, (first, _) in zip(index, send.slice, strict=True)) for index in indices}
            assert not arrived.setdefault(send.target, set()) & moved
            arrived[send.target] |= moved


def test_data_in_place_is_not_moved() -> None:
    here = ShardedTensor.on_mesh((8, 4), A[:4], (2, 2), (S0, S1))
    assert message_plan(here, here, FABRIC, 2).rounds == ()
    whole = ShardedTensor.on_mesh((8, 4), A[:4], (2, 2), (R, R))
    assert message_plan(whole, here, FABRIC, 2).rounds == ()
    assert message_plan(here, whole, FABRIC, 2).crossing_bytes() == 0


def test_equal_meshes_with_replicas_scatter_and_gather() -> None:
    """Fig. 6a, Megatron's way: each of two replicas sends its half to its partner, which gather."""
    source = ShardedTensor.in_rows((4,), 6, (A[:2],))
    target = ShardedTensor.in_rows((4,), 6, (B[:2],))
    plan = message_plan(source, target, fabric(0.0), 2)
    assert plan.delivery is Delivery.GATHERED
    sends, gathers = plan.rounds
    assert [(send.source, send.target) for send in sends.sends] == [(A[0], B[0]), (A[1], B[1])]
    assert [send.slice for send in sends.sends] == [((0, 2), (0, 6)), ((2, 4), (0, 6))]
    (gather,) = gathers.gathers
    assert [part.device for part in gather.parts] == list(B[:2])
    assert plan.seconds(fabric(0.0)) == pytest.approx(48 / NETWORK + 24 / INSIDE)
    direct = message_plan(source, target, fabric(0.0), 2, Delivery.DIRECT)
    assert direct.crossing_bytes() == 2 * plan.crossing_bytes() == 96
    assert direct.seconds(fabric(0.0)) == pytest.approx(96 / NETWORK)


def test_unequal_meshes_send_each_slice_once() -> None:
    """Fig. 6b and 6c: a tensor cut over 2 devices goes to 2 × 2 replicas; over the network once for each tile and node."""
    source = ShardedTensor.on_mesh((8, 8), A[:2], (2, 1), (S0, R))
    target = ShardedTensor.on_mesh((8, 8), (*B[:2], *C[:2]), (2, 2), (R, R))
    gathered = message_plan(source, target, FABRIC, 1, Delivery.GATHERED)
    direct = message_plan(source, target, FABRIC, 1, Delivery.DIRECT)
    assert direct.crossing_bytes() == 4 * 64
    assert gathered.crossing_bytes() == 2 * 64
    assert set(gathered.sent_bytes().values()) == {64}


def test_relays_reduce_the_load_of_a_single_sending_node() -> None:
    """Three nodes want all of it: from the source each its third, the others from one another, at once."""
    source = ShardedTensor.on_mesh((30, 8), A, (1, 8), (R, S1))
    target = ShardedTensor.on_mesh((30, 8), (*B, *C, *D), (3, 8), (R, R))
    quick = fabric(0.0)
    gathered = message_plan(source, target, quick, 2, Delivery.GATHERED)
    relayed = message_plan(source, target, quick, 2)
    assert relayed.delivery is Delivery.RELAYED
    assert relayed.crossing_bytes() == gathered.crossing_bytes() == 3 * 480
    assert relayed.card_seconds(quick)["out", "a"] == pytest.approx(480 / NETWORK)
    assert relayed.seconds(quick) < gathered.seconds(quick)
    assert_delivers(relayed, source, target)


def test_single_nic_bounds_the_seconds_from_below() -> None:
    source = ShardedTensor.on_mesh((16, 16), (*A[:4], *B[:4]), (2, 4), (S0, S1))
    target = ShardedTensor.on_mesh((16, 16), (*C[:4], *D[:4]), (2, 4), (S1, S0))
    for delivery in Delivery:
        plan = message_plan(source, target, FABRIC, 4, delivery)
        assert_delivers(plan, source, target)
        assert plan.seconds(FABRIC) >= max(plan.card_seconds(FABRIC).values())


@pytest.mark.parametrize(
    ("spec", "boxes"),
    [
        ((R, R), [((0, 6), (0, 8))] * 4),
        ((S0, R), [((0, 3), (0, 8))] * 2 + [((3, 6), (0, 8))] * 2),
        ((R, S1), [((0, 6), (0, 4)), ((0, 6), (4, 8))] * 2),
        ((S0, S1), [((0, 3), (0, 4)), ((0, 3), (4, 8)), ((3, 6), (0, 4)), ((3, 6), (4, 8))]),
        ((R, S01), [((0, 6), (i, i + 2)) for i in (0, 2, 4, 6)]),
        ((R, (1, 0)), [((0, 6), (i, i + 2)) for i in (0, 4, 2, 6)]),
        ((S01, R), [((0, 1), (0, 8)), ((1, 3), (0, 8)), ((3, 4), (0, 8)), ((4, 6), (0, 8))]),
    ],
)
def test_sharding_specs_give_the_tiles_of_a_mesh(spec: tuple[tuple[int, ...], ...], boxes: list[object]) -> None:
    """Table 1 of the paper, by position (0, 0), (0, 1), (1, 0), (1, 1); parts differ by one where they must."""
    sharded = ShardedTensor.on_mesh((6, 8), A[:4], (2, 2), spec)
    held = {device: tile.box for tile in sharded.tiles for device in tile.holders}
    assert [held[device] for device in A[:4]] == boxes


def test_specs_are_parsed_in_the_papers_notation() -> None:
    assert mesh_axes("S0 R S1") == (S0, R, S1)
    assert mesh_axes("S01 R") == (S01, R)
    for words in ("", "S", "S0R", "0 R", "R Sx"):
        with pytest.raises(ValueError, match="R, S0, S1 or S01"):
            mesh_axes(words)


def test_dimension_sharded_by_both_axes_varies_fastest_along_the_inner_axis() -> None:
    """On a mesh of 2 × 3."""
    by_both = ShardedTensor.on_mesh((12,), A[:6], (2, 3), (S01,))
    assert [tile.box[0] for tile in by_both.tiles] == [(i, i + 2) for i in range(0, 12, 2)]
    other_way = ShardedTensor.on_mesh((12,), A[:6], (2, 3), ((1, 0),))
    assert [tile.box[0][0] for tile in other_way.tiles] == [0, 4, 8, 2, 6, 10]


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        ([], "exactly once"),
        ([Tile(((0, 2),), (A[0],)), Tile(((3, 4),), (A[1],))], "exactly once"),
        ([Tile(((0, 2),), (A[0],)), Tile(((1, 3),), (A[1],))], "exactly once"),
        ([Tile(((0, 4),), ())], "nobody holds"),
        ([Tile(((0, 5),), (A[0],))], "not inside"),
        ([Tile(((0, 4), (0, 1)), (A[0],))], "not inside"),
        ([Tile(((0, 2),), (A[0],)), Tile(((2, 4),), (A[0],))], "named twice"),
    ],
)
def test_invalid_shardings_are_rejected_with_a_message(tiles: list[Tile], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardedTensor((4,), tuple(tiles))


def test_invalid_meshes_and_shapes_are_rejected_with_a_message() -> None:
    with pytest.raises(ValueError, match="needs 4 devices, got 3"):
        ShardedTensor.on_mesh((4, 4), A[:3], (2, 2), (R, R))
    with pytest.raises(ValueError, match="axes that no other has"):
        ShardedTensor.on_mesh((4, 4), A[:4], (2, 2), (S0, S0))
    with pytest.raises(ValueError, match="cannot be cut into 4 parts"):
        ShardedTensor.on_mesh((3, 4), A[:4], (2, 2), (S01, R))
    with pytest.raises(ValueError, match="keeps its shape"):
        message_plan(ShardedTensor.in_rows((4,), 2, (A[:1],)), ShardedTensor.in_rows((4,), 3, (A[:1],)), FABRIC, 1)
