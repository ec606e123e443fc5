"""Readers of nodes, their devices and who holds these."""
