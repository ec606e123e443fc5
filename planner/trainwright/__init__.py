"""Trainwright's planner: finds the placement and the parallel degrees that train a model fastest on given devices.

A library of pure functions on plain data, which knows neither Kubernetes nor torch.
"""
