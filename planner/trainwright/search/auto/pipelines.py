"""From chains of the programme to pipelines of the plan document."""

from __future__ import annotations

import numpy as np

from trainwright.plan import Pipeline, Stage
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.places import Section
from trainwright.search.auto.programme import Chain
from trainwright.search.auto.rows import rows_of
from trainwright.search.auto.setups import Setup, Strategy
from trainwright.search.auto.stage_options import StageOption
from trainwright.search.auto.tables import LineTables


def pipeline_of(chain: Chain, tables: LineTables, micro_batches: int) -> Pipeline:
    """The chain as a pipeline of so many micro-batches."""
    stages = []
    count = len(chain.sections)
    for number, section in enumerate(chain.sections):
        stages.append(_stage(section, tables, min(count - number, micro_batches)))
    return Pipeline(micro_batches, tables.rows, tuple(stages))


def _stage(section: Section, tables: LineTables, behind: int) -> Stage:
    places = tables.places
    number = int(places.numbers[section.first_unit, section.end_unit])
    option, sharding, ratio = tables.choose(number, (section.first, section.end), tables.kept(behind))
    cuts, line = places.cells.cuts, places.line
    first, end = cuts[section.first], cuts[section.end]
    cells = places.cells_of(section.first_unit, section.end_unit, option.tensor)
    again = recomputed_layers(places.cells, option, range(first, end), ratio)
    rows = rows_of(cells, option.shared)
    layers = tuple(Strategy(rows, option.tensor, sharding, layer in again) for layer in range(first, end))
    devices = line.devices[line.cuts[section.first_unit] : line.cuts[section.end_unit]]
    return Setup(devices, layers).stage(first)


def recomputed_layers(cells: Cells, option: StageOption, layers: range, ratio: float) -> set[int]:
    """The layers to recompute, those first that spare most bytes for their seconds, until such a share is spared."""
    if ratio <= 0:
        return set()
    cell, share = next(iter(option.shared.items()))
    seconds, spared = cells.recompute(cell, share.largest)
    worth = (spared / np.maximum(seconds, 1e-30)).tolist()
    order = sorted(layers, key=lambda layer: (-worth[layer], layer))
    wanted = ratio * float(np.sum(spared[layers.start : layers.stop])) * (1 - 1e-9)
    chosen: set[int] = set()
    total = 0.0
    for layer in order:
        if total >= wanted or spared[layer] <= 0:
            break
        chosen.add(layer)
        total += spared[layer]
    return chosen
