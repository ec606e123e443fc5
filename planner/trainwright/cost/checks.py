"""Whether a plan can run at all."""

from __future__ import annotations

from trainwright.cost.setting import Setting
from trainwright.plan import Plan


def check_plan(plan: Plan, setting: Setting) -> None:
    """Raises ValueError, in words, for plans that do not belong to the model or the cluster, or lack a layer profile."""
    model = setting.model
    if plan.model_layers != len(model.layers):
        raise ValueError(f"the plan is for a model of {plan.model_layers} layers, but this one has {len(model.layers)}")
    _check_devices(plan, setting)
    several = len(plan.pipelines) > 1
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for run in stage.layers:
                if model.max_tensor_degree % run.tensor:
                    raise ValueError(
                        f"{f'pipeline {index}, ' if several else ''}stage {number}, layers {run.first}…"
                        f"{run.end - 1}: tensor degree {run.tensor} does not divide the model, which "
                        f"allows {model.max_tensor_degree}"
                    )


def _check_devices(plan: Plan, setting: Setting) -> None:
    largest: dict[str, int] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for device in stage.devices:
                if not 0 <= device.slot <= largest.get(device.node, -1):
                    setting.cluster.accelerator_of(device)
                    largest[device.node] = device.slot
