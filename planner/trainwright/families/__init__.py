"""Families of models: from a few numbers to the operators of every layer. One file a family."""

from __future__ import annotations

from trainwright.families.ends import BLOCK, EMBEDDING, HEAD
from trainwright.families.gpt import Gpt

Family = Gpt
"""The families a model can be built from; a worker builds the same layers from the same family."""

__all__ = ["BLOCK", "EMBEDDING", "HEAD", "Family", "Gpt"]
