"""The part `spec.model`: exactly one of the families."""

from __future__ import annotations

from typing import Final

from trainwright import families
from trainwright_operator.api.base import ApiModel
from trainwright_operator.api.families.bert import BertSpec
from trainwright_operator.api.families.bounds import ruled
from trainwright_operator.api.families.custom import CustomSpec
from trainwright_operator.api.families.gpt import GptSpec
from trainwright_operator.api.families.llama import LlamaSpec
from trainwright_operator.api.families.moe import MoeSpec
from trainwright_operator.api.families.swin import SwinSpec
from trainwright_operator.api.families.t5 import T5Spec
from trainwright_operator.api.families.trans_gan import TransGanSpec
from trainwright_operator.api.families.vit import VitSpec
from trainwright_operator.api.families.wide_resnet import WideResnetSpec

_NAMES: Final = ("gpt", "llama", "bert", "vit", "swin", "t5", "moe", "wideResNet", "transGan", "custom")


class ModelSpec(ApiModel):
    """The model: exactly one family."""

    model_config = ruled(
        (
            f"[{', '.join(f'has(self.{name})' for name in _NAMES)}].filter(given, given).size() == 1",
            f"model needs exactly one family; set one of {', '.join(f'model.{name}' for name in _NAMES)}",
        )
    )

    gpt: GptSpec | None = None
    """A GPT-2 of any size."""
    llama: LlamaSpec | None = None
    """A Llama, a Mistral or one of their like."""
    bert: BertSpec | None = None
    """A BERT of any size."""
    vit: VitSpec | None = None
    """A Vision Transformer of any size."""
    swin: SwinSpec | None = None
    """A Swin Transformer of any size."""
    t5: T5Spec | None = None
    """A T5 of any size."""
    moe: MoeSpec | None = None
    """A mixture of experts."""
    wide_res_net: WideResnetSpec | None = None
    """A Wide-ResNet."""
    trans_gan: TransGanSpec | None = None
    """TransGAN's generator."""
    custom: CustomSpec | None = None
    """A model of your own."""

    def family(self) -> families.Family:
        """The one family that is set. Raises ValueError where there is not one (the API server refuses that)."""
        found = [value for name in type(self).model_fields if (value := getattr(self, name)) is not None]
        if len(found) != 1:
            raise ValueError(f"model needs exactly one family, got {len(found)}; set one of {', '.join(_NAMES)}")
        family: families.Family = found[0].family()
        return family
