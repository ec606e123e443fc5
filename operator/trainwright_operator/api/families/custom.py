"""`model.custom`: the user's own model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from trainwright import families
from trainwright_operator.api.base import ApiModel
from trainwright_operator.api.families.bounds import ruled
from trainwright_operator.api.families.family import FamilySpec, in_camel_case

KindName = Annotated[str, Field(min_length=1, max_length=64)]
Count = Annotated[float, Field(ge=0, le=1e18)]


class CustomKindSpec(ApiModel):
    """What layers of the user's own model that are alike hold, compute, keep and hand on."""

    name: KindName
    """Name of the kind, unique in the model."""
    parameters: Annotated[int, Field(ge=0, le=1_000_000_000_000_000)]
    """Values of one layer's weights."""
    forward_flops_per_row: Count
    """FLOPs of its products, 2 for each multiply-add."""
    output_elements_per_row: Annotated[int, Field(ge=1, le=1_000_000_000_000_000)]
    """Values of the tensors that it hands on; 1 behind the last layer."""
    saved_elements_per_row: Count
    """Values of the number format that its forward keeps for its backward, its input included."""
    saved_bytes_per_row: Count = 0.0
    """Bytes that it keeps in other formats (indices, masks)."""


class CustomSpec(FamilySpec):
    """A model of your own, whose code the worker finds on its PYTHONPATH. No tensor degree divides its layers."""

    noun = families.Custom
    model_config = ruled(
        (
            "self.entrypoint.matches('^[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$')",
            "entrypoint must be written package.module:function, for example models.resnet:resnet18",
        )
    )

    entrypoint: Annotated[str, Field(min_length=3, max_length=256)]
    """The function, written package.module:function, that makes the model's layers. What python -m
    trainwright_worker.describe --training-plan ENTRYPOINT writes belongs here whole."""
    kinds: Annotated[tuple[CustomKindSpec, ...], Field(min_length=1, max_length=256)]
    """Kinds of layers, each once."""
    layers: Annotated[tuple[KindName, ...], Field(min_length=1, max_length=1026)]
    """The kind's name of every layer, in order."""

    def family(self) -> families.Family:
        try:
            kinds = tuple(families.CustomKind(**dict(kind)) for kind in self.kinds)
            return families.Custom(self.entrypoint, kinds, self.layers)
        except ValueError as error:
            raise ValueError(in_camel_case(str(error))) from None
