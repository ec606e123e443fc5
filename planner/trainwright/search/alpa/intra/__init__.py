"""Alpa's intra-operator pass: how every operator of consecutive layers runs on one logical mesh (paper §4).

`IntraOperator(problem).spans(mesh, rows)` costs every run of consecutive layers under the assignment that is fastest;
`.options(mesh, rows)` costs them under several, which hold less and less memory.
"""

from __future__ import annotations

from trainwright.search.alpa.intra.intra_operator import IntraOperator
from trainwright.search.alpa.intra.mesh import LogicalMesh
from trainwright.search.alpa.intra.programme import Goal
from trainwright.search.alpa.intra.rewriting import Rewriting
from trainwright.search.alpa.intra.spans import SpanCosts

__all__ = [
    "Goal",
    "IntraOperator",
    "LogicalMesh",
    "Rewriting",
    "SpanCosts",
]
