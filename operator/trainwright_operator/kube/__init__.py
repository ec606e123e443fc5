"""Adapters to Kubernetes, the only package that uses kopf and the Kubernetes client."""
