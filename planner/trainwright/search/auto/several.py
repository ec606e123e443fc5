"""Several pipelines, each on nodes of its own kinds, with shares of the batch that let them end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from trainwright.plan import Pipeline, Plan
from trainwright.search.auto.cells import Cells
from trainwright.search.auto.line import Line
from trainwright.search.auto.pipelines import pipeline_of
from trainwright.search.auto.places import Places
from trainwright.search.auto.programme import Chain, Programme
from trainwright.search.auto.tables import LineTables
from trainwright.search.degrees import divisors

MOST_KINDS = 4
"""Kinds of nodes that are dealt out to pipelines in every way; where there are more, only each by itself."""
MOST_EACH = 4
"""Chains of each pipeline that are combined."""


@dataclass(frozen=True)
class Part:
    """A chain that one of several pipelines may be."""

    chain: Chain
    tables: LineTables

    def seconds(self, micro_batches: int) -> float:
        return self.chain.seconds(micro_batches)

    def within(self, seconds: float) -> int:
        """Micro-batches that it does in that time, at least one."""
        spare = seconds - self.chain.filling_seconds
        return max(int(spare / self.chain.longest_seconds) + 1, 1) if self.chain.longest_seconds > 0 else 1


@dataclass
class Several:
    """Plans of several pipelines over the kinds of nodes of one line."""

    cells: Cells
    line: Line

    def drafts(self) -> list[tuple[float, Plan]]:
        """(seconds by the programme, plan), best first."""
        problem = self.cells.problem
        found: list[tuple[float, int, tuple[Part, ...], list[int]]] = []
        known: dict[frozenset[int], list[Part]] = {}
        for groups in partitions(sorted(set(self.line.classes))):
            if len(groups) == 1:
                continue
            for group in groups:
                if group not in known:
                    known[group] = self._parts(group)
            for combination in product(*(known[group] for group in groups)):
                counts = balanced(combination, problem.global_batch_size)
                if counts is not None:
                    seconds = max(part.seconds(count) for part, count in zip(combination, counts, strict=True))
                    found.append((seconds, len(found), combination, counts))
        found.sort(key=lambda one: one[:2])
        return [(seconds, self._plan(parts, counts)) for seconds, _, parts, counts in found[:MOST_EACH]]

    def _parts(self, group: frozenset[int]) -> list[Part]:
        """The fastest chains of one pipeline, by their pace for a row."""
        batch = self.cells.problem.global_batch_size
        places = Places(self.cells, self.line.part(group))
        found = []
        for rows in divisors(batch):
            if rows <= batch // 2:
                (tables,) = LineTables.together([places], rows, max(batch // rows // 2, 1))
                found += [Part(chain, tables) for chain in Programme(tables).chains()[:1]]
        # As it would be with half of the batch.
        return sorted(found, key=lambda part: part.seconds(max(batch // 2 // part.tables.rows, 1)))[:MOST_EACH]

    def _plan(self, parts: Sequence[Part], counts: Sequence[int]) -> Plan:
        problem = self.cells.problem
        pipelines: tuple[Pipeline, ...] = tuple(
            pipeline_of(part.chain, part.tables, count) for part, count in zip(parts, counts, strict=True)
        )
        return Plan(len(problem.model.layers), problem.global_batch_size, pipelines)


def balanced(parts: Sequence[Part], batch: int) -> list[int] | None:
    """Micro-batches for each part so that the last ends as early as may be; None where no counts take the whole batch."""
    sizes = [part.tables.rows for part in parts]
    if sum(sizes) > batch:
        return None
    low, high = 0.0, max(part.seconds(-(-batch // part.tables.rows)) for part in parts)
    for _ in range(40):
        middle = (low + high) / 2
        if sum(part.within(middle) * size for part, size in zip(parts, sizes, strict=True)) >= batch:
            high = middle
        else:
            low = middle
    counts = [part.within(high) for part in parts]
    excess = sum(count * size for count, size in zip(counts, sizes, strict=True)) - batch
    for number in sorted(range(len(parts)), key=lambda number: -sizes[number]):
        taken = min(max(excess, 0) // sizes[number], counts[number] - 1)
        counts[number] -= taken
        excess -= taken * sizes[number]
    if excess == 0:
        return counts
    # Too many rows by a part of a micro-batch: one less of a large one, and the small ones make up for it.
    for number, size in enumerate(sizes):
        for other, unit in enumerate(sizes):
            lack = size - excess
            if other != number and counts[number] > 1 and lack >= 0 and lack % unit == 0:
                counts[number] -= 1
                counts[other] += lack // unit
                return counts
    return None


def partitions(items: Sequence[int]) -> Iterator[list[frozenset[int]]]:
    """Every way to deal the items out to groups; where there are many, all together and each by itself."""
    if len(items) > MOST_KINDS:
        yield [frozenset(items)]
        yield [frozenset({item}) for item in items]
    elif not items:
        yield []
    else:
        for rest in partitions(items[1:]):
            yield [frozenset({items[0]}), *rest]
            for number, group in enumerate(rest):
                yield [*rest[:number], group | {items[0]}, *rest[number + 1 :]]
