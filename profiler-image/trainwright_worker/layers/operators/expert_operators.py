"""Operators of mixtures of experts, on this rank's parts of their tensors and of the pairs of token and expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from trainwright.loop_nests.operations import Axis
from trainwright_worker.layers.moe import (
    ExpertBlock,
    balance_loss,
    grouped_linear,
    has_grouped_products,
    is_groupable,
)
from trainwright_worker.layers.operators.expert_pairs import EXPERTS, SELECTING, Pairs, PairValue
from trainwright_worker.layers.operators.layouts import EVERYWHERE, REPLICATED, Layout, sharding_dimensions
from trainwright_worker.layers.operators.operator_tensors import (
    POSITIONS,
    ROWS,
    SEQUENCES,
    OperatorCall,
    OperatorTensors,
    Value,
    require,
)
from trainwright_worker.layers.operators.resharding import reshard

PAIRS: Final = {**SEQUENCES, Axis.EXPERT: EXPERTS}
"""Dimensions of (rows, positions, width, experts) for the axes that a mesh shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceValue(Value):
    """Weights of each token's choices, (rows, positions, k).

    Attributes:
        experts: that are chosen, of the same shape and layout.
    """

    experts: Tensor


def choose(call: OperatorCall) -> Value:
    """Choose each token's experts by the router's logits (rows, positions, experts)."""
    (logits,), block, layout = call.read(), require(call.whole, ExpertBlock), call.output_layout
    # In float32: half-precision probabilities often tie, and ties are broken arbitrarily.
    probabilities = functional.softmax(logits, -1, dtype=torch.float32)
    experts = _agreed(call, probabilities.detach().topk(block.experts_per_token, -1).indices)
    weights = probabilities.gather(-1, experts)
    if block.experts_per_token > 1:
        weights = weights / weights.sum(-1, keepdim=True)
    (weights,) = call.written(weights.to(logits.dtype)).tensors
    group = call.mesh.group(sharding_dimensions(layout, POSITIONS))
    loss = block.balance_loss_weight * balance_loss(probabilities, experts, group)
    return ChoiceValue((weights,), layout, call.added_loss(loss, layout, ROWS, POSITIONS), experts=experts)


def _agreed(call: OperatorCall, experts: Tensor) -> Tensor:
    """Return the choices of the first of the ranks that choose for the same tokens, if pairs move between ranks.

    Unequal devices round in different ways, and a rank that chose differently would expect messages of other sizes.
    """
    kept = kept_layout(call.layer)
    moves = any(
        placement in SELECTING and kept[dimension] < 0
        for layout in pair_layouts(call.layer)
        for dimension, placement in enumerate(layout)
    )
    for dimension, placement in enumerate(call.output_layout):
        group = call.mesh.group((dimension,))
        if moves and placement < 0 and group is not None:
            experts = group.all_gather(experts.int().flatten())[0].view(experts.shape).long()
    return experts


def pair_layouts(layer: OperatorTensors) -> list[Layout]:
    """Return all layouts in which a layer's operators read and write pairs."""
    names = [name for name, operator in layer.operators.items() if operator.dimensions is PAIRS and name in layer.specs]
    read = [layer.operand_layout(name) for name in names if name != "dispatch"]
    return [*read, *(layer.output_layout(name) for name in names if name != "combination")]


def kept_layout(layer: OperatorTensors) -> Layout:
    """Return how the choices may stay divided: where all operators select the same pairs, other ranks' choices do not matter."""
    layouts = pair_layouts(layer)
    first, second = (
        along[0] if len(set(along)) == 1 and along[0] in {ROWS, POSITIONS} else REPLICATED
        for along in zip(*layouts, strict=True)
    )
    kept = first, second
    others = {layout[dimension] for layout in layouts for dimension in (0, 1) if kept[dimension] == REPLICATED}
    # An axis that the other dimension divides elsewhere has other parts there.
    return EVERYWHERE if others & {first, second} & {ROWS, POSITIONS} else kept


def dispatch(call: OperatorCall) -> Value:
    """Copy each token (rows, positions, width) to its experts: (pairs, width)."""
    (tokens,), choice, layout = call.read(), require(call.operands[1], ChoiceValue), call.output_layout
    kept = kept_layout(call.layer)
    (experts,) = reshard(call.mesh, (choice.experts.int(),), choice.layout, kept)
    pairs = Pairs.of(call.mesh, experts, kept, require(call.whole, ExpertBlock).experts)
    places = pairs.places(layout).to(tokens.device)
    return _of_pairs(call, pairs, tokens.flatten(0, 1).index_select(0, places))


def multiply_by_expert(call: OperatorCall) -> Value:
    """Multiply each pair (pairs, in) by its expert's weight: one (experts, out, in), or several in one (experts, products, out, in)."""
    (values,), (weight,), pairs = call.read(), call.weights, _pairs_of(call)
    sizes = pairs.group_sizes(call.operand_layout())
    products = by_expert(values, weight.flatten(1, -2), sizes)
    if weight.dim() == 3:
        return _of_pairs(call, pairs, products)
    return _of_pairs(call, pairs, *torch.unflatten(products, -1, (weight.shape[1], -1)).unbind(-2))


def by_expert(values: Tensor, weight: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the products of consecutive groups of values (pairs, in) with a weight (groups, out, in)."""
    if has_grouped_products(values) and is_groupable(weight):
        ends = torch.tensor(sizes, device=values.device).cumsum(0, dtype=torch.int32)
        return grouped_linear(values, weight, ends=ends)
    parts = zip(torch.split(values, list(sizes)), weight, strict=True)
    return torch.cat([functional.linear(part, own) for part, own in parts])


def gate_experts(call: OperatorCall) -> Value:
    """Multiply the gate's SiLU with the other product (SwiGLU)."""
    gate, up = call.read()
    return _of_pairs(call, _pairs_of(call), functional.silu(gate) * up)


def rectify_experts(call: OperatorCall) -> Value:
    """Apply a ReLU to each pair."""
    (inner,) = call.read()
    return _of_pairs(call, _pairs_of(call), functional.relu(inner))


def combine(call: OperatorCall) -> Value:
    """Return the weighted sum of each token's pairs, (rows, positions, width)."""
    (outputs,), (weights,), layout = call.read(), call.read(1), call.operand_layout()
    pairs = _pairs_of(call)
    places = pairs.places(layout).to(outputs.device)
    choices = pairs.choices[pairs.selected(layout)].to(outputs.device)
    weighted = outputs * weights.flatten(0, 1)[places, choices].unsqueeze(-1)
    rows, positions, _ = weights.shape
    total = weighted.new_zeros(rows * positions, outputs.shape[1]).index_add(0, places, weighted)
    return call.written(total.view(rows, positions, -1))


def _of_pairs(call: OperatorCall, pairs: Pairs, *tensors: Tensor) -> PairValue:
    value = call.written(*tensors)
    return PairValue(value.tensors, value.layout, pairs=pairs)


def _pairs_of(call: OperatorCall) -> Pairs:
    """Return the pairs of the first operand."""
    return require(call.operands[0], PairValue).pairs
