"""Launchers of a gang: the Kubernetes objects that its pods are created from, one module each."""
