"""Operators of transformers over (rows, positions, width), on this rank's parts of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainwright.families.fields import NORM_EPSILON
from trainwright_worker.layers import bert, llama
from trainwright_worker.layers.gpt import NeoxBlock
from trainwright_worker.layers.operators.layouts import PARTIAL, Layout, sharding_dimensions
from trainwright_worker.layers.operators.local_functions import attend_causally, divided_norm
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, WIDTH, OperatorCall, Value, require
from trainwright_worker.layers.operators.resharding import reshard
from trainwright_worker.layers.pre_norm_block import PreNormBlock
from trainwright_worker.layers.token_models import cross_entropy_of_slice, look_up_slice, project
from trainwright_worker.layers.transformer_parts import RotaryAttentionLayer, rms_norm_by_head, rotate
from trainwright_worker.synthetic_data import UNMASKED

LAYER_NORM_EPSILON = 1e-5
"""Epsilon of torch's `layer_norm`, which layers without an `epsilon` of their own leave as it is."""


def look_up(call: OperatorCall, field: str = "tokens") -> Value:
    """Look up this rank's tokens of a field in its part of the table (entries, width)."""
    (table,), placed = call.weights, call.layer.placed["tokens"].layout
    own = call.own_rows(field, call.output_layout)
    if not sharding_dimensions(placed, 0):
        return call.written(functional.embedding(own, table))
    first, _ = call.mesh.interval(placed, 0, call.whole.get_parameter("tokens").shape[0])
    return call.written(look_up_slice(own, table, first))


def add_positions(call: OperatorCall) -> Value:
    """Add the learned positions, (positions, width)."""
    (hidden,), (positions,) = call.read(), call.weights
    start, stop = call.mesh.interval(call.operand_layout(), POSITIONS, len(positions))
    return call.written(hidden + positions[start:stop])


def normalise(call: OperatorCall) -> Value:
    """Normalise over the width: LayerNorm with a bias, else RMSNorm."""
    (values,), (weight, *bias) = call.read(), call.weights
    return call.written(_normalised(call, values, weight, bias[0] if bias else None))


def _normalised(call: OperatorCall, values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    epsilon: float = getattr(call.whole, "epsilon", NORM_EPSILON if bias is None else LAYER_NORM_EPSILON)
    group = call.mesh.group(sharding_dimensions(call.operand_layout(), WIDTH))
    if group is not None:
        return divided_norm(values, weight, bias, group, epsilon)
    if bias is not None:
        return functional.layer_norm(values, weight.shape, weight, bias, epsilon)
    return functional.rms_norm(values, weight.shape, weight, epsilon)


def normalise_queries(call: OperatorCall) -> Value:
    """Normalise queries over their width, if the block does; keys and values pass."""
    (queries, *others), weights = call.read(), call.weights
    return call.written(_normalised(call, queries, weights[0]) if weights else queries, *others)


def normalise_keys(call: OperatorCall) -> Value:
    """Normalise keys over their width, if the block does; queries and values pass."""
    (queries, keys, values), weights = call.read(), call.weights
    return call.written(queries, _normalised(call, keys, weights[0]) if weights else keys, values)


def normalise_heads(call: OperatorCall) -> Value:
    """Normalise every head of queries and of keys with one weight for each of both; values pass."""
    (queries, keys, values), (of_queries, of_keys) = call.read(), call.weights
    epsilon: float = getattr(call.whole, "epsilon", NORM_EPSILON)
    norms = rms_norm_by_head(queries, of_queries, epsilon), rms_norm_by_head(keys, of_keys, epsilon)
    return call.written(*norms, values)


def pass_on(call: OperatorCall) -> Value:
    """Return the operand in the layout of the spec; other operators do the work that the planner counts here."""
    return call.written(*call.read())


def multiply(call: OperatorCall) -> Value:
    """Multiply by a weight (out, in), and add a bias (out,).

    A weight of three dimensions is several in one, (products, out, in), and gives as many tensors, as do several weights,
    whose biases follow them all.
    """
    (values,), weights = call.read(), call.weights
    return call.written(*multiplied(call, values, weights))


def multiplied(call: OperatorCall, values: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Return values (…, in) times each weight, with their biases if there are any."""
    count = sum(weight.dim() == weights[0].dim() for weight in weights)
    biases: list[Tensor | None] = [bias_summand(call, bias.flatten()) for bias in weights[count:]]
    products = [
        functional.linear(values, weight.flatten(0, -2), bias)
        for weight, bias in zip(weights[:count], biases or [None] * count, strict=True)
    ]
    if weights[0].dim() == 3:
        return list(torch.unflatten(products[0], -1, (len(weights[0]), -1)).unbind(-2))
    return products


def bias_summand(call: OperatorCall, bias: Tensor) -> Tensor:
    """Return what this rank adds of a bias: ranks that have summands of one sum add it once, and elsewhere its gradient is 0."""
    placements = zip(call.output_layout, call.mesh.coordinates, strict=True)
    adds = all(placement != PARTIAL or coordinate == 0 for placement, coordinate in placements)
    return bias if adds else bias * 0.0


def rotate_queries_and_keys(call: OperatorCall) -> Value:
    """Rotate queries and keys by the angles of their positions; values pass."""
    queries, keys, values = call.read()
    layout = call.operand_layout()
    cosines, sines = call.whole.get_buffer("cosines"), call.whole.get_buffer("sines")
    start, stop = call.mesh.interval(layout, POSITIONS, len(cosines))
    angles = cosines[start:stop].to(queries.dtype), sines[start:stop].to(queries.dtype)
    heads, groups = own_heads(call, layout)
    return call.written(rotate(queries, heads, *angles), rotate(keys, groups, *angles), values)


def attend_to_past(call: OperatorCall) -> Value:
    """Return causal attention of this rank's queries, of one value with its keys and values."""
    queries, keys, values = read_for_attention(call)
    layout = call.operand_layout()
    first, _ = call.mesh.interval(layout, POSITIONS, keys.shape[1])
    block, window, scale = call.whole, None, None
    if isinstance(block, RotaryAttentionLayer):
        window, scale = block.window, block.scale
    return call.written(attend_causally(queries, keys, values, own_heads(call, layout), first, window, scale))


def read_for_attention(call: OperatorCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one value; keys and values have all positions."""
    queries, keys, values = call.operands[0].tensors
    layout = call.operands[0].layout
    (queries,) = reshard(call.mesh, (queries,), layout, call.operand_layout())
    keys, values = reshard(call.mesh, (keys, values), layout, call.operand_layout(1))
    return queries, keys, values


def own_heads(call: OperatorCall, layout: Layout) -> tuple[int, int]:
    """Return this rank's heads of queries, and of keys and values."""
    (_, parts), block = call.mesh.part(layout, WIDTH), call.whole
    if isinstance(block, RotaryAttentionLayer | NeoxBlock):
        return block.heads // parts, block.groups // parts
    heads = block.heads if isinstance(block, bert.Block) else require(block, PreNormBlock).heads
    return heads // parts, heads // parts


def hold_biases(call: OperatorCall) -> Value:
    """Return nothing: attention reads the table of biases."""
    return Value((), call.output_layout)


def activate(call: OperatorCall) -> Value:
    """Apply the activation of a pre-normalised block."""
    (inner,), block = call.read(), call.whole
    return call.written((block if isinstance(block, NeoxBlock) else require(block, PreNormBlock)).activation(inner))


def rectify(call: OperatorCall) -> Value:
    """Apply a ReLU."""
    (inner,) = call.read()
    return call.written(functional.relu(inner))


def gate_product(call: OperatorCall) -> Value:
    """Multiply the gate's activation with the other product."""
    (gate, up), block = call.read(), call.whole
    activation = block.activation if isinstance(block, llama.Block) else functional.silu
    return call.written(activation(gate) * up)


def add_residual(call: OperatorCall) -> Value:
    """Add a branch, times the block's factor if it has one, to its shortcut, and the bias of the branch's last product."""
    (added,), (before,), bias = call.read(), call.read(1), call.weights
    multiplier = call.whole.multiplier if isinstance(call.whole, RotaryAttentionLayer) else None
    total = before + added if multiplier is None else torch.add(before, added, alpha=multiplier)
    return call.written(total + bias[0] if bias else total)


def scale_hidden(call: OperatorCall) -> Value:
    """Multiply by the head's factor."""
    (hidden,) = call.read()
    scale: float | None = getattr(call.whole, "scale", None)
    return call.written(hidden if scale is None else hidden * scale)


def scale_embedding(call: OperatorCall) -> Value:
    """Multiply token embeddings by their factor."""
    (hidden,), multiplier = call.read(), getattr(call.whole, "multiplier", None)
    return call.written(hidden if multiplier is None else hidden * multiplier)


def cap_logits(call: OperatorCall) -> Value:
    """Bound the logits by the head's soft cap, in the format of its weights."""
    (logits,), cap = call.read(), getattr(call.whole, "soft_cap", None)
    (table,) = call.layer.weights("projection")
    return call.written(logits if cap is None else torch.tanh(logits.to(table.dtype) / cap) * cap)


def project_onto_vocabulary(call: OperatorCall) -> Value:
    """Return the logits of this rank's entries."""
    (hidden,), (table, *bias) = call.read(), call.weights
    return call.written(project(hidden, table, bias_summand(call, bias[0]) if bias else None))


def cross_entropy(call: OperatorCall) -> Value:
    """Return the loss of this rank's rows and positions, summed over rows, each its mean over all positions."""
    targets = call.data["targets"]
    return written_loss(call, position_losses(call, targets).sum() / targets[0].numel())


def position_losses(call: OperatorCall, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each of this rank's positions; 0 where the target is UNMASKED.

    Logits are (rows, positions, classes), or (rows, classes); `targets` of all rows and positions, or one of each row.
    """
    (logits,) = call.read()
    layout, classes = call.operand_layout(), logits.dim() - 1
    whole = targets if targets.dim() == classes else targets.unsqueeze(1)
    own = call.mesh.own_part(whole, layout).contiguous()
    dimensions = sharding_dimensions(layout, classes)
    if dimensions:
        first, _ = call.mesh.interval(layout, classes, logits.shape[-1] * call.mesh.part(layout, classes)[1])
        return cross_entropy_of_slice(logits, own, first, call.mesh.group(dimensions))
    flat = logits.flatten(0, -2).float()
    losses = functional.cross_entropy(flat, own.flatten(), reduction="none", ignore_index=UNMASKED)
    return losses.view_as(own)


def written_loss(call: OperatorCall, loss: Tensor) -> Value:
    """Return what an operator adds to the loss: a sum over this rank's rows and positions."""
    (total,), classes = call.written(loss).tensors, call.operands[0].tensors[0].dim() - 1
    return Value((), call.output_layout, call.added_loss(total, call.operand_layout(), *range(classes)))
