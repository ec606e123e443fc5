"""Text for people: tables of candidates, estimates and compared searches, and explanations of plans."""

from __future__ import annotations

from trainwright.report.comparison import (
    ComparisonRow,
    comparison_fields,
    comparison_table,
    refusal_sentence,
    runner_up,
    stopped_fields,
    stopped_sentences,
    work_bound_fields,
    work_bound_sentences,
)
from trainwright.report.error_range import error_range_fields, error_range_sentences
from trainwright.report.explanation import Explanation
from trainwright.report.export_price import ExportPrice, export_sentences, export_table
from trainwright.report.format_sentences import (
    format_fields,
    format_sentences,
    profile_sentences,
    slow_format_fields,
    slow_sentence,
)
from trainwright.report.hardware_tables import accelerator_table, machine_table, sheet_lines
from trainwright.report.iteration_chart import timeline
from trainwright.report.measured_timeline import chrome_trace, measured_timeline
from trainwright.report.plan_figures import figure_fields
from trainwright.report.plan_summary import idle_devices, idle_sentences
from trainwright.report.preference import preference_fields, preference_sentences, running_fields
from trainwright.report.preset_tables import preset_lines, preset_table
from trainwright.report.tables import (
    breakdown_fields,
    breakdown_table,
    candidate_table,
    origin_fields,
    origin_words,
    pareto_plot,
)
from trainwright.report.trial_report import calibration_report, trial_fields, trial_table
from trainwright.report.worth import (
    baseline_fields,
    baseline_sentences,
    unlimited_fields,
    unlimited_sentences,
    worth_fields,
    worth_table,
)

__all__ = [
    "ComparisonRow",
    "Explanation",
    "ExportPrice",
    "accelerator_table",
    "baseline_fields",
    "baseline_sentences",
    "breakdown_fields",
    "breakdown_table",
    "calibration_report",
    "candidate_table",
    "chrome_trace",
    "comparison_fields",
    "comparison_table",
    "error_range_fields",
    "error_range_sentences",
    "export_sentences",
    "export_table",
    "figure_fields",
    "format_fields",
    "format_sentences",
    "idle_devices",
    "idle_sentences",
    "machine_table",
    "measured_timeline",
    "origin_fields",
    "origin_words",
    "pareto_plot",
    "preference_fields",
    "preference_sentences",
    "preset_lines",
    "preset_table",
    "profile_sentences",
    "refusal_sentence",
    "runner_up",
    "running_fields",
    "sheet_lines",
    "slow_format_fields",
    "slow_sentence",
    "stopped_fields",
    "stopped_sentences",
    "timeline",
    "trial_fields",
    "trial_table",
    "unlimited_fields",
    "unlimited_sentences",
    "work_bound_fields",
    "work_bound_sentences",
    "worth_fields",
    "worth_table",
]
