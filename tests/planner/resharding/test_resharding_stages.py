"""The messages between two stages of a plan: the runtime's bytes, fewer with gathers, and a document."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from resharding_oracle import loaded, play, region

from trainwright import documents
from trainwright.cluster import Accelerator, Cluster, Device, Node, Port
from trainwright.cost.boundaries import boundary_messages
from trainwright.cost.network import Network
from trainwright.families import Gpt
from trainwright.model import Model
from trainwright.plan import LayerRun, Pipeline, Plan, RankOrder, Stage
from trainwright.rank_layout import RankLayout, node_layouts, row_overlaps
from trainwright.resharding import Delivery, MessagePlan, StageMessages, stage_messages
from trainwright.resharding.stages import stage_rows

MODEL = Model.of(Gpt(4, 96, 12, 32, 500))
WIDTH, ROW_BYTES = 32 * 96, 32 * 96 * 4
PORTS = Port(1e-5, 1e6), Port(1e-6, 1e8)
FABRIC = Network(
    Cluster((Accelerator("x", 2**40),), tuple(Node(name, "x", 8, *PORTS) for name in ("a", "b", "c", "d", "e", "f")))
)


@st.composite
def sides(draw: st.DrawFn, nodes: str, rows: int) -> Stage:
    """Draw a stage whose tensor groups are each on one node or across several."""
    tensor, data = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (4, 1), (3, 2), (4, 2), (1, 4)]))
    cuts = sorted(draw(st.lists(st.integers(1, rows - 1), min_size=data - 1, max_size=data - 1, unique=True)))
    parts = tuple(b - a for a, b in zip((0, *cuts), (*cuts, rows), strict=True))
    pool = [Device(node, slot) for node in nodes for slot in range(8)]
    devices = (
        tuple(draw(st.permutations(pool)))[: tensor * data] if draw(st.booleans()) else tuple(pool[: tensor * data])
    )
    order = draw(st.sampled_from(list(RankOrder)))
    return Stage(devices, (LayerRun(0, 3, tensor, data, parts, order),))


def plan_of(upper: Stage, lower: Stage, rows: int) -> Plan:
    (run,) = lower.layers
    moved = Stage(lower.devices, (LayerRun(3, 3, run.tensor, run.data, run.rows, run.order),))
    return Plan(6, 2 * rows, (Pipeline(2, rows, (upper, moved)),))


PLANS = st.integers(4, 9).flatmap(
    lambda rows: st.builds(plan_of, sides("abc", rows), sides("def", rows), st.just(rows))
)


def seats(plan: Plan) -> tuple[RankLayout[str], RankLayout[str]]:
    upper, lower = plan.pipelines[0].stages
    return node_layouts(upper)[-1], node_layouts(lower)[0]


@given(PLANS)
@examples(60)
def test_direct_messages_move_the_bytes_of_the_runtime(plan: Plan) -> None:
    """Each rank of a tensor group is sent all rows of its replica, whichever rank of the other side sends them."""
    found = stage_messages(plan, MODEL, FABRIC, delivery=Delivery.DIRECT)
    upper, lower = seats(plan)
    for messages, senders, receivers in ((found.forward, upper, lower), (found.backward, lower, upper)):
        moved = sum(stop - start for *_, start, stop in row_overlaps(senders, receivers)) * receivers.tensor * ROW_BYTES
        assert sum(messages.node_bytes().values()) == messages.crossing_bytes() == moved
        ours, theirs = (
            messages.card_seconds(FABRIC),
            boundary_messages(senders, receivers, ROW_BYTES, FABRIC).nic_seconds,
        )
        for card in theirs:
            if card[0] == "in" or all(len(set(group)) == 1 for group in senders.tensor_groups):
                assert ours[card] == pytest.approx(theirs[card])
        # Where a group spans nodes the runtime pairs by index; ours evens out what leaves them, so no card is busier.
        assert max(ours.values()) <= max(theirs.values()) + 8 * len(ours) * 4 / 1e6


@given(PLANS)
@examples(25)
def test_every_rank_gets_its_rows_in_both_directions_by_every_delivery(plan: Plan) -> None:
    upper, lower = (
        stage_rows(stage, run, WIDTH // 256)
        for stage, run in ((stage, stage.layers[0]) for stage in plan.pipelines[0].stages)
    )
    narrow = np.arange(float(np.prod(upper.shape))).reshape(upper.shape)
    from trainwright.resharding import message_plan

    for source, target in ((upper, lower), (lower, upper)):
        for delivery in Delivery:
            messages = message_plan(source, target, FABRIC, 4, delivery)
            memory = play(messages, loaded(source, (*source.devices, *target.devices), narrow))
            for tile in target.tiles:
                assert all(
                    np.array_equal(memory[one][region(tile.box)], narrow[region(tile.box)]) for one in tile.holders
                )


def uniform(tensor: int, data: int) -> Plan:
    stages = [
        Stage(
            tuple(Device(node, slot) for slot in range(tensor * data)),
            (LayerRun(0, 3, tensor, data, (4 // data,) * data),),
        )
        for node in "ad"
    ]
    return plan_of(*stages, 4)


def test_uniform_plan_takes_the_seconds_of_the_runtime_and_fewer_with_gathers() -> None:
    plan = uniform(4, 2)
    upper, lower = seats(plan)
    direct = stage_messages(plan, MODEL, FABRIC, delivery=Delivery.DIRECT).forward
    pieces = boundary_messages(upper, lower, ROW_BYTES, FABRIC).pieces
    assert direct.seconds(FABRIC) == pytest.approx(max(one.send_seconds + one.latency_seconds for one in pieces))
    pairs = [(send.source.slot, send.target.slot) for send in direct.rounds[0].sends]
    assert sorted(pairs) == [(slot, slot) for slot in range(8)]
    quickest = stage_messages(plan, MODEL, FABRIC).forward
    assert quickest.delivery is Delivery.GATHERED
    assert 4 * quickest.crossing_bytes() == direct.crossing_bytes()
    assert quickest.seconds(FABRIC) < direct.seconds(FABRIC) / 3


def test_layer_runs_at_the_boundary_determine_the_exchange() -> None:
    """The first stage ends with another row split than it begins with; its last layer sets the width, not the head."""
    a, d = (tuple(Device(node, slot) for slot in range(2)) for node in "ad")
    runs = (LayerRun(0, 4, 2, 1, (4,)), LayerRun(4, 1, 1, 2, (1, 3)))
    stages = (Stage(a, runs), Stage(d, (LayerRun(5, 1, 1, 2, (2, 2)),)))
    messages = stage_messages(Plan(6, 4, (Pipeline(1, 4, stages),)), MODEL, FABRIC).forward
    assert messages.shape == (4, WIDTH)
    assert [(send.source, send.target, send.slice[0]) for send in messages.rounds[0].sends] == [
        (a[0], d[0], (0, 1)),
        (a[1], d[0], (1, 2)),
        (a[1], d[1], (2, 4)),
    ]


def test_boundary_is_sent_directly_without_replicas() -> None:
    found = stage_messages(uniform(1, 4), MODEL, FABRIC)
    assert found.forward.delivery is found.backward.delivery is Delivery.DIRECT
    assert (found.pipeline, found.stage) == (0, 0)


def test_missing_boundary_is_rejected() -> None:
    with pytest.raises(ValueError, match="no boundary after stage 1 of pipeline 0"):
        stage_messages(uniform(2, 1), MODEL, FABRIC, (0, 1))


@given(PLANS)
@examples(10)
def test_messages_round_trip_through_their_document(plan: Plan) -> None:
    found = stage_messages(plan, MODEL, FABRIC)
    assert documents.loads(documents.dumps(found), StageMessages) == found
    assert documents.loads(documents.dumps(found.forward), MessagePlan) == found.forward
    schema = documents.schema(StageMessages)
    assert set(json.loads(documents.dumps(found))) == set(schema["properties"])


def test_document_with_an_unknown_field_or_a_bad_slice_is_rejected() -> None:
    document = documents.dump(stage_messages(uniform(1, 1), MODEL, FABRIC))
    sends = document["forward"]["rounds"][0]["sends"]
    assert sends[0]["slice"] == [[0, 4], [0, WIDTH]]
    sends[0]["slice"] = [[0, "all"]]
    with pytest.raises(documents.DocumentError, match=r"forward\.rounds\.0\.sends\.0\.slice"):
        documents.parse(document, StageMessages)
