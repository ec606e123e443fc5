"""Decisions on a plan from the observed cluster state. Pure: no clock, no network, no Kubernetes client."""
