"""The reference modules, written in torch; test folders are no packages, so they are imported by their path, once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "torch_models"
if _NAME not in sys.modules:
    _folder = Path(__file__).parent / _NAME
    _spec = importlib.util.spec_from_file_location(
        _NAME, _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_NAME] = _module
    _spec.loader.exec_module(_module)
