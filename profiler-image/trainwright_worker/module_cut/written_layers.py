"""`trainwright describe --module file.py:function`: write the layers of a torch module, and show that they compute the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from itertools import groupby
from pathlib import Path

import torch

from trainwright.quantity import format_bytes
from trainwright.report.progress import progress_bar
from trainwright_worker.layers.custom import CustomModel
from trainwright_worker.layers.custom_makers import LayerMakers, host_bytes
from trainwright_worker.module_cut.equality import ROWS, differences
from trainwright_worker.module_cut.layer_source import LayerSource
from trainwright_worker.module_cut.whole_module import WholeModule

_COPIES = 4
"""Copies of a whole module that its comparison holds: two, with their gradients."""


def write_layers(place: str, file: Path | None, note: Callable[[str], object]) -> str:
    """Write the layers of `file.py:function` into a Python file, and return their entry point.

    `note` gets what was written and how the layers differ from the whole module. Raises ValueError that names the line
    of what cannot be cut, and where the layers compute something else.
    """
    whole = WholeModule.load(place)
    path = file or Path(place.rpartition(":")[0]).with_name(f"{whole.module}_layers.py")
    if path.exists():
        raise ValueError(f"{path} is there, and may hold changes of yours; remove it, or name another file (--write)")
    source = whole.source(f"trainwright describe --module {Path(place).name}")
    path.write_text(source.text, encoding="utf-8")
    note(f"{path}: {_summary(source)}")
    sys.path.insert(0, str(path.parent.resolve()))
    invalidate_caches()
    model = import_module(path.stem).layers()
    if unused := LayerMakers(model).whole_names().unused:
        note(f"not used by the forward, so not trained and in no checkpoint: {', '.join(unused)}")
    _compare(whole, model, note)
    return f"{path.stem}:layers"


def _compare(whole: WholeModule, model: CustomModel, note: Callable[[str], object]) -> None:
    with torch.device("meta"):
        needed = _COPIES * _bytes(model)
    if needed > host_bytes():
        note(
            f"not compared with the whole module: that takes about {format_bytes(needed)}, and this host has "
            f"{format_bytes(host_bytes())}"
        )
        return
    computed = []
    with progress_bar("comparing with the whole module", sys.stderr) as report:
        report(0, len(ROWS))
        for difference in differences(whole.build, whole.losses, model):
            computed.append(difference)
            report(len(computed), len(ROWS))
    if all(difference.refusal for difference in computed):
        raise whole.error(f"it does not train: {computed[-1].refusal}")
    for difference in computed:
        if not difference.is_equal:
            raise whole.error(
                f"{difference.sentence()}, so the forward does something that its calls do not show (tensors changed in "
                "place through views, hooks, an autograd.Function); put these lines into a module of their own"
            )
        note(difference.sentence())


def _bytes(model: CustomModel) -> int:
    try:
        return LayerMakers(model).whole_bytes()
    except Exception:  # noqa: BLE001 - deliberate: a module that needs values while it is made is small
        return 0


def _summary(source: LayerSource) -> str:
    kinds = [(name, len(list(group))) for name, group in groupby(name for name, _ in source.layers)]
    named = ", ".join(name if count == 1 else f"{count} × {name}" for name, count in kinds)
    return f"{len(source.layers)} layers ({named})"
