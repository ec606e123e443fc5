"""Messages between two stages: every rank gets its rows, and the cost model prices the messages that the worker sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from trainwright.cluster import Accelerator, Cluster, Node, Port
from trainwright.cost.boundaries import BoundaryMessages, boundary_messages
from trainwright.cost.collectives import Collectives
from trainwright.cost.network import Network
from trainwright.plan import LayerRun
from trainwright.rank_layout import RankLayout, boundary_transfers
from trainwright.strategy import RankOrder, Strategy
from trainwright_worker.executor import boundary_exchange
from trainwright_worker.executor.boundary_exchange import BoundaryReceiver, BoundarySender, BoundarySpec
from trainwright_worker.executor.plan_ranks import Ranks, RunRanks
from trainwright_worker.gang.errors import WorkerError
from trainwright_worker.layers.layer import Boundary

NODES = "abc"
BYTES = torch.float32.itemsize


@st.composite
def runs(draw: st.DrawFn, first_rank: int, rows: int) -> RunRanks:
    """Draw a run on ranks in any order, which it places on nodes."""
    tensor, data = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (4, 1), (3, 2), (4, 2)]))
    cuts = draw(st.sets(st.integers(1, rows - 1), min_size=data - 1, max_size=data - 1))
    split = tuple(b - a for a, b in pairwise((0, *sorted(cuts), rows)))
    ranks = tuple(draw(st.permutations(range(first_rank, first_rank + tensor * data))))
    order = draw(st.sampled_from(RankOrder))
    own = {rank: draw(st.sampled_from(NODES)) for rank in ranks}
    return RunRanks(
        ranks, Strategy(tensor, data, order), split, LayerRun(0, 1, Strategy(tensor, data, order), split), own
    )


@st.composite
def boundaries(draw: st.DrawFn) -> tuple[RunRanks, RunRanks]:
    rows = draw(st.integers(3, 6))
    return draw(runs(0, rows)), draw(runs(8, rows))


@st.composite
def divided_boundaries(draw: st.DrawFn) -> tuple[RunRanks, RunRanks]:
    """Draw ends with one tensor degree, whose boundary stays divided along the sequence."""
    return draw(boundaries().filter(lambda ends: ends[0].arrangement.tensor == ends[1].arrangement.tensor > 1))


@dataclass
class Exchange:
    """Exchange of one boundary by ranks that run one after another.

    Each runs twice: an all-gather returns what its members gave in the first pass.

    Attributes:
        sent: messages and their values, by (source rank, target rank).
        given: slices that ranks gave to an all-gather, by the ranks of its group.
        is_divided: whether each rank sends its slice of the sequence, which `spec` describes.
    """

    source: RunRanks
    target: RunRanks
    spec: BoundarySpec
    sent: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    given: dict[Ranks, dict[int, torch.Tensor]] = field(default_factory=dict)
    rank: int = 0
    is_divided: bool = False

    def run(self, boundary: Boundary) -> dict[int, Boundary]:
        """Return what every receiver gets of a boundary of all rows."""
        received = {}
        node_of = (self.source.node_of | self.target.node_of).__getitem__
        transfers = boundary_transfers(self.source, self.target, node_of, split=not self.is_divided)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "batch_isend_irecv", self._message)
            patch.setattr(dist, "P2POp", _Operation)
            patch.setattr(boundary_exchange, "all_gather_single", self._gather)
            for rank in self.source.ranks:
                self.rank = rank
                start, stop = self.source.row_interval_of(rank)
                sender = BoundarySender(lambda peer: None, transfers, self.source, rank, self.spec)
                sender.send(0, self.own_slice(self.source, rank, tuple(tensor[start:stop] for tensor in boundary)))
            for rank in (*self.target.ranks, *self.target.ranks):
                self.rank = rank
                receiver = BoundaryReceiver(
                    lambda peer: None, lambda ranks: ranks, transfers, self.target, rank, self.spec
                )
                receiver.post_receive()
                received[rank], _ = receiver.wait_for_next()
        return received

    def own_slice(self, run: RunRanks, rank: int, boundary: Boundary) -> Boundary:
        """Return what a rank has of a boundary: its tensor index's part of the sequence, if that is divided."""
        if not self.is_divided:
            return boundary
        return tuple(tensor.chunk(run.arrangement.tensor, 1)[run.position_of(rank).tensor_rank] for tensor in boundary)

    def _message(self, operations: list[_Operation]) -> list[Any]:
        (one,) = operations
        if one.does is dist.isend:
            assert (self.rank, one.peer) not in self.sent
            self.sent[self.rank, one.peer] = one.tensor.clone()
        else:
            one.tensor.copy_(self.sent[one.peer, self.rank])
        return []

    def _gather(self, stacked: torch.Tensor, own: torch.Tensor, group: Ranks) -> None:
        assert self.rank in group
        given = self.given.setdefault(group, {})
        given[self.rank] = own.clone()
        stacked.copy_(torch.cat([given.get(rank, torch.zeros_like(own)) for rank in group]))

    def messages(self) -> Counter[tuple[str, str, float]]:
        """Count the messages by (source node, target node, bytes)."""
        node_of = self.source.node_of | self.target.node_of
        return Counter((node_of[a], node_of[b], float(sent.nbytes)) for (a, b), sent in self.sent.items())


@dataclass
class _Operation:
    does: Callable[..., Any]
    tensor: torch.Tensor
    peer: int
    group: None


def exchanged(
    source: RunRanks,
    target: RunRanks,
    shapes: tuple[tuple[int, ...], ...],
    *,
    formats: tuple[torch.dtype, ...] | None = None,
    is_divided: bool = False,
) -> Exchange:
    """Exchange random values, and check that every rank receives those of its rows."""
    formats = formats or (torch.float32,) * len(shapes)
    boundary = tuple(
        (100 * torch.rand(sum(source.rows), *shape)).to(dtype) for shape, dtype in zip(shapes, formats, strict=True)
    )
    spec = BoundarySpec(shapes, formats, torch.device("cpu"))
    exchange = Exchange(
        source, target, spec.slices(source.arrangement.tensor) if is_divided else spec, is_divided=is_divided
    )
    for rank, received in exchange.run(boundary).items():
        start, stop = target.row_interval_of(rank)
        expected = exchange.own_slice(target, rank, tuple(tensor[start:stop] for tensor in boundary))
        assert all(torch.equal(a, b) for a, b in zip(received, expected, strict=True))
    return exchange


@examples(100)
@given(boundaries(), st.sampled_from([((4, 6),), ((5, 7),), ((1,),), ((3, 5), (2,))]))
def test_every_rank_receives_its_rows(ends: tuple[RunRanks, RunRanks], shapes: tuple[tuple[int, ...], ...]) -> None:
    """Degrees, rows, ranks and nodes are arbitrary, and slices need not be equal."""
    exchanged(*ends, shapes)


MIXED = [
    (torch.bfloat16, torch.bfloat16),
    (torch.int64, torch.int64),
    (torch.bool, torch.float32),
    (torch.bool, torch.bfloat16),
    (torch.int32, torch.float16),
    (torch.float32, torch.int64),
]


@examples(60)
@given(boundaries(), st.sampled_from(MIXED))
def test_every_tensor_travels_in_its_own_format(
    ends: tuple[RunRanks, RunRanks], formats: tuple[torch.dtype, ...]
) -> None:
    """Messages have the bytes of the values, whose formats and odd sizes need not be alike."""
    source, target = ends
    exchange = exchanged(source, target, ((3, 5), (7,)), formats=formats)
    row_bytes = 15 * formats[0].itemsize + 7 * formats[1].itemsize
    assert sum(sent.nbytes for sent in exchange.sent.values()) >= row_bytes * sum(source.rows)


def one_to_one() -> tuple[RunRanks, RunRanks]:
    """Return ends of one rank each, with four rows."""
    return tuple(
        RunRanks((rank,), Strategy(1, 1), (4,), LayerRun(0, 1, Strategy(1, 1), (4,)), {rank: "a"}) for rank in (0, 8)
    )


def sender_of(spec: BoundarySpec | None) -> BoundarySender:
    source, target = one_to_one()
    transfers = boundary_transfers(source, target, {0: "a", 8: "a"}.__getitem__, split=True)
    return BoundarySender(lambda peer: None, transfers, source, 0, spec, "layer 2 (Block)")


FLOATS = BoundarySpec(((3,), (2,)), (torch.float32, torch.float32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("boundary", "words"),
    [
        ((torch.zeros(4, 5), torch.zeros(4, 2)), "shape (4, 5) and (4, 2) for 4 rows, but (4, 3) and (4, 2)"),
        ((torch.zeros(4, 3),), "shape (4, 3) for 4 rows, but (4, 3) and (4, 2)"),
        ((torch.zeros(3, 3), torch.zeros(3, 2)), "shape (3, 3) and (3, 2) for 4 rows"),
        ((torch.zeros(4, 3), torch.zeros(4, 2).half()), "returns float32, float16, but float32, float32 before"),
    ],
)
def test_boundary_of_other_shapes_or_formats_is_not_sent(boundary: Boundary, words: str) -> None:
    with pytest.raises(WorkerError) as refusal:
        sender_of(FLOATS).send(0, boundary)
    assert refusal.value.message.startswith("layer 2 (Block) returns ")
    assert words in refusal.value.message


def test_format_that_no_stage_takes_is_refused() -> None:
    unknown = BoundarySpec(((3,),), None, torch.device("cpu"))
    with pytest.raises(WorkerError, match="returns float64, but between stages only bool, int32, int64, "):
        sender_of(unknown).send(0, (torch.zeros(4, 3, dtype=torch.float64),))


def test_gradient_of_a_boundary_with_integers_has_those_of_its_floats_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[torch.Tensor] = []

    def message(operations: list[_Operation]) -> list[Any]:
        (one,) = operations
        if one.does is dist.isend:
            sent.append(one.tensor)
        else:
            one.tensor.copy_(sent[-1])
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", message)
    monkeypatch.setattr(dist, "P2POp", _Operation)
    source, target = one_to_one()
    activations = sender_of(BoundarySpec(((3,), (2,)), None, torch.device("cpu")))
    activations.send(0, (torch.arange(12).view(4, 3), torch.rand(4, 2)))
    assert activations.formats == (torch.int64, torch.float32)
    back = boundary_transfers(target, source, {0: "a", 8: "a"}.__getitem__, split=True)
    gradient = torch.rand(4, 2)
    BoundarySender(lambda peer: None, back, target, 8).send(0, (torch.zeros(4, 3, dtype=torch.int64), gradient))
    assert sent[-1].nbytes == gradient.nbytes
    spec = BoundarySpec(((3,), (2,)), None, torch.device("cpu"))
    receiver = BoundaryReceiver(lambda peer: None, lambda ranks: None, back, source, 0, spec, activations)
    receiver.post_receive()
    (integers, received), _ = receiver.wait_for_next()
    assert torch.equal(received, gradient)
    assert (integers.shape, integers.dtype) == ((4, 3), torch.int64)


@examples(60)
@given(divided_boundaries())
def test_every_tensor_rank_receives_its_slice_of_a_divided_sequence(ends: tuple[RunRanks, RunRanks]) -> None:
    """Nothing is gathered, and the cost model prices these messages."""
    source, target = ends
    exchange = exchanged(source, target, ((12, 4), (24, 1)), is_divided=True)
    assert not exchange.given
    positions = [(source.position_of(a).tensor_rank, target.position_of(b).tensor_rank) for a, b in exchange.sent]
    assert all(sender == receiver for sender, receiver in positions)
    messages, costs = priced(source, target, 72 * BYTES / source.arrangement.tensor, split=False)
    assert messages == exchange.messages()
    assert set(costs.gather_seconds) == {0.0}


class _CountedNetwork(Network):
    """Network that keeps the messages that were priced."""

    def concurrent_send_seconds(self, messages: Any) -> Any:
        self.priced = Counter(messages)
        return super().concurrent_send_seconds(messages)


def priced(
    source: RunRanks, target: RunRanks, row_bytes: float, *, split: bool
) -> tuple[Counter[Any], BoundaryMessages]:
    """Return the messages that the cost model counts, and their costs with links of one byte per second."""
    ports = Port(0.0, 1.0), Port(0.0, 1.0)
    network = _CountedNetwork(Cluster((Accelerator("x", 1),), tuple(Node(name, "x", 16, *ports) for name in NODES)))
    senders, receivers = (
        RankLayout(tuple(map(run.node_of.__getitem__, run.members)), run.arrangement, run.rows)
        for run in (source, target)
    )
    collectives = Collectives(network) if split else None
    found = boundary_messages(senders, receivers, row_bytes, network, collectives=collectives)
    return network.priced, found


def crossing_bytes(messages: Counter[tuple[str, str, float]]) -> float:
    return sum(count * size for (source, target, size), count in messages.items() if source != target)


@examples(100)
@given(boundaries())
def test_cost_model_prices_the_messages_of_the_worker(ends: tuple[RunRanks, RunRanks]) -> None:
    source, target = ends
    exchange = exchanged(source, target, ((3, 4), (2, 6)))
    row_bytes = 24 * BYTES
    messages, costs = priced(source, target, row_bytes, split=True)
    assert messages == exchange.messages()
    for replica, seconds in enumerate(costs.gather_seconds):
        gathered = [
            (len(group) - 1) * given[group[0]].nbytes
            for group, given in exchange.given.items()
            if target.position_of(group[0]).replica == replica
        ]
        assert seconds == pytest.approx(max(gathered, default=0.0))
    whole, _ = priced(source, target, row_bytes, split=False)
    assert crossing_bytes(messages) <= crossing_bytes(whole)
