"""Presets of training runtimes: a table of all, and one with the source of every fact."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group

from trainwright.report.tables import add_row, new_table, titled
from trainwright.runtime_presets import Fact, RuntimePreset, preset_file


def preset_table(presets: Mapping[str, RuntimePreset]) -> Group:
    """Return the facts `[fact, preset]` of all presets; a dash where a preset leaves Runtime's default."""
    table = new_table([("fact", "whole"), *((name, "right") for name in presets)])
    for fact in dict.fromkeys(name for preset in presets.values() for name in preset.facts):
        add_row(
            table, fact, *(_value(preset.facts[fact]) if fact in preset.facts else "–" for preset in presets.values())
        )
    return titled(
        "Presets of training runtimes",
        table,
        "a name shows the source of each fact; `trainwright schema runtime` explains them",
    )


def preset_lines(name: str, preset: RuntimePreset) -> str:
    """Return every fact of a preset with its source."""
    lines = [f"{name}: {preset.title}", ""]
    for fact, given in preset.facts.items():
        source = preset_file().sources[given.source]
        lines += [f"{fact}: {_value(given)}", f"    {source.title}"]
        lines += [f"    {line}" for line in (source.url, given.note) if line]
    return "\n".join(lines)


def _value(fact: Fact) -> str:
    if isinstance(fact.value, bool):
        return "yes" if fact.value else "no"
    return "as the weights" if fact.value is None else str(fact.value)
