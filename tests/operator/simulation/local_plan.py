"""Small TrainingPlan for `tune`."""

from __future__ import annotations

from typing import Any

PLAN: dict[str, Any] = {
    "apiVersion": "trainwright.dev/v1alpha1",
    "kind": "TrainingPlan",
    "metadata": {"name": "tiny"},
    "spec": {
        "model": {"gpt": {"layers": 2, "hiddenSize": 16, "heads": 2, "sequenceLength": 8, "vocabularySize": 32}},
        "training": {"globalBatchSize": 4},
        "search": {"planner": "Megatron"},
        "trials": {"topK": 2, "baseline": "Megatron"},
    },
}
