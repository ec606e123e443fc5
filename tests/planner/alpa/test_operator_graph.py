"""Operator graphs of every family: complete, read only written tensors, and trivial operators follow."""

from __future__ import annotations

import pytest

from trainwright.cost.operators.operator_graph import OperatorGraph
from trainwright.cost.operators.parallel_algorithms import AlgorithmSpace, GraphAlgorithms
from trainwright.families import T5, Bert, Gpt, Llama, Moe, Swin, TransGan, Vit, WideResnet
from trainwright.layer import Attention
from trainwright.loop_nests.layer_wiring import BOUNDARY, ENCODER_OUTPUT, LayerWiring, wire_layer
from trainwright.loop_nests.operations import IndexedTensor, Loop, Operation
from trainwright.model import Model

FAMILIES = {
    "gpt": Gpt(2, 64, 4, 32, 128),
    "gpt with dropout": Gpt(2, 64, 4, 32, 128, dropout=True),
    "gpt with parallel branches": Gpt(2, 64, 4, 32, 128, rotary_size=8, parallel_residual=True, tied_embeddings=False),
    "gpt with one norm": Gpt(
        2, 64, 4, 32, 128, parallel_residual=True, shared_norm=True, key_value_heads=1, biases=False
    ),
    "llama": Llama(2, 64, 4, 32, 128, key_value_heads=2),
    "bert": Bert(2, 64, 4, 32, 128, dropout=True),
    "vit": Vit(2, 64, 4, 32, 8),
    "t5": T5(2, 64, 4, 32, 128, decoder_sequence_length=16),
    "t5 with dropout": T5(2, 64, 4, 32, 128, dropout=True),
    "moe": Moe(4, 64, 4, 32, 128, expert_every=2),
    "moe with relu": Moe(2, 64, 4, 32, 128, gated=False),
    "wide_resnet": WideResnet(base_channels=32),
    "swin": Swin((1, 1, 1, 1), 32),
    "trans_gan": TransGan((1, 1, 1), bottom_width=8),
}
ALL = [
    pytest.param(family, attention, id=f"{name}, {attention}")
    for name, family in FAMILIES.items()
    for attention in Attention
]


def graphs(family, attention):
    model = Model.of(family, attention=attention)
    for kind in model.kinds:
        layer = wire_layer(model, kind)
        yield kind, OperatorGraph.of(layer)


def graph_of(family, name, attention=Attention.FUSED) -> OperatorGraph:
    return next(graph for kind, graph in graphs(family, attention) if kind.name == name)


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_graph_has_the_parameters_and_flops_of_its_layer(family, attention):
    for kind, graph in graphs(family, attention):
        held = sum(one.weight.elements for one in graph.operations if one.weight is not None)
        assert held == kind.parameters
        assert sum(one.flops_per_row for one in graph.operations) == pytest.approx(kind.forward_flops_per_row)
        followers = [index for node in graph.nodes for index in node.operations]
        assert sorted(followers) == list(range(len(kind.operators)))


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_operators_read_only_written_tensors(family, attention):
    for kind, graph in graphs(family, attention):
        for index, (operation, sources) in enumerate(zip(graph.operations, graph.wired.operand_sources, strict=True)):
            assert len(sources) == len(operation.operands)
            for source in sources:
                assert -graph.wired.inputs <= source < index, f"{kind.name}: {operation.name}"
            read = sum(operand.elements for operand in operation.operands)
            distinct = [graph.operations[source].output.elements for source in set(sources) if source >= 0]
            if len(distinct) == len(set(sources)) == 1 and distinct[0] and not operation.is_trivial:
                assert read <= 2 * distinct[0] * (1 + 1e-9), f"{kind.name}: {operation.name}"


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_heavy_operators_lead_and_trivial_ones_follow(family, attention):
    for _, graph in graphs(family, attention):
        leaders = {node.leader for node in graph.nodes}
        for index, operation in enumerate(graph.operations):
            if operation.is_heavy:
                assert index in leaders
            elif operation.is_trivial and operation.operands:
                assert index not in leaders


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_followers_keep_the_spec_of_their_leader(family, attention):
    for _, graph in graphs(family, attention):
        algorithms = GraphAlgorithms.of(graph, AlgorithmSpace((2, 2), 8), 8)
        for node in graph.nodes:
            for follower in node.followers:
                own = algorithms.operators[follower.operation].operand_layouts[follower.operand]
                assert own.tolist() == algorithms.output_layouts(follower.source).tolist()


def test_transformer_block_has_four_matmuls_and_an_attention():
    graph = graph_of(FAMILIES["gpt"], "block")
    names = [[graph.operations[index].name for index in node.operations] for node in graph.nodes]
    assert names == [
        ["attention_normalisation"],
        ["query_key_value"],
        ["attention"],
        ["attention_output", "attention_residual", "feed_forward_normalisation"],
        ["feed_forward_in", "activation"],
        ["feed_forward_out", "feed_forward_residual"],
    ]


@pytest.mark.parametrize(("name", "norm"), [("gpt with parallel branches", "boundary"), ("gpt with one norm", "first")])
def test_parallel_branches_read_what_the_block_reads(name, norm):
    graph = graph_of(FAMILIES[name], "block")
    places = {operation.name: place for place, operation in enumerate(graph.operations)}
    sources = dict(zip(places, graph.wired.operand_sources, strict=True))
    if norm == "first":
        assert sources["feed_forward_in"] == (places["attention_normalisation"],)
    else:
        assert sources["feed_forward_normalisation"] == (BOUNDARY,)
    assert sources["attention_residual"] == (places["attention_output"], BOUNDARY)
    assert sources["feed_forward_residual"] == (places["feed_forward_out"], places["attention_residual"])


def test_stored_attention_is_two_batched_matmuls():
    graph = graph_of(FAMILIES["llama"], "block", Attention.STORED)
    place = {one.name: index for index, one in enumerate(graph.operations)}
    assert graph.wired.operand_sources[place["scores"]] == (place["repeat"], place["repeat"])
    assert graph.wired.operand_sources[place["context"]] == (place["softmax"], place["repeat"])
    scores = graph.operations[place["scores"]]
    assert [operand.elements for operand in scores.operands] == [32 * 64, 32 * 64]
    assert [operand.elements for operand in graph.operations[place["context"]].operands] == [4 * 32 * 32, 32 * 64]


def test_decoder_reads_and_forwards_the_encoder_output():
    graph = graph_of(FAMILIES["t5"], "decoder")
    place = {one.name: index for index, one in enumerate(graph.operations)}
    assert graph.wired.operand_sources[place["cross_key_value"]] == (ENCODER_OUTPUT,)
    crossing = place["cross_attention"]
    assert graph.wired.operand_sources[crossing] == (place["cross_query"], place["cross_key_value"])
    assert [operand.elements for operand in graph.operations[crossing].operands] == [16 * 64, 2 * 32 * 64]
    assert graph.wired.outputs == (place["feed_forward_residual"], ENCODER_OUTPUT)


@pytest.mark.parametrize(("attention", "name"), [(Attention.FUSED, "attention"), (Attention.STORED, "context")])
def test_table_of_score_biases_follows_attention_and_is_read_by_no_operator(attention, name):
    graph = graph_of(FAMILIES["t5"], "decoder", attention)
    place = {one.name: index for index, one in enumerate(graph.operations)}
    assert graph.wired.operand_sources[place["position_biases"]] == (place[name],)
    assert graph.wired.operand_sources[place["attention_residual"]] == (place["attention_output"], BOUNDARY)
    assert graph.node_of[place["position_biases"]] == graph.node_of[place[name]]


def test_a_mixture_dispatches_and_combines():
    graph = graph_of(FAMILIES["moe"], "expert_block")
    place = {one.name: index for index, one in enumerate(graph.operations)}
    assert graph.wired.operand_sources[place["dispatch"]] == (place["feed_forward_normalisation"], place["choice"])
    assert graph.wired.operand_sources[place["combination"]] == (place["experts_down"], place["choice"])
    assert dict(graph.operations[place["experts_down"]].loops)[Loop.EXPERT] == 8
    assert place["choice"] in {node.leader for node in graph.nodes}
    assert Loop.WIDTH not in dict(graph.operations[place["choice"]].loops)
    assert Loop.SEQUENCE not in dict(graph.operations[place["experts_gate"]].loops)
    assert {dict(graph.operations[place[name]].loops)[Loop.SEQUENCE] for name in ("choice", "combination")} == {32}
    assert [graph.operations[place[name]].output.elements for name in ("dispatch", "combination")] == [4096, 2048]


def test_residual_block_adds_its_shortcut():
    first = graph_of(FAMILIES["wide_resnet"], "first_1")
    place = {one.name: index for index, one in enumerate(first.operations)}
    assert first.wired.operand_sources[place["projection"]] == (BOUNDARY,)
    assert first.wired.operand_sources[place["activation"]] == (
        place["expand_normalisation"],
        place["projection_normalisation"],
    )
    further = graph_of(FAMILIES["wide_resnet"], "block_1")
    place = {one.name: index for index, one in enumerate(further.operations)}
    assert further.wired.operand_sources[place["activation"]] == (place["expand_normalisation"], BOUNDARY)
    sizes = {loop: dict(further.operations[place["convolve"]].loops)[loop] for loop in (Loop.IN, Loop.OUT)}
    assert sizes == {Loop.IN: 128, Loop.OUT: 128}
    assert all(Loop.SEQUENCE not in dict(one.loops) for one in further.operations), "pixels are not sharded"


def test_operators_that_move_positions_do_not_divide_them():
    family = TransGan((1, 0, 1), 64, bottom_width=4, window_size=8)
    without_positions = {
        kind.name: {one.name for one in graph.operations if Loop.SEQUENCE not in dict(one.loops)}
        for kind, graph in graphs(family, Attention.FUSED)
    }
    assert without_positions["block_2"] == {"windows", "attention"}
    assert not without_positions["block_0"]
    assert without_positions["grow_1"] == {"grow"}
    merge = graph_of(FAMILIES["swin"], "merge_0").operations[0]
    assert [loop for loop, _ in merge.loops] == [Loop.BATCH], "nor widths of which one holds those of four neighbours"
    latent = graph_of(family, "embedding").operations[0]
    assert dict(latent.loops)[Loop.OUT] == 64, "the width of each position"


def test_trivial_operators_follow_their_deepest_operand():
    tensor = IndexedTensor((), 1)

    def one(name, operands, *, trivial=False):
        return Operation(name, (), tensor, (tensor,) * operands, is_trivial=trivial)

    operations = (
        one("short", 1),
        one("long", 1),
        one("longer", 1),
        one("sum", 2, trivial=True),
        one("same", 2, trivial=True),
    )
    graph = OperatorGraph.of(LayerWiring(operations, ((-1,), (-1,), (1,), (0, 2), (3, 3)), 1, (4,)))
    assert graph.node_of[3] == graph.node_of[2]
    assert graph.node_of[4] == graph.node_of[3]
    assert [(read.source, read.operation) for read in graph.operand_edges] == [(-1, 0), (-1, 1), (1, 2), (0, 3), (3, 4)]
