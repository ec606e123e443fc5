"""Data sheets of accelerators and machines, and layer profiles estimated from them."""
