"""Best option of every stage that a line of devices may hold, at one number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trainwright.cost.layer_sums import Array
from trainwright.search.auto.replica_sets import StageOption
from trainwright.search.auto.stage_options import StageOptions
from trainwright.search.auto.stage_sites import StageSites
from trainwright.strategy import Sharding

IN_FLIGHT_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""In-flight counts that tables distinguish; others are rounded up."""


@dataclass(frozen=True, eq=False)
class BestOptions:
    """`[site, first, end]` costs of each site's best option, infinite where nothing fits and for the extra last site.

    Attributes:
        seconds: per micro-batch.
        tail: seconds after the last backward.
        backward: seconds per backward.
        tensor: tensor degree.
    """

    seconds: Array
    tail: Array
    backward: Array
    tensor: Array


@dataclass
class LineOptions:
    """Costs of every possible stage on a line.

    Attributes:
        stage_options: options of this line, and possibly of others.
    """

    sites: StageSites
    stage_options: StageOptions
    _best: dict[int, BestOptions] = field(default_factory=dict)

    @classmethod
    def for_lines(cls, sites_of_lines: Sequence[StageSites], rows: int, micro_batches: int) -> list[LineOptions]:
        """Build the tables of several lines, sharing their options."""
        replica_sets = dict.fromkeys(replica_set for sites in sites_of_lines for replica_set in sites.replica_sets)
        stage_options = StageOptions(sites_of_lines[0].replica_tables, replica_sets, rows, micro_batches)
        return [cls(sites, stage_options) for sites in sites_of_lines]

    @property
    def rows(self) -> int:
        """Return rows per micro-batch."""
        return self.stage_options.rows

    @property
    def micro_batches(self) -> int:
        return self.stage_options.micro_batches

    @cached_property
    def _options_by_site(self) -> NDArray[np.intp]:
        """Return [site, index] option numbers, padded with the number of options."""
        option_numbers = self.stage_options.option_numbers
        by_site = [
            [option_numbers[replica_set] for replica_set in site.replica_sets if replica_set in option_numbers]
            for site in self.sites.sites
        ]
        table = np.full((len(by_site), max(1, *map(len, by_site))), len(option_numbers), dtype=np.intp)
        for index, numbers in enumerate(by_site):
            table[index, : len(numbers)] = numbers
        return table

    @property
    def is_empty(self) -> bool:
        """Return whether no stage can take so few rows."""
        return bool((self._options_by_site == len(self.stage_options.options)).all())

    def in_flight_level(self, remaining_stages: int) -> int:
        """Return in-flight micro-batches, given the stages from this one on, rounded up to a level."""
        in_flight = min(remaining_stages, self.micro_batches)
        return next((kept for kept in IN_FLIGHT_LEVELS if kept >= in_flight), in_flight)

    def best(self, in_flight: int) -> BestOptions:
        """Return each site's option with the least share of the iteration."""
        if in_flight not in self._best:
            stage_options, table = self.stage_options, self._options_by_site
            costs = stage_options.costs(in_flight)
            sharding_count, count, span_count = costs.seconds.shape
            score = np.full((sharding_count, count + 1, span_count), np.inf)
            np.multiply(costs.seconds, self.micro_batches, out=score[:, :count])
            score[:, :count] += stage_options.tail_seconds
            by_site = score[np.arange(sharding_count)[:, None], table[:, None, :]].reshape(len(table), -1, span_count)
            least = by_site.min(axis=1)
            # A tenth of all stages fit, or fewer.
            site, span = np.isfinite(least).nonzero()
            # Equals `argmin`, which takes three times as long along any axis but the last.
            chosen = (by_site[site, :, span] == least[site, span][:, None]).argmax(axis=1)
            sharding_number, number = np.divmod(chosen, table.shape[1])
            option = table[site, number]
            tensor = np.array([float(each.strategy.tensor) for each in stage_options.options])
            columns = (
                costs.seconds[sharding_number, option, span],
                stage_options.tail_seconds[sharding_number, option, span],
                stage_options.backward_seconds[option, span],
                tensor[option],
            )
            self._best[in_flight] = BestOptions(*(self._by_cuts(site, span, column) for column in columns))
        return self._best[in_flight]

    def _by_cuts(self, site: NDArray[np.intp], span: NDArray[np.intp], column: Array) -> Array:
        size = len(self.sites.replica_tables.cuts)
        by_cuts = np.full((len(self._options_by_site) + 1, size, size), np.inf)
        first, end = self.stage_options.spans
        by_cuts[site, first[span], end[span]] = column
        return by_cuts

    def choose(self, site_number: int, span: tuple[int, int], in_flight: int) -> tuple[StageOption, Sharding, float]:
        """Return the best option of a stage, its sharding and its recompute ratio."""
        stage_options, table = self.stage_options, self._options_by_site
        costs = stage_options.costs(in_flight)
        first, end = stage_options.spans
        column = int(np.flatnonzero((first == span[0]) & (end == span[1]))[0])
        numbers = [number for number in table[site_number].tolist() if number < len(stage_options.options)]
        score = self.micro_batches * costs.seconds[:, numbers, column] + stage_options.tail_seconds[:, numbers, column]
        sharding_number, index = divmod(int(score.argmin()), len(numbers))
        number = numbers[index]
        return (
            stage_options.options[number],
            stage_options.shardings[sharding_number],
            float(costs.recompute_ratio[sharding_number, number, column]),
        )
