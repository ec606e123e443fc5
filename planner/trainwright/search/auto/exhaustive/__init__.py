"""Tiny problems, of which every plan can be looked at."""

from __future__ import annotations

from trainwright.search.auto.exhaustive.enumeration import exhaustive, is_small

__all__ = ["exhaustive", "is_small"]
