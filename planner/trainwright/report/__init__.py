"""What people read: tables of candidates, of an estimate's parts, of searches side by side; a plan explained."""

from __future__ import annotations

from trainwright.report.comparison import Answer, comparison_fields, comparison_table, runner_up
from trainwright.report.explanation import Explanation
from trainwright.report.fitted import fit_account
from trainwright.report.front import front_plot
from trainwright.report.gaps import Gaps
from trainwright.report.measured import chrome_trace, measured_timeline
from trainwright.report.origin import origin_fields, origin_words
from trainwright.report.preferences import preference_fields, preference_sentences
from trainwright.report.sheets import accelerator_table, machine_table, sheet_lines
from trainwright.report.tables import breakdown_table, candidate_table
from trainwright.report.timeline import timeline
from trainwright.report.trial import trial_fields, trial_table

__all__ = [
    "Answer",
    "Explanation",
    "Gaps",
    "accelerator_table",
    "breakdown_table",
    "candidate_table",
    "chrome_trace",
    "comparison_fields",
    "comparison_table",
    "fit_account",
    "front_plot",
    "machine_table",
    "measured_timeline",
    "origin_fields",
    "origin_words",
    "preference_fields",
    "preference_sentences",
    "runner_up",
    "sheet_lines",
    "timeline",
    "trial_fields",
    "trial_table",
]
