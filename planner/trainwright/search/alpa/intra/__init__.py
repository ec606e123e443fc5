"""Intra-operator pass of Alpa: parallel algorithms of all operators of consecutive layers on one logical mesh (paper §4).

`IntraOperator(problem).spans(mesh, rows)` costs every run of consecutive layers under its fastest assignment;
`.options(mesh, rows)` costs them under several assignments of decreasing memory.
"""

from __future__ import annotations

from trainwright.cost.operators.algorithm_costs import Rewriting
from trainwright.cost.operators.integer_program import WeightedObjective
from trainwright.cost.operators.sharding_specs import LogicalMesh
from trainwright.search.alpa.intra.intra_operator import IntraOperator
from trainwright.search.alpa.intra.span_costs import SpanCosts

__all__ = [
    "IntraOperator",
    "LogicalMesh",
    "Rewriting",
    "SpanCosts",
    "WeightedObjective",
]
