"""Clusters and runtimes from measured links and collectives."""
