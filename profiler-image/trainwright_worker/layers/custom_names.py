"""Names of a user's weights and buffers: in a layer, in the whole model that the layers are parts of, in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class WholeName:
    """Weight or buffer of a layer, as a part of the whole model.

    Attributes:
        names: all of its names there.
        owner: first layer that has it, and its name in that layer.
        is_saved: whether it is in the whole model's state_dict.
    """

    names: tuple[str, ...]
    owner: tuple[int, str]
    is_saved: bool


@dataclass(frozen=True, slots=True)
class WholeNames:
    """Weights and buffers of all layers, as parts of the whole model.

    Attributes:
        of_layers: weights and buffers of each layer, by their names in it; empty if there is no whole model.
        unused: names in the whole model's state_dict of what no layer has.
    """

    of_layers: tuple[Mapping[str, WholeName], ...] = ()
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, whole: nn.Module, layers: Iterable[nn.Module]) -> WholeNames:
        """Return those of layers that were made of the whole model's own modules, weights and buffers."""
        names: dict[Tensor, list[str]] = {}
        for name, tensor in _named_tensors(whole):
            names.setdefault(tensor, []).append(name)
        saved = {user_name(name) for name in whole.state_dict()}
        owners: dict[Tensor, tuple[int, str]] = {}
        of_layers = tuple(
            {
                own_name: WholeName(
                    tuple(names[tensor]), owners.setdefault(tensor, (layer, own_name)), names[tensor][0] in saved
                )
                for own_name, tensor in _named_tensors(module)
                if tensor in names
            }
            for layer, module in enumerate(layers)
        )
        unused = (name for tensor in names.keys() - owners.keys() for name in names[tensor] if name in saved)
        return cls(of_layers, tuple(sorted(unused)))

    def find(self, layer: int, own_name: str) -> WholeName | None:
        """Return what a layer's weight or buffer is in the whole model; None if it is no part of one."""
        return self.of_layers[layer].get(own_name) if self.of_layers else None

    def checkpoint_name(self, layer: int, own_name: str) -> str:
        """Return its name in checkpoints: that of the whole model, if this is the first layer that has it."""
        if not self.of_layers:
            return f"{layer}.{own_name}"
        whole = self.find(layer, own_name)
        if whole is None or whole.owner[0] != layer:
            return f"{layer}:{own_name}"  # no name of a whole model, such as one of numbered modules, has a colon
        return whole.names[0]


def user_name(attribute: str) -> str:
    """Return a weight's name as torch's own tools write it: without torch.compile's `_orig_mod.`."""
    return attribute.replace("_orig_mod.", "")


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's weights and buffers by all of their names."""
    for name, tensor in chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    ):
        yield user_name(name), tensor
