"""The simulated world, built small for each test."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# Test folders are no packages; the world is imported by its path, once, under one name.
_NAME = "flow_world"
if _NAME not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name("world.py"))
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_NAME] = _module
    _spec.loader.exec_module(_module)
