"""Operators of encoders over positions or patches, on this rank's parts of their tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainwright_worker.layers.operators.layouts import COPIED, PARTIAL, Layout, along
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, ROWS, OperatorCall, Value
from trainwright_worker.layers.operators.resharding import reshard
from trainwright_worker.layers.operators.token_operators import (
    bias_summand,
    multiplied,
    own_heads,
    position_losses,
    read_for_attention,
    written_loss,
)
from trainwright_worker.layers.transformer_parts import by_head, join_heads
from trainwright_worker.synthetic_data import UNMASKED


def attend_to_all(call: OperatorCall) -> Value:
    """Return attention of this rank's queries over all positions."""
    heads, _ = own_heads(call, call.operand_layout())
    query, key, value = (by_head(tensor, heads) for tensor in read_for_attention(call))
    return call.written(join_heads(functional.scaled_dot_product_attention(query, key, value)))


def add_token_types(call: OperatorCall) -> Value:
    """Add the embeddings of the tokens' types."""
    (hidden,), (table,) = call.read(), call.weights
    types = call.own_rows("token_types", along(call.operand_layout(), ROWS, POSITIONS))
    return call.written(hidden + functional.embedding(types, table))


def apply_gelu(call: OperatorCall) -> Value:
    """Apply GELU."""
    (inner,) = call.read()
    return call.written(functional.gelu(inner))


def apply_tanh(call: OperatorCall) -> Value:
    """Apply the hyperbolic tangent."""
    (inner,) = call.read()
    return call.written(torch.tanh(inner))


def masked_cross_entropy(call: OperatorCall) -> Value:
    """Return the loss of this rank's masked positions, summed over rows, each its mean over all its masked positions."""
    targets = call.data["targets"]
    losses = position_losses(call, targets)
    own = call.mesh.own_part(targets, along(call.operand_layout(), ROWS))
    masked = (own != UNMASKED).sum(1).clamp(min=1)
    return written_loss(call, (losses.sum(1) / masked).sum())


def next_sentence_loss(call: OperatorCall) -> Value:
    """Return the loss of this rank's rows: whether their second sentence follows the first."""
    return written_loss(call, position_losses(call, call.data["next_sentence"]).sum())


def select_first_position(call: OperatorCall) -> Value:
    """Return the first position, (rows, 1, width)."""
    return call.written(_first_position(call))


def average_positions(call: OperatorCall) -> Value:
    """Return the mean over positions, (rows, 1, width)."""
    (values,) = call.read()
    return call.written(values.mean(1, keepdim=True))


def multiply_first_position(call: OperatorCall) -> Value:
    """Multiply the first position by a weight (out, in), and add a bias (out,)."""
    return call.written(*multiplied(call, _first_position(call), call.weights))


def _first_position(call: OperatorCall) -> Tensor:
    """Return the operand's first position: of ranks that divide the positions, others than the first have a summand of 0."""
    (operand,) = call.operands
    (values,), (index, _) = operand.tensors, call.mesh.part(operand.layout, POSITIONS)
    first = values[:, :1] if index == 0 else values[:, :1] * 0.0
    (selected,) = reshard(call.mesh, (first,), _replaced(operand.layout, PARTIAL), call.operand_layout())
    return selected


def embed_patches(call: OperatorCall) -> Value:
    """Project this rank's rows of each patch of its images: (rows, patches, width)."""
    weight, bias = call.weights
    images = call.mesh.own_part(call.data["images"], along(call.output_layout, ROWS))
    patch = weight.shape[-1]
    first, _ = call.mesh.interval(call.layer.placed["patches.weight"].layout, 2, patch)
    projected = functional.conv2d(images[:, :, first:], weight, bias_summand(call, bias), stride=patch)
    return call.written(projected.flatten(2).transpose(1, 2))


def add_class_token(call: OperatorCall) -> Value:
    """Put the class token before the patches."""
    (token,), (operand,), layout = call.weights, call.operands, call.operand_layout()
    # One position more is not divided as the patches are, so every rank reads all of them.
    (patches,) = reshard(call.mesh, operand.tensors, operand.layout, _replaced(layout, COPIED))
    joined = torch.cat((token.expand(len(patches), 1, -1), patches), 1)
    start, stop = call.mesh.interval(layout, POSITIONS, joined.shape[1])
    return call.written(joined[:, start:stop])


def _replaced(layout: Layout, placement: int) -> Layout:
    """Return a layout with another placement on the mesh dimensions that divide the positions."""
    first, second = (placement if each == POSITIONS else each for each in layout)
    return first, second
