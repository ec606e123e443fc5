"""Benchmarks that a user can run: the papers' tables, rebuilt."""
