"""What people read: tables of candidates, of an estimate's parts, of searches side by side."""

from __future__ import annotations

from trainwright.report.origin import origin_fields, origin_words
from trainwright.report.sheets import accelerator_table, machine_table, sheet_lines
from trainwright.report.tables import breakdown_table, candidate_table

__all__ = [
    "accelerator_table",
    "breakdown_table",
    "candidate_table",
    "machine_table",
    "origin_fields",
    "origin_words",
    "sheet_lines",
]
