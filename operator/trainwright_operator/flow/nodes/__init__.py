"""Devices of nodes: what the nodes say of them, what drivers publish and claims hold, and which nodes are left out."""
