"""Makers of a user model's layers: each by its own function, or as parts of the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from trainwright_worker.layers.custom_names import WholeNames

if TYPE_CHECKING:
    from trainwright_worker.layers.custom import CustomModel

_CONTAINER_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


class LayerMakers:
    """Makers of a model's layers on torch's current device, with the weights of its current random generator.

    A whole model is built once for a device and a seed, and kept until `forget`, so that all layers of a process are parts
    of one.
    """

    def __init__(self, model: CustomModel) -> None:
        self._model = model
        self._wholes: dict[torch.device, tuple[int, nn.Module]] = {}

    def seed_of(self, layer: int) -> int:
        """Return what the seed of a layer's weights depends on: the layer, or nothing if all are parts of one model."""
        return layer if self._model.build is None else 0

    def make(self, layer: int) -> Any:
        """Make a layer, with weights that no other has."""
        make: Callable[..., Any] = self._model.layers[layer]
        if self._model.build is None:
            return _made(make)
        made = make(self.whole())
        try:
            return deepcopy(made)
        except RuntimeError:  # it holds a tensor that is computed from weights, as the older weight_norm does
            del self._wholes[torch.get_default_device()]
            return made

    def whole(self) -> nn.Module:
        """Return the model of whose parts the layers are made. Raises TypeError if `build` makes no module."""
        device, seed = torch.get_default_device(), torch.default_generator.initial_seed()
        if device.type == "meta":
            seed = 0  # there are no values to draw
        if device not in self._wholes or self._wholes[device][0] != seed:
            self._wholes.pop(device, None)  # before the next one takes memory, too
            whole = _made(self._model.build or nn.Module)
            if not isinstance(whole, nn.Module):
                raise TypeError(f"build() must return a torch module, got {type(whole).__name__}")
            self._wholes[device] = seed, whole
        return self._wholes[device][1]

    def forget(self) -> None:
        """Free the whole models that hold memory; they are built again where they are needed."""
        self._wholes = {device: whole for device, whole in self._wholes.items() if device.type == "meta"}

    def whole_bytes(self) -> int:
        """Return the memory that the whole model takes in a process while its layers are made; 0 where there is none."""
        if self._model.build is None:
            return 0
        with torch.device("meta"):
            whole = self.whole()
        return sum(value.nbytes for value in (*whole.parameters(), *whole.buffers()))

    def whole_names(self) -> WholeNames:
        """Return what the layers have of the whole model."""
        if self._model.build is None:
            return WholeNames()
        with torch.device("meta"):
            whole = self.whole()
            makers: list[Callable[..., nn.Module]] = list(self._model.layers)
            return WholeNames.of(whole, [make(whole) for make in makers])


def host_bytes() -> int:
    """Return the memory of this host, or of this container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(_CONTAINER_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one whose limit is `max`
        return total


def processes_of_host() -> int:
    """Return how many processes of the gang share this host's memory, as torchrun says; 1 outside of a gang."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def part(kind: Callable[..., nn.Module], *names: str) -> Callable[[nn.Module], nn.Module]:
    """Return the function of a layer whose class takes parts of the whole model: modules, weights and buffers, by name."""

    def take(whole: nn.Module) -> nn.Module:
        return kind(*(_attribute(whole, name) for name in names))

    return take


def _attribute(whole: nn.Module, name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(whole.get_submodule(path), last)


def _made(make: Callable[[], Any]) -> Any:
    """Return what a function makes on torch's current device, or makes on the CPU and moves there."""
    device = torch.get_default_device()
    try:
        return make()
    except RuntimeError:  # deliberate: on the meta device, what reads values as it is made is made on the CPU
        if device.type != "meta":
            raise
    with torch.device("cpu"):  # such as the edges of a graph
        made = make()
    return made.to(device)
