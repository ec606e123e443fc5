"""Operators of a GPT-2 and a Llama on parts of their tensors, by the names of the planner's operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trainwright_worker.layers import llama
from trainwright_worker.layers.layer import Layer
from trainwright_worker.layers.operators.layouts import PARTIAL, Layout, sharding_dimensions, without_sums
from trainwright_worker.layers.operators.local_functions import attend, divided_norm
from trainwright_worker.layers.operators.operator_tensors import POSITIONS, WIDTH, OperatorTensors, Value
from trainwright_worker.layers.operators.resharding import reshard
from trainwright_worker.layers.pre_norm_block import PreNormBlock
from trainwright_worker.layers.token_models import cross_entropy_of_slice, look_up_slice, project
from trainwright_worker.layers.transformer_parts import rotate

LAYER_NORM_EPSILON = 1e-5
"""Epsilon of torch's `layer_norm`, which GPT-2's layers leave as it is."""


class ShardedOperators(OperatorTensors):
    """Operators of a layer, each computed on this rank's parts once its operands have the layouts of its spec.

    All ranks of the mesh run the same operators in the same order.
    """

    @property
    def epsilon(self) -> float:
        """Epsilon of the layer's norms."""
        own: float = getattr(self.whole, "epsilon", LAYER_NORM_EPSILON)
        return own

    def embed(self, tokens: Tensor) -> Value:
        """Look up this rank's tokens in its part of the table, and add the positions if there are any."""
        layout, (table,) = self.output_layout("tokens"), self.weights("tokens")
        own, placed = self.own_rows(tokens, layout), self.placed["tokens"].layout
        if sharding_dimensions(placed, 0):
            first, _ = self.mesh.interval(placed, 0, self.whole.get_parameter("tokens").shape[0])
            value = self.written("tokens", look_up_slice(own, table, first))
        else:
            value = self.written("tokens", functional.embedding(own, table))
        if "positions" not in self.specs:
            return value
        (hidden,), (positions,) = self.read("positions", value), self.weights("positions")
        start, stop = self.mesh.interval(self.operand_layout("positions"), POSITIONS, len(positions))
        return self.written("positions", hidden + positions[start:stop])

    def block(self, entered: Value) -> Value:
        """Compute attention and feed-forward, each with its norm and residual."""
        projected = self._product("query_key_value", self._norm("attention_normalisation", entered))
        if "rotary" in self.specs:
            projected = self._rotate(projected)
        attended = self._product("attention_output", self._attend(projected))
        middle = self._add("attention_residual", attended, entered)
        normed = self._norm("feed_forward_normalisation", middle)
        return self._add("feed_forward_residual", self._feed_forward(normed), middle)

    def loss(self, entered: Value, targets: Tensor) -> Tensor:
        """Return the loss of this rank's rows and positions, summed over rows, each its mean over all positions."""
        (hidden,) = self.read("projection", self._norm("final_normalisation", entered))
        (logits,) = self.read("cross_entropy", self.written("projection", project(hidden, *self.weights("projection"))))
        layout = self.operand_layout("cross_entropy")
        own = self.own_rows(targets, layout)
        dimensions = sharding_dimensions(layout, WIDTH)
        if dimensions:
            first, _ = self.mesh.interval(layout, WIDTH, logits.shape[-1] * self.mesh.part(layout, WIDTH)[1])
            losses = cross_entropy_of_slice(logits, own, first, self.mesh.group(dimensions))
        else:
            losses = functional.cross_entropy(logits.flatten(0, -2).float(), own.flatten(), reduction="none")
        return losses.sum() / targets[0].numel()

    def _feed_forward(self, normed: Value) -> Value:
        if "gate" in self.specs:
            gate, up = self.read("gate", self._product("gate_and_up", normed))
            return self._product("down", self.written("gate", functional.silu(gate) * up))
        (inner,) = self.read("activation", self._product("feed_forward_in", normed))
        active = _require_gpt_block(self.whole).activation(inner)
        return self._product("feed_forward_out", self.written("activation", active))

    def _norm(self, name: str, value: Value) -> Value:
        (values,), (weight, *bias) = self.read(name, value), self.weights(name)
        group = self.mesh.group(sharding_dimensions(self.operand_layout(name), WIDTH))
        if group is not None:
            normed = divided_norm(values, weight, bias[0] if bias else None, group, self.epsilon)
        elif bias:
            normed = functional.layer_norm(values, weight.shape, weight, bias[0], self.epsilon)
        else:
            normed = functional.rms_norm(values, weight.shape, weight, self.epsilon)
        return self.written(name, normed)

    def _product(self, name: str, value: Value) -> Value:
        """Multiply by a weight; several in one are (products, out, in), and give as many tensors."""
        (values,), weights = self.read(name, value), self.weights(name)
        placements = zip(self.output_layout(name), self.mesh.coordinates, strict=True)
        adds_bias = all(placement != PARTIAL or coordinate == 0 for placement, coordinate in placements)
        if len(weights) == 2 and weights[1].dim() == weights[0].dim() - 1:
            weight, bias = weights
            # Ranks that have summands of the sum add the bias once; on the others its gradient is 0.
            joint_bias = bias.flatten() if adds_bias else bias.flatten() * 0.0
            products = [functional.linear(values, weight.flatten(0, -2), joint_bias)]
        else:
            products = [functional.linear(values, weight.flatten(0, -2)) for weight in weights]
        if weights[0].dim() == 3:
            products = list(torch.unflatten(products[0], -1, (len(weights[0]), -1)).unbind(-2))
        return self.written(name, *products)

    def _rotate(self, value: Value) -> Value:
        queries, keys, values = self.read("rotary", value)
        layout = self.operand_layout("rotary")
        cosines, sines = self.whole.get_buffer("cosines"), self.whole.get_buffer("sines")
        start, stop = self.mesh.interval(layout, POSITIONS, len(cosines))
        angles = cosines[start:stop].to(queries.dtype), sines[start:stop].to(queries.dtype)
        heads, groups = self._heads(layout)
        return self.written("rotary", rotate(queries, heads, *angles), rotate(keys, groups, *angles), values)

    def _attend(self, value: Value) -> Value:
        if PARTIAL in value.layout:  # two readers: sum once
            complete = without_sums(value.layout)
            value = Value(reshard(self.mesh, value.tensors, value.layout, complete), complete)
        queries, keys, values = value.tensors
        layout = self.operand_layout("attention")
        (queries,) = reshard(self.mesh, (queries,), value.layout, layout)
        keys, values = reshard(self.mesh, (keys, values), value.layout, self.operand_layout("attention", 1))
        first, _ = self.mesh.interval(layout, POSITIONS, keys.shape[1])
        return self.written("attention", attend(queries, keys, values, self._heads(layout), first))

    def _heads(self, layout: Layout) -> tuple[int, int]:
        """Return the heads of queries, and of keys and values, on this rank."""
        (_, parts), block = self.mesh.part(layout, WIDTH), self.whole
        if isinstance(block, llama.Block):
            return block.heads // parts, block.groups // parts
        heads = _require_gpt_block(block).heads // parts
        return heads, heads

    def _add(self, name: str, branch: Value, shortcut: Value) -> Value:
        """Add a branch to its shortcut, and the bias of the branch's last product if there is one."""
        (added,), (before,), bias = self.read(name, branch), self.read(name, shortcut, 1), self.weights(name)
        total = before + added
        return self.written(name, total + bias[0] if bias else total)


def _require_gpt_block(layer: Layer) -> PreNormBlock:
    """Return the layer. Raises TypeError unless it is the block of a GPT-2."""
    if not isinstance(layer, PreNormBlock):
        raise TypeError(f"expected a block of a GPT-2, got {type(layer).__name__}")
    return layer
