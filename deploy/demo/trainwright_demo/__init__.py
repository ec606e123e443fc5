"""Demo: local cluster (or a kube context), operator, example TrainingPlan, live view, measured winner."""
