"""Layer of a user model: a torch module, replicated over its tensor group, with what it takes and hands on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainwright_worker.layers.custom_boundaries import HandedOn
from trainwright_worker.layers.custom_names import WholeNames, user_name
from trainwright_worker.layers.custom_sharing import replace_weight
from trainwright_worker.layers.layer import Boundary, Data, Layer, Output


class CustomLayer(Layer):
    """User module, replicated on every rank of a tensor group.

    Attributes:
        number: its place in the model.
        reads: fields passed to the module after the boundary.
        whole_names: what it has of the whole model.
        takes, hands_on: arguments of the module, and of the next one, that hold the tensors of boundaries.
    """

    draws_random_numbers = True
    has_pure_forward = False

    def __init__(  # noqa: PLR0913 (a layer's place, and what it takes and hands on)
        self,
        number: int,
        module: nn.Module,
        reads: tuple[str, ...],
        whole_names: WholeNames,
        *,
        takes: HandedOn,
        hands_on: HandedOn | None,
        is_last: bool,
    ) -> None:
        super().__init__()
        self.number = number
        self.module = module
        self.reads = reads  # type: ignore[misc] # known when the user's model is built
        self.whole_names = whole_names
        self.takes, self.hands_on = takes, hands_on
        self.is_last = is_last

    def checkpoint_name(self, layer: int, attribute: str) -> str:
        return self.whole_names.checkpoint_name(layer, _name_in_module(attribute))

    def torch_names(self, layer: int, attribute: str) -> tuple[str, ...]:
        own_name = _name_in_module(attribute)
        whole = self.whole_names.find(layer, own_name)
        return super().torch_names(layer, own_name) if whole is None else whole.names

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        persistent = dict(super().persistent_buffers())
        for attribute, buffer in self.named_buffers(remove_duplicate=False):
            whole = self.whole_names.find(self.number, _name_in_module(attribute))
            if attribute in persistent if whole is None else whole.is_saved:
                yield attribute, buffer

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by all of the user's names for them in the module."""
        return {_name_in_module(name): weight for name, weight in self.named_parameters(remove_duplicate=False)}

    def share(self, own_name: str, shared_name: str, shared: nn.Parameter) -> None:
        """Put a shared weight in the place of this layer's own."""
        replace_weight(self.module, self.weights()[own_name], shared)
        attribute = next(name for name, weight in self.named_parameters() if weight is shared)
        self.shared_weights = {attribute: shared_name}  # type: ignore[misc] # known when the user's model is built

    @property
    def class_name(self) -> str:
        """Name of the user's class."""
        return type(self.module).__name__

    @property
    def label(self) -> str:
        """Place and class, as sentences name it."""
        return f"layer {self.number} ({self.class_name})"

    def call(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the user's module makes of the boundary's tensors and the fields."""
        count = self.takes.tensors
        return self.module(*self.takes.arguments(tensors[:count]), *tensors[count:])

    def compute(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that it hands on, or its losses by row and their weights if it returns some."""
        made = self.call(tensors)
        if self.is_last or self.hands_on is None:
            return made if isinstance(made, tuple) else (made,)
        return self.hands_on.flatten(made, self.label)

    def forward(self, boundary: Boundary, data: Data) -> Output:
        return self.output(self.compute((*boundary, *(data[field] for field in self.reads))))

    def output(self, made: tuple[Tensor, ...]) -> Output:
        """Return what it computed as the executor takes it."""
        if self.is_last:
            losses, weights = made if len(made) == 2 else (made[0], None)
            absolute = losses.detach().abs().sum(dtype=torch.float32)
            weight = None if weights is None else weights.sum(dtype=torch.float64)
            return Output((), losses.sum(dtype=torch.float32), absolute, weight)
        return Output(made)


def _name_in_module(attribute: str) -> str:
    """Return the name of a weight or buffer in the user's module, as torch's own tools write it."""
    return user_name(attribute.removeprefix("module."))
