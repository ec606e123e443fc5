"""What people read: tables of candidates and of an estimate's parts."""

from __future__ import annotations

from trainwright.report.tables import breakdown_table, candidate_table

__all__ = ["breakdown_table", "candidate_table"]
