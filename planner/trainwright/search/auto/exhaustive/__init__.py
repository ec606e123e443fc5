"""Exhaustive search for tiny problems."""

from __future__ import annotations

from trainwright.search.auto.exhaustive.branch_and_bound import enumerate_plans, is_enumerable

__all__ = ["enumerate_plans", "is_enumerable"]
