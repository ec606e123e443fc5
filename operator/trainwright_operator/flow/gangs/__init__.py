"""Gangs (all pods of one measurement, started all or none), from their manifests to their results."""
