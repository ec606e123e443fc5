"""Adapters to Kubernetes: the only place that knows kopf and the Kubernetes client."""
