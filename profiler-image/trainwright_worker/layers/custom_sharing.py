"""Weights that layers of a user's model share, by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import nn

if TYPE_CHECKING:
    from trainwright_worker.layers.custom import CustomLayers

_NAME: Final = re.compile(r"(0|[1-9]\d*)\.(.+)")

EXAMPLE: Final = 'shared_weights={"13.head.weight": "0.embedding.weight"}'


@dataclass(frozen=True, slots=True)
class SharedWeight:
    """Weight that a layer shares.

    Attributes:
        name: in checkpoints, the same for all of its layers.
        own_name: in this layer's state_dict.
        owner: layer whose function makes the first values.
        name_in_owner: in that layer's state_dict.
    """

    name: str
    own_name: str
    owner: int
    name_in_owner: str


def shared_weights_of(layers: CustomLayers) -> tuple[dict[int, SharedWeight], dict[int, SharedWeight]]:
    """Return the weight that each layer shares with others: parts of a whole model, and layers that the user names.

    The second dict has those that are not trained. Raises ValueError that states what to change.
    """
    given = layers.model.shared_weights
    if given is not None and not isinstance(given, Mapping):
        raise layers.error(f"shared_weights must be a dict such as {EXAMPLE}, got {type(given).__name__}")
    try:
        shared = _by_layer({**_shared_parts(layers), **(given or {})}, layers)
        _check_shapes(shared, layers.weight_shapes)
        frozen = _frozen(shared, layers.frozen_names)
    except ValueError as error:
        raise layers.error(str(error)) from error
    return {layer: weight for layer, weight in shared.items() if layer not in frozen}, frozen


def _shared_parts(layers: CustomLayers) -> dict[str, str]:
    """Return which weight of an earlier layer each weight of the whole model is that two layers hold, by layer and name."""
    return {
        f"{layer}.{own_name}": f"{whole.owner[0]}.{whole.owner[1]}"
        for layer, names in enumerate(layers.whole_names.of_layers)
        for own_name, whole in names.items()
        if whole.owner[0] != layer and own_name in layers.weight_shapes[layer]
    }


def _by_layer(owners: Mapping[str, str], layers: CustomLayers) -> dict[int, SharedWeight]:
    by_layer: dict[int, SharedWeight] = {}
    for user, owner in owners.items():
        ends = [_layer_and_name(name, len(layers)) for name in (user, owner)]
        if ends[0][0] == ends[1][0]:
            raise ValueError(
                f"shared_weights says that {user} is {owner} of the same layer; assign one to the other in that layer's function"
            )
        if owner in owners:
            raise ValueError(
                f"shared_weights says that {user} is {owner}, which itself is {owners[owner]}; name that for both"
            )
        for layer, own_name in ends:
            shared = SharedWeight(layers.whole_names.checkpoint_name(*ends[1]), own_name, *ends[1])
            if by_layer.setdefault(layer, shared) != shared:
                raise ValueError(
                    f"layer {layer} shares two weights with other layers, {by_layer[layer].own_name} and {own_name}, but a layer "
                    "can share one; share one, or make the layers that share several a single layer"
                )
    return by_layer


def _check_shapes(by_layer: Mapping[int, SharedWeight], shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    for layer, shared in by_layer.items():
        if shared.own_name not in shapes[layer]:
            raise ValueError(
                f"shared_weights names {layer}.{shared.own_name}, but the weights of layer {layer} are "
                f"{', '.join(shapes[layer]) or 'none'}; name one of these"
            )
    for layer, shared in by_layer.items():
        own, owner = shapes[layer][shared.own_name], shapes[shared.owner][shared.name_in_owner]
        if own != owner:
            raise ValueError(
                f"shared_weights says that {layer}.{shared.own_name} is {shared.name}, but the one has shape {own} and the other "
                f"{owner}; give both the same shape"
            )


def _frozen(by_layer: Mapping[int, SharedWeight], names: Sequence[AbstractSet[str]]) -> dict[int, SharedWeight]:
    frozen = {layer: shared for layer, shared in by_layer.items() if shared.own_name in names[layer]}
    for layer, shared in by_layer.items():
        if (layer in frozen) != (shared.owner in frozen):
            frozen_layer, trained_layer = (layer, shared.owner) if layer in frozen else (shared.owner, layer)
            raise ValueError(
                f"layer {frozen_layer} does not train the weight {shared.name} that it shares with layer {trained_layer}, which does; "
                "call requires_grad_(False) on both or on neither"
            )
    return frozen


def replace_weight(module: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in another one's place, wherever a module has it."""
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(part, name, new)


def _layer_and_name(name: object, layers: int) -> tuple[int, str]:
    parts = _NAME.fullmatch(name) if isinstance(name, str) else None
    if parts is None:
        raise ValueError(
            f"shared_weights names {name!r}, but a weight is written LAYER.NAME with its name in the layer's state_dict, "
            f"such as {EXAMPLE}"
        )
    if int(parts[1]) >= layers:
        raise ValueError(
            f"shared_weights names layer {parts[1]}, but the layers are 0 … {layers - 1}; name one of these"
        )
    return int(parts[1]), parts[2]
