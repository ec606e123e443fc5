"""Text for people: tables of candidates, estimates and compared searches, and explanations of plans."""

from __future__ import annotations

from trainwright.report.comparison import (
    ComparisonRow,
    comparison_fields,
    comparison_table,
    cut_short,
    refusal_sentence,
    runner_up,
    work_bound,
)
from trainwright.report.error_range import expected_range
from trainwright.report.explanation import Explanation
from trainwright.report.export_price import ExportPrice, export_sentences, export_table
from trainwright.report.format_sentences import (
    number_format,
    slow_format,
    slow_layers,
)
from trainwright.report.hardware_tables import accelerator_table, machine_table, sheet_lines
from trainwright.report.iteration_chart import timeline
from trainwright.report.measured_timeline import chrome_trace, measured_timeline
from trainwright.report.plan_figures import figure_fields
from trainwright.report.plan_summary import idle_devices
from trainwright.report.preference import preference_fields, preferred
from trainwright.report.preset_tables import preset_lines, preset_table
from trainwright.report.remark import Remark, sentences
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
    heuristic,
    node_worth,
    unlimited,
    worth_table,
)

__all__ = [
    "ComparisonRow",
    "Explanation",
    "ExportPrice",
    "Remark",
    "accelerator_table",
    "breakdown_fields",
    "breakdown_table",
    "calibration_report",
    "candidate_table",
    "chrome_trace",
    "comparison_fields",
    "comparison_table",
    "cut_short",
    "expected_range",
    "export_sentences",
    "export_table",
    "figure_fields",
    "heuristic",
    "idle_devices",
    "machine_table",
    "measured_timeline",
    "node_worth",
    "number_format",
    "origin_fields",
    "origin_words",
    "pareto_plot",
    "preference",
    "preference_fields",
    "preferred",
    "preset_lines",
    "preset_table",
    "refusal_sentence",
    "runner_up",
    "sentences",
    "sheet_lines",
    "slow_format",
    "slow_layers",
    "timeline",
    "trial_fields",
    "trial_table",
    "unlimited",
    "work_bound",
    "worth_table",
]
