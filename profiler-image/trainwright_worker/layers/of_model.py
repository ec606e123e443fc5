"""From a model to its layers, by its family. Loads torch only when layers are asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

from trainwright.model import Model

if TYPE_CHECKING:
    from trainwright_worker.layers.layer import FamilyLayers

_CLASSES = {
    "gpt": "trainwright_worker.layers.gpt:GptLayers",
    "llama": "trainwright_worker.layers.llama:LlamaLayers",
    "bert": "trainwright_worker.layers.bert:BertLayers",
    "t5": "trainwright_worker.layers.t5:T5Layers",
    "moe": "trainwright_worker.layers.moe:MoeLayers",
    "vit": "trainwright_worker.layers.vit:VitLayers",
    "swin": "trainwright_worker.layers.swin:SwinLayers",
    "wide_resnet": "trainwright_worker.layers.wide_resnet:WideResnetLayers",
    "trans_gan": "trainwright_worker.layers.trans_gan:TransGanLayers",
    "custom": "trainwright_worker.layers.described:described_layers",
}
"""By the family's tag; a family's module is loaded when it is asked for."""


def families() -> tuple[str, ...]:
    """The tags of the families that this worker has layers of."""
    return tuple(_CLASSES)


def layers_of(model: Model) -> FamilyLayers:
    """The layers of a model's family.

    Raises ValueError where this worker has none, WorkerError where a user's model is not what was described.
    """
    place = _CLASSES.get(model.family.family)
    if place is None:
        raise ValueError(f"this worker has no layers of family {model.family.family}; it has {', '.join(_CLASSES)}")
    module, name = place.split(":")
    return cast("FamilyLayers", getattr(import_module(module), name)(model.family))
