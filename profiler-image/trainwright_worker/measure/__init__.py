"""Benchmarks of links, collectives, overlap and layers."""
