"""Comparison of predictions with trials of every search's plans on the local cluster, run by `make bench-trials`."""
