"""Searches of ours: unequal devices by design, never worse than the others."""
