"""Operators of TransGAN and Swin over (rows, positions, width), on this rank's parts.

Between entering and leaving windows, positions are in the order of windows, and within each in lines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainwright.families.operators import POSITION_BIASES
from trainwright_worker.layers import swin
from trainwright_worker.layers.image_models import Windows
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.encoder_operators import attend_to_all
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, ROWS, WIDTH, OperatorCall, Value, require
from trainwright_worker.layers.operators.token_operators import (
    bias_summand,
    own_heads,
    read_for_attention,
)
from trainwright_worker.layers.pre_norm_block import PreNormBlock
from trainwright_worker.layers.trans_gan import Upsample, project_latents
from trainwright_worker.layers.transformer_parts import by_head


def project_data(call: OperatorCall) -> Value:
    """Project the `latents` of the data to the positions of the first image."""
    weight, bias = call.weights
    latents = call.own_rows("latents", call.data_layout(weight.dim() - 1))
    return call.written(project_latents(latents, weight, bias_summand(call, bias)))


def enter_windows(call: OperatorCall) -> Value:
    """Rearrange positions from lines of the image to windows, one after the other."""
    (values,), windows = call.read(), require_windows(call.whole)
    return call.written(joined_windows(windows.partition(values), windows))


def attend(call: OperatorCall) -> Value:
    """Return attention within windows, whose positions are then again in lines of the image, or over all positions."""
    block = require(call.whole, PreNormBlock)
    if block.windows is None:
        return attend_to_all(call)
    return call.written(block.windows.reverse(block.attend(*heads_in_windows(call, block.windows))))


def attend_with_biases(call: OperatorCall) -> Value:
    """Return attention within windows, whose scores have biases by relative position; positions stay in their order."""
    block = require(call.whole, swin.Block)
    windows, (table,) = require_windows(block), call.layer.weights(POSITION_BIASES)
    first, stop = call.mesh.interval(call.operand_layout(), WIDTH, block.heads)
    mixed = block.attend_with(table[:, first:stop], *heads_in_windows(call, windows))
    return call.written(joined_windows(block.order_windows(mixed), windows))


def leave_windows(call: OperatorCall) -> Value:
    """Rearrange positions from windows to lines of the image."""
    (values,), windows = call.read(), require_windows(call.whole)
    return call.written(windows.reverse(split_windows(values, windows)))


def join_neighbours(call: OperatorCall) -> Value:
    """Join each square of four patches: (rows, positions / 4, 4 × width)."""
    (values,) = call.read()
    return call.written(require(call.whole, swin.PatchMerging).join_neighbours(values))


def heads_in_windows(call: OperatorCall, windows: Windows) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of this rank's heads, (rows × windows, heads, window², size)."""
    heads, _ = own_heads(call, call.operand_layout())
    query, key, value = (by_head(split_windows(each, windows), heads) for each in read_for_attention(call))
    return query, key, value


def split_windows(values: Tensor, windows: Windows) -> Tensor:
    """Rearrange (rows, positions, width) into (rows × windows, window², width)."""
    return values.reshape(-1, windows.window**2, values.shape[-1])


def joined_windows(values: Tensor, windows: Windows) -> Tensor:
    """Rearrange (rows × windows, window², width) into (rows, positions, width)."""
    return values.reshape(-1, windows.side**2, values.shape[-1])


def require_windows(layer: Layer) -> Windows:
    """Return the windows of a block. Raises TypeError for a layer without."""
    windows = require(layer, PreNormBlock).windows
    if windows is None:
        raise TypeError("expected a block with windows, got one whose positions attend to all")
    return windows


def grow(call: OperatorCall) -> Value:
    """Double the side of the image."""
    (values,) = call.read()
    return call.written(require(call.whole, Upsample).grow(values))


def project_to_pixels(call: OperatorCall) -> Value:
    """Project each position to the channels of a pixel."""
    (values,), (weight, bias) = call.read(), call.weights
    return call.written(functional.linear(values, weight.flatten(1), bias_summand(call, bias)))


def squared_distance(call: OperatorCall) -> Value:
    """Return the loss of this rank's values, summed over rows, each its mean squared distance to the target image."""
    (values,), layout = call.read(), call.operand_layout()
    targets = call.data["images"].flatten(2).transpose(1, 2)
    distances = functional.mse_loss(values, call.mesh.own_part(targets, layout), reduction="none")
    # The sum over an image's pixels overflows float16.
    (total,) = call.written(distances.sum(dtype=torch.float32) / targets[0].numel()).tensors
    return Value((), call.output_layout, call.added_loss(total, layout, ROWS, POSITIONS, WIDTH))
