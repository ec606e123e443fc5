"""GPT and Llama of torch's own modules, as a user of torch writes them, with the initial weights of the executor's layers.

They compute what those layers compute. The modules are those that `parallelize_module` divides over a tensor group; where
it divides along the sequence, hidden states between modules are a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

from trainwright.families import Family, Gpt, Llama
from trainwright.families.fields import NORM_EPSILON
from trainwright.model import Model
from trainwright_worker.layers.attention import causal_attention
from trainwright_worker.layers.layer import Layer, SharedWeights, summed_row_losses
from trainwright_worker.layers.registry import make_family_layers
from trainwright_worker.layers.tensor_parallel import TensorShard
from trainwright_worker.layers.transformer_parts import by_head, join_heads, rotary_angles, rotate

Styles = dict[str, ParallelStyle]


class Embedding(nn.Module):
    """Embedding of tokens, for a GPT of positions too."""

    def __init__(self, family: Gpt | Llama) -> None:
        super().__init__()
        self.tokens = nn.Embedding(family.vocabulary_size, family.hidden_size)
        self.register_buffer("places", torch.arange(family.sequence_length), persistent=False)
        self.positions = nn.Embedding(family.sequence_length, family.hidden_size) if isinstance(family, Gpt) else None

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        """Return where the executor's weights belong."""
        found: dict[Tensor, Tensor] = {self.tokens.weight: layer.get_parameter("tokens")}
        if self.positions is not None:
            found[self.positions.weight] = layer.get_parameter("positions")
        return found

    def styles(self, *, along_sequence: bool) -> Styles:
        """Return how a tensor group divides the modules: the vocabulary, and the positions likewise."""
        layouts = {"tokens": Shard(1), "positions": Shard(0)} if along_sequence else {}
        return {
            name: RowwiseParallel(input_layouts=Replicate(), output_layouts=layouts.get(name, Replicate()))
            for name, _ in self.named_children()
        }

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens)
        return embedded if self.positions is None else embedded + self.positions(self.places)


class GptAttention(nn.Module):
    """Causal attention; the rows of its joint projection are by head, so that a tensor group divides heads."""

    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        width = gpt.hidden_size
        self.head_size = width // gpt.heads
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        return {
            self.qkv.weight: self._by_head(layer.get_parameter("qkv_weight")),
            self.qkv.bias: self._by_head(layer.get_parameter("qkv_bias")),
            self.output.weight: layer.get_parameter("attention_weight"),
            self.output.bias: layer.get_parameter("attention_bias"),
        }

    def _by_head(self, weight: Tensor) -> Tensor:
        """Rearrange (3, heads × size, …) into (heads × 3 × size, …)."""
        return torch.unflatten(weight, 1, (-1, self.head_size)).transpose(0, 1).flatten(0, 2)

    def forward(self, normed: Tensor) -> Tensor:
        joint = self.qkv(normed).unflatten(-1, (-1, 3, self.head_size))
        query, key, value = joint.permute(3, 0, 2, 1, 4).unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: Tensor = self.output(join_heads(mixed))
        return attended


class GptFeedForward(nn.Module):
    def __init__(self, gpt: Gpt) -> None:
        super().__init__()
        width = gpt.hidden_size
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        return {
            getattr(getattr(self, part), name): layer.get_parameter(f"{part}_{name}")
            for part in ("expand", "contract")
            for name in ("weight", "bias")
        }

    def forward(self, normed: Tensor) -> Tensor:
        contracted: Tensor = self.contract(functional.gelu(self.expand(normed)))
        return contracted


class LlamaAttention(nn.Module):
    """Causal attention with rotary positions, whose query heads share keys and values."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, llama: Llama) -> None:
        super().__init__()
        width = llama.hidden_size
        self.head_size = width // llama.heads
        shared = (llama.key_value_heads or llama.heads) * self.head_size
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.output = nn.Linear(width, width, bias=False)
        angles = rotary_angles(llama.sequence_length, self.head_size)
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        parts = {self.query: "query", self.key: "key", self.value: "value", self.output: "attention"}
        return {part.weight: layer.get_parameter(f"{name}_weight") for part, name in parts.items()}

    def forward(self, normed: Tensor) -> Tensor:
        query, key = (self._rotated(projection(normed)) for projection in (self.query, self.key))
        value = self.value(normed)
        mixed = causal_attention(query, key, by_head(value, value.shape[-1] // self.head_size))
        attended: Tensor = self.output(join_heads(mixed))
        return attended

    def _rotated(self, values: Tensor) -> Tensor:
        heads = values.shape[-1] // self.head_size
        return by_head(rotate(values, heads, self.cosines, self.sines), heads)


class LlamaFeedForward(nn.Module):
    def __init__(self, llama: Llama) -> None:
        super().__init__()
        width, inner = llama.hidden_size, llama.feed_forward_size
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.contract = nn.Linear(inner, width, bias=False)

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        gate, up = layer.get_parameter("expand_weight")
        contract = layer.get_parameter("contract_weight")
        return {self.gate.weight: gate, self.up.weight: up, self.contract.weight: contract}

    def forward(self, normed: Tensor) -> Tensor:
        contracted: Tensor = self.contract(functional.silu(self.gate(normed)) * self.up(normed))
        return contracted


class Block(nn.Module):
    """Attention and a feed-forward, each after a normalisation."""

    attention: GptAttention | LlamaAttention
    feed_forward: GptFeedForward | LlamaFeedForward

    def __init__(self, family: Gpt | Llama) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = make_norm(family), make_norm(family)
        if isinstance(family, Gpt):
            self.attention, self.feed_forward = GptAttention(family), GptFeedForward(family)
        else:
            self.attention, self.feed_forward = LlamaAttention(family), LlamaFeedForward(family)

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        return {
            **self.attention.weights(layer),
            **self.feed_forward.weights(layer),
        }  # normalisations start with 1 and 0

    def styles(self, *, along_sequence: bool) -> Styles:
        """Return how a tensor group divides the modules: heads, and the inner width of the feed-forward."""
        layout = Shard(1) if along_sequence else Replicate()
        found: Styles = {}
        for name in ("attention", "feed_forward"):
            part = self.get_submodule(name)
            if along_sequence:
                found[f"{name}_norm"] = SequenceParallel()
            found[name] = PrepareModuleInput(input_layouts=(layout,), desired_input_layouts=(Replicate(),))
            *before, last = (child for child, _ in part.named_children())
            found |= {f"{name}.{child}": ColwiseParallel() for child in before}
            found[f"{name}.{last}"] = RowwiseParallel(output_layouts=layout)
        return found

    def forward(self, hidden: Tensor) -> Tensor:
        attended: Tensor = hidden + self.attention(self.attention_norm(hidden))
        output: Tensor = self.feed_forward(self.feed_forward_norm(attended))
        return attended + output


class Head(nn.Module):
    """Last normalisation, projection onto the vocabulary, and the sum over rows of the losses, shape (1,)."""

    def __init__(self, family: Gpt | Llama) -> None:
        super().__init__()
        self.norm = make_norm(family)
        self.output = nn.Linear(family.hidden_size, family.vocabulary_size, bias=False)

    def weights(self, layer: Layer) -> dict[Tensor, Tensor]:
        return {self.output.weight: layer.get_parameter("tokens")}

    @staticmethod
    def styles(*, along_sequence: bool) -> Styles:
        """Return how a tensor group divides the modules: the vocabulary, whose logits stay divided."""
        layout = Shard(1) if along_sequence else Replicate()
        found: Styles = {
            "output": ColwiseParallel(input_layouts=layout, output_layouts=Shard(-1), use_local_output=False)
        }
        return {**found, "norm": SequenceParallel()} if along_sequence else found

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        loss = summed_row_losses(self.output(self.norm(hidden)), targets)
        return (loss.to_local() if isinstance(loss, DTensor) else loss).view(1)


def make_norm(family: Gpt | Llama) -> nn.Module:
    """Return the family's normalisation."""
    if isinstance(family, Gpt):
        return nn.LayerNorm(family.hidden_size)
    return nn.RMSNorm(family.hidden_size, NORM_EPSILON)


class StageModel(nn.Module):
    """Consecutive layers of a model on one rank."""

    def __init__(self, model: Model, layers: Sequence[int], seed: int) -> None:
        super().__init__()
        family, last = gpt_or_llama(model.family), len(model.layers) - 1
        self.is_tied = model.kind_of(0).shared_weight is not None
        own_layers = make_family_layers(model)
        shared: SharedWeights = {}
        parts: dict[str, Embedding | Block | Head] = {}
        for layer in layers:
            part = Embedding(family) if layer == 0 else Head(family) if layer == last else Block(family)
            own = own_layers.make(layer, seed=seed, shard=TensorShard(), shared=shared)
            _copy(part.weights(own))
            parts[str(layer)] = part
        self.parts = nn.ModuleDict(parts)
        self._tie()

    @property
    def blocks(self) -> list[Block]:
        return [part for part in self.parts.values() if isinstance(part, Block)]

    @property
    def tied_weight(self) -> Tensor | None:
        """Weight that the model's first and last layer share, if this rank has either."""
        found = [part.tokens.weight for part in self.parts.values() if isinstance(part, Embedding)]
        found += [part.output.weight for part in self.parts.values() if isinstance(part, Head)]
        return found[0] if found and self.is_tied else None

    def _tie(self) -> None:
        for part in self.parts.values():
            if isinstance(part, Head) and self.tied_weight is not None:
                part.output.weight = self.tied_weight

    def divide(self, mesh: DeviceMesh, *, along_sequence: bool) -> None:
        """Divide the modules over a tensor group with DTensor; the parts of tied weights stay tied."""
        for part in self.parts.values():
            parallelize_module(part, mesh, part.styles(along_sequence=along_sequence))  # type: ignore[operator]
        self._tie()

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the stage's hidden states, or the sum of the losses after the head; layer 0 receives tokens."""
        for part in self.parts.values():
            hidden = part(hidden, targets) if isinstance(part, Head) else part(hidden)
        return hidden


def _copy(weights: Mapping[Tensor, Tensor]) -> None:
    with torch.no_grad():
        for parameter, values in weights.items():
            parameter.copy_(values)


def gpt_or_llama(family: Family) -> Gpt | Llama:
    if not isinstance(family, Gpt | Llama):
        raise TypeError(f"there are modules of torch for GPT and Llama, not for {family.family}")
    return family
