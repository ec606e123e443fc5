"""Comparison of the executor with torch's own parts on the same plans, run by `make bench-trainers`."""
