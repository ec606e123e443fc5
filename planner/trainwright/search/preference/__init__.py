"""Preference among candidates: simpler plans within a tolerance, and plans that move little state."""
