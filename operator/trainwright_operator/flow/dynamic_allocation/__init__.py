"""Devices that drivers publish and claims hold (dynamic resource allocation): which are whole, offered, in use."""
