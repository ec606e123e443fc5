"""Predictions against the clock: plans of every search, tried on the local cluster. `make bench-trials` runs it."""
