"""Trainwright's planner: which placement and which parallel degrees train a model fastest on the devices at hand.

The planner is a library of pure functions on plain data. It knows neither Kubernetes nor torch.
"""
