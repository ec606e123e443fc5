"""Alpa: intra-operator and inter-operator parallelism (Zheng et al., OSDI 2022)."""
