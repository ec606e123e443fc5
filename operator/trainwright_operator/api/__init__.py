"""The resource TrainingPlan: pydantic models of what a person asks (`spec`) and what the operator answers (`status`)."""

from __future__ import annotations

from typing import Final

GROUP: Final = "trainwright.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "TrainingPlan"
PLURAL: Final = "trainingplans"
SINGULAR: Final = "trainingplan"
SHORT_NAME: Final = "tplan"
NAME_PATTERN: Final = "[a-z]([-a-z0-9]*[a-z0-9])?"
"""Form of a plan's name."""
MAX_NAME_LENGTH: Final = 40
"""Names of children are made from the plan's name, and a PyTorchJob's pods are called `<job>-worker-<index>`
inside 63 characters."""
