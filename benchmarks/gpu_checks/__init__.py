"""Checks of the worker on GPUs: `make test-gpu`, or `python benchmarks/gpu_checks` on a machine without a package index."""
