"""Modules of packages that the library does not depend on, imported by name."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Any


def load_module(module: str, packages: Collection[str], remedy: str) -> Any:
    """Import a module. Raises ValueError with a remedy if one of these packages is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in packages:
            raise
        raise ValueError(f"the package {missing} is not installed here; {remedy}") from error
