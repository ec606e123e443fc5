"""Models of Hugging Face: from a `config.json` to the family that has the same layers, or to what no family has."""

from __future__ import annotations

from trainwright.hugging_face.intake import HuggingFaceModel, is_config, read_config

__all__ = ["HuggingFaceModel", "is_config", "read_config"]
