"""Layers of a whole torch module: its forward is recorded, cut at the modules that repeat, and written as a Python module."""
