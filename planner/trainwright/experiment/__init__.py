"""Choosing what to try: which trial lowers the expected regret most, and when no trial is worth it any more."""

from __future__ import annotations

from trainwright.experiment.belief import Belief
from trainwright.experiment.doubts import Doubts
from trainwright.experiment.knowledge import Knowledge
from trainwright.experiment.proposal import REGRET_BELOW, Proposal, Rule, Verdict, propose
from trainwright.experiment.study import Learnt, Study

__all__ = ["REGRET_BELOW", "Belief", "Doubts", "Knowledge", "Learnt", "Proposal", "Rule", "Study", "Verdict", "propose"]
