"""Trial selection: which trial lowers the expected regret most, and when no trial is worth it any more."""

from __future__ import annotations

from trainwright.trial_selection.knowledge_gradient import (
    REGRET_BELOW,
    Proposal,
    Rule,
    StoppingDecision,
    TrialPosterior,
    propose,
)
from trainwright.trial_selection.memory_fit import fit_probability
from trainwright.trial_selection.model_uncertainty import ModelUncertainty
from trainwright.trial_selection.posterior import Posterior
from trainwright.trial_selection.trial_history import Observations, TrialHistory

__all__ = [
    "REGRET_BELOW",
    "ModelUncertainty",
    "Observations",
    "Posterior",
    "Proposal",
    "Rule",
    "StoppingDecision",
    "TrialHistory",
    "TrialPosterior",
    "fit_probability",
    "propose",
]
