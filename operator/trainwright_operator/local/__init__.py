"""Adapter of the flow to one machine without Kubernetes: `trainwright tune`."""
