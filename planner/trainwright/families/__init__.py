"""Families of models: from a few numbers to the operators of every layer, one module per family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, get_args

from pydantic import Field

from trainwright.families.bert import Bert
from trainwright.families.blocks import BLOCK, EMBEDDING, HEAD
from trainwright.families.custom import MAX_PRODUCTS, Custom, CustomChecks, CustomKind, CustomProduct, ProductName
from trainwright.families.gpt import Gpt
from trainwright.families.llama import Llama
from trainwright.families.moe import Moe
from trainwright.families.swin import Swin
from trainwright.families.t5 import T5
from trainwright.families.trans_gan import TransGan
from trainwright.families.vit import Vit
from trainwright.families.wide_resnet import WideResnet

Family = Annotated[
    Gpt | Llama | Bert | Vit | Swin | T5 | Moe | WideResnet | TransGan | Custom,
    Field(discriminator="family"),
]
"""Families that a model can be of; in a document the field `family` selects one."""

FAMILIES: Final[Mapping[str, type[Family]]] = {
    noun.__dataclass_fields__["family"].default: noun for noun in get_args(get_args(Family)[0])
}
"""Class of every family by its tag."""

__all__ = [
    "BLOCK",
    "EMBEDDING",
    "FAMILIES",
    "HEAD",
    "MAX_PRODUCTS",
    "T5",
    "Bert",
    "Custom",
    "CustomChecks",
    "CustomKind",
    "CustomProduct",
    "Family",
    "Gpt",
    "Llama",
    "Moe",
    "ProductName",
    "Swin",
    "TransGan",
    "Vit",
    "WideResnet",
]
