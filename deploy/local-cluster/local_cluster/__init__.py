"""A real Kubernetes cluster on one Linux machine: real kubelets, real links, emulated speed of the devices."""
