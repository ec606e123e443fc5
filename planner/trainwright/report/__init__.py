"""What people read: tables of candidates, of an estimate's parts, of searches side by side."""

from __future__ import annotations

from trainwright.report.origin import origin_fields, origin_words
from trainwright.report.prices import cost_per_sample
from trainwright.report.tables import breakdown_table, candidate_table

__all__ = ["breakdown_table", "candidate_table", "cost_per_sample", "origin_fields", "origin_words"]
