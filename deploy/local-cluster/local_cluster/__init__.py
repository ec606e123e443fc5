"""Kubernetes cluster on one Linux machine with real kubelets, real links and emulated device speeds."""
