"""Registry of layers by model family; torch is loaded only when layers are made."""

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
    "custom": "trainwright_worker.layers.described_layers:load_described_layers",
}
"""Class by family tag; its module is imported on first use."""


def supported_families() -> tuple[str, ...]:
    """Return the tags of the families that this worker supports."""
    return tuple(_CLASSES)


def make_family_layers(model: Model) -> FamilyLayers:
    """Return the layers of a model's family.

    Raises ValueError for an unsupported family, WorkerError if a user model differs from its description.
    """
    place = _CLASSES.get(model.family.family)
    if place is None:
        raise ValueError(f"this worker has no layers of family {model.family.family}; it has {', '.join(_CLASSES)}")
    module, name = place.split(":")
    return cast("FamilyLayers", getattr(import_module(module), name)(model.family))
