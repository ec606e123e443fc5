"""All checks, in the order in which they run."""

from __future__ import annotations

from gpu_checks import (
    ceilings,
    construction,
    data_sheet_layers,
    family_layers,
    llama_block,
    one_device_trials,
    plan_gangs,
    plan_ranks,
    recomputed_dropout,
    several_gpus,
    shared_gpu,
    tuned_plans,
)
from gpu_checks.running import Check

CHECKS = (
    Check("ceilings", 60, ceilings.subjects),
    Check("block", 60, llama_block.subjects),
    Check("construction", 60, construction.subjects),
    Check("layers", 180, family_layers.subjects),
    Check("dropout", 60, recomputed_dropout.subjects),
    Check("sheets", 120, data_sheet_layers.subjects),
    Check("gang", 120, plan_gangs.subjects),
    Check("shared", 200, shared_gpu.subjects),
    Check("ranks", 300, plan_ranks.subjects),
    Check("trials", 240, one_device_trials.subjects),
    Check("tune", 180, tuned_plans.subjects),
    Check("several", 120, several_gpus.subjects),
)
