"""Torch modules of every layer kind of every family, the reference for the planner's counts.

`reference(family, kind, stored)` returns the module and a function that makes its inputs.
"""

from __future__ import annotations

from torch_models.experts import moe_layer
from torch_models.images import swin_layer, trans_gan_layer, vit_layer, wide_resnet_layer
from torch_models.parts import Reference
from torch_models.sequences import bert_layer, gpt_layer, llama_layer, t5_layer

_MAKERS = {
    "gpt": gpt_layer,
    "llama": llama_layer,
    "bert": bert_layer,
    "t5": t5_layer,
    "moe": moe_layer,
    "vit": vit_layer,
    "swin": swin_layer,
    "wide_resnet": wide_resnet_layer,
    "trans_gan": trans_gan_layer,
}


def reference(family, kind: str, *, stored: bool) -> Reference:
    """Return the torch layer of that kind."""
    return _MAKERS[family.family](family, kind, stored)
