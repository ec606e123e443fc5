"""Listings of what the planner knows: data sheets of accelerators and machines, presets of runtimes."""
