"""Lifecycle of the processes of a gang (pods that start together): launch, rendezvous, abort and termination."""
