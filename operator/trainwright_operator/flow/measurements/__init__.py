"""Measurements that outlive their plan: keys, what is kept of a gang's report, and what a later plan reuses."""
