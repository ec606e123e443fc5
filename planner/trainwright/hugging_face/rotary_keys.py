"""Keys of rotary angles: `rope_parameters`, or `rope_theta` and `rope_scaling` as before version 5.0 of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainwright.hugging_face.config import Config

WINDOWED: Final = "sliding_attention"
FULL: Final = "full_attention"
"""Kinds of blocks in `layer_types`."""


def rotary_keys(config: Config, *outer: str) -> Config | None:
    """Return the keys of rotary angles in blocks with full attention; None, with a lack noted, where they are no mapping.

    `outer`: keys beside the mapping that mean the same as those in it, which come first.
    """
    scaled = config.keys.get("rope_parameters") or config.keys.get("rope_scaling") or {}
    config.skip("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", *outer)
    if not isinstance(scaled, Mapping):
        config.lacks.append(f"rope_scaling is {scaled}, which is no mapping")
        return None
    if isinstance(scaled.get(FULL), Mapping):  # by kind of block, as in Gemma 3
        scaled = scaled[FULL]
    beside = {name: config.keys.get(name) for name in outer}
    return Config({**beside, **scaled}, config.model_type, config.head, config.tokens)


def scaling_kind(given: Config) -> str:
    """Return how the angles are scaled; `default`: they are not."""
    return str(given.keys.get("rope_type", given.keys.get("type", "default")))


def note_scaling(config: Config, kind: str) -> None:
    """Note a scaling that a family leaves out."""
    if kind != "default":
        config.remarks.append(f"scaling {kind} of rotary angles is left out, which changes neither time nor memory")
