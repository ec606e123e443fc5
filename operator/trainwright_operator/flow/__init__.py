"""What to do next, decided from what the cluster holds now. Pure: no clock, no network, no Kubernetes client."""
