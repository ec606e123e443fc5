"""Uniform plans, whose stages share their parallel degrees: tables, layer partitions and bounds."""
