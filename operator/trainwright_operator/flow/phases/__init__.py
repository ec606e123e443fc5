"""Phases of a plan, one module each."""
