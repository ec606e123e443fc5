"""Operators of a layer on local parts of their tensors, sharded each in its own way over a mesh of two dimensions."""
