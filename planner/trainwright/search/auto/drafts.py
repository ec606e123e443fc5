"""Plans as the programme sees them: every line and size of micro-batches of one problem, looked at coarsely, then finely."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from trainwright.plan import Plan
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.computing import Computing, sharing_seconds
from trainwright.search.auto.efforts import MANY_DEVICES, Effort, Grain
from trainwright.search.auto.line import lines
from trainwright.search.auto.pipelines import pipeline_of
from trainwright.search.auto.places import Places
from trainwright.search.auto.programme import Programme
from trainwright.search.auto.several import Several
from trainwright.search.auto.tables import LineTables
from trainwright.search.protocol import Problem

SHARING_SHARE = 0.1
"""Of computing alone: less is hardly worth a node for both ends."""

Draft = tuple[float, Plan]
"""Seconds by the programme, and the plan."""


@dataclass(frozen=True)
class Drafts:
    """What the programme finds for one problem.

    Attributes:
        joins_pipelines: whether several pipelines, of all sizes of micro-batches, are looked at, too.
    """

    problem: Problem
    effort: Effort
    joins_pipelines: bool = True

    def steps(self, sizes: Sequence[int]) -> Iterator[tuple[list[Draft], float]]:
        """What each look finds, best first, and the share of lines that were looked at by then.

        Coarse drafts of all lines and sizes of micro-batches, then those of several pipelines, then fine ones of the best.
        """
        effort = self.effort
        coarse = effort.coarse
        cells = Cells(self.problem, coarse.cuts)
        choices: list[tuple[float, int, int]] = []
        coarse_lines = lines(self.problem, coarse.units, coarse.orders, self._most_shared_ends)
        near: list[int] = []
        for number, line in enumerate(coarse_lines):
            places = Places(cells, line, effort.most_tensor)
            known: dict[int, float] = {}
            order = _outwards(known, len(sizes), effort.patience, from_first=effort.begins_small)
            if effort.follows and number and near:
                order = iter(sorted({*near, len(sizes) - 1}))
            for index in order:
                (tables,) = self._tables([places], sizes[index])
                found = self._plans(tables, is_rough=True)
                known[index] = found[0][0] if found else float("inf")
                choices += [(seconds, number, sizes[index]) for seconds, _ in found[:1]]
                yield found, number / len(coarse_lines)
            best = min(known, key=lambda index: known[index])
            near = near or [index for index in (best - 1, best, best + 1) if 0 <= index < len(sizes)]
        if self.joins_pipelines and len(set(coarse_lines[0].classes)) > 1:
            yield Several(cells, coarse_lines[0]).drafts(), 1.0
        chosen = [(number, rows) for _, number, rows in sorted(choices)[: effort.choices]]
        for fine in effort.fine:
            for tables in self._fine_tables(cells.cut_otherwise(fine.cuts), fine, chosen):
                yield self._plans(tables), 1.0

    def _fine_tables(self, cells: Cells, fine: Grain, chosen: Sequence[tuple[int, int]]) -> Iterator[LineTables]:
        """Of the lines with these numbers, for micro-batches of so many rows; those of as many rows are made together."""
        found = dict(enumerate(lines(self.problem, fine.units, fine.orders, self._most_shared_ends)))
        chosen = [(number, rows) for number, rows in chosen if number in found]
        places = {number: Places(cells, found[number], self.effort.most_tensor) for number, _ in chosen}
        known: dict[tuple[int, int], LineTables] = {}
        for number, rows in chosen:
            if (number, rows) not in known:
                alike = [other for other, size in chosen if size == rows]
                tables = self._tables([places[other] for other in alike], rows)
                known.update(zip(((other, rows) for other in alike), tables, strict=True))
            yield known[number, rows]

    @cached_property
    def _most_shared_ends(self) -> int:
        """Lines with a node at both ends: where devices are many, only if they may pay."""
        problem = self.problem
        if len(problem.devices) <= MANY_DEVICES:
            return self.effort.shared_ends
        pays = sharing_seconds(problem) > SHARING_SHARE * Computing(problem).all_seconds
        return self.effort.shared_ends if pays else 0

    def _tables(self, places: Sequence[Places], rows: int) -> list[LineTables]:
        return LineTables.together(places, rows, self.problem.global_batch_size // rows)

    def _plans(self, tables: LineTables, *, is_rough: bool = False) -> list[Draft]:
        problem, micro_batches = self.problem, tables.micro_batches
        found = []
        for chain in Programme(tables, is_rough).chains():
            pipeline = pipeline_of(chain, tables, micro_batches)
            plan = Plan(len(problem.model.layers), problem.global_batch_size, (pipeline,))
            found.append((chain.seconds(micro_batches), plan))
        return found


def _outwards(known: dict[int, float], count: int, patience: int, *, from_first: bool) -> Iterator[int]:
    """Indices from the middle (or the first) on both ways, each until `patience` in a row were worse than the best known."""
    start = 0 if from_first else count // 2
    yield start
    for way in (1, -1):
        index, worse = start + way, 0
        while 0 <= index < count and worse < patience:
            best = min(known.values())
            yield index
            worse = 0 if known[index] < best or best == float("inf") else worse + 1
            index += way
    # The whole batch at once is a kind of its own: no pipeline to fill, and sharded gradients never come together.
    yield from (index for index in range(max(count - 2, 0), count) if index not in known)
