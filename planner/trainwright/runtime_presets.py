"""Presets of training runtimes, with the source of every fact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import yaml

from trainwright.accelerators.data_sheets import Source
from trainwright.documents import adapter
from trainwright.runtime import Runtime


@dataclass(frozen=True, slots=True)
class Fact:
    """Value of a field of Runtime, and the key of its source.

    Attributes:
        note: how the source names it.
    """

    value: bool | int | float | str | None
    source: str
    note: str | None = None


@dataclass(frozen=True)
class RuntimePreset:
    """Facts of one framework; the other fields of Runtime keep their defaults.

    Attributes:
        trainer: target of exports that it is; None for Trainwright's own worker, which runs every plan.
    """

    title: str
    facts: dict[str, Fact]
    trainer: str | None = None

    @property
    def runtime(self) -> Runtime:
        values = {name: fact.value for name, fact in self.facts.items()} | {"trainer": self.trainer}
        runtime: Runtime = adapter(Runtime).validate_python(values)
        return runtime


@dataclass(frozen=True, slots=True)
class PresetFile:
    """Content of `runtime_presets.yaml`."""

    sources: dict[str, Source]
    presets: dict[str, RuntimePreset]


@cache
def preset_file() -> PresetFile:
    """Load all presets and their sources."""
    text = files("trainwright").joinpath("runtime_presets.yaml").read_text(encoding="utf-8")
    file: PresetFile = adapter(PresetFile).validate_python(yaml.safe_load(text))
    return file


def runtime_presets() -> Mapping[str, RuntimePreset]:
    return preset_file().presets


def runtime_preset(name: str) -> RuntimePreset:
    """Return a preset by name. Raises ValueError for an unknown one."""
    if name not in runtime_presets():
        raise ValueError(f"runtime: there is no preset {name!r}; choose one of {', '.join(runtime_presets())}")
    return runtime_presets()[name]
