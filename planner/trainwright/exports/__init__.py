"""Exports of plans to other trainers and launchers, and the nearest plan that each of them supports."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from trainwright.exports.accelerate import Accelerate
from trainwright.exports.capabilities import Capabilities, format_loss, is_expressible, losses
from trainwright.exports.deepspeed import DeepSpeed
from trainwright.exports.fsdp2 import Fsdp2
from trainwright.exports.megatron_arguments import Megatron
from trainwright.exports.nearest_plan import nearest_plan, nearest_shapes
from trainwright.exports.pytorchjob import PyTorchJob
from trainwright.exports.target import ExportFile, ExportRequest, Target
from trainwright.exports.torchrun import Torchrun
from trainwright.exports.torchtitan import Torchtitan
from trainwright.exports.transformers_trainer import TransformersTrainer
from trainwright.exports.uniform_shape import UniformShape, shape_of
from trainwright.model import Model
from trainwright.plan import Plan
from trainwright.training import Optimizer

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        "megatron": Megatron(),
        "torchtitan": Torchtitan(),
        "deepspeed": DeepSpeed(),
        "accelerate": Accelerate(),
        "transformers": TransformersTrainer(),
        "fsdp2": Fsdp2(),
        "torchrun": Torchrun(),
        "pytorchjob": PyTorchJob(),
    }
)
"""Targets by the name of `--to`."""


def training_refusal(
    capabilities: Capabilities, model: Model, optimizer: Optimizer, plan: Plan | None = None
) -> str | None:
    """Return why a trainer cannot train a model with an optimizer, and which targets can, by this plan; None if it can."""
    missing = capabilities.missing(model, optimizer)
    if missing is None:
        return None
    others = [
        name
        for name, target in TARGETS.items()
        if target.capabilities.missing(model, optimizer) is None
        and format_loss(model.dtype, target.capabilities) is None
        and (plan is None or is_expressible(plan, target.capabilities.of(model, optimizer)))
    ]
    which = "take a target that has it" if plan is None else "take a target that has it and runs the plan as it is"
    return f"{missing}; {which}: {', '.join(others[:-1])} or {others[-1]}"


__all__ = [
    "TARGETS",
    "Capabilities",
    "ExportFile",
    "ExportRequest",
    "Target",
    "UniformShape",
    "format_loss",
    "is_expressible",
    "losses",
    "nearest_plan",
    "nearest_shapes",
    "shape_of",
    "training_refusal",
]
