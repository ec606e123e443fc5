"""Operators of layers as loop nests, and which reads which (Alpa, Zheng et al. 2022, §4.1)."""
