"""A cluster's plans as its users see them, read with their own rights through kubectl: no client of Kubernetes, no operator."""
