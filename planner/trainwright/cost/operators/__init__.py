"""Costs of operators with shardings of their own, after Alpa's integer program (Zheng et al. 2022, §4).

`stage_costs.operator_stage_costs` costs a stage of a plan; the search `alpa` chooses among the same costs.
"""
