"""How a micro-batch is split over the replicas of a stage: evenly in time, not in number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainwright.search.auto.cell import Cell


@dataclass(frozen=True, slots=True)
class Share:
    """Rows of one kind of cell: `more` of its cells take one row more than `rows`."""

    rows: int
    more: int

    @property
    def largest(self) -> int:
        return self.rows + (self.more > 0)

    def changed(self, rows: int, cells: int) -> Share:
        """With so many rows more, of so many cells in all."""
        return Share(*divmod(self.rows * cells + self.more + rows, cells))


def shares(counts: Mapping[Cell, int], rows: int, seconds: Callable[[Cell, int], float]) -> dict[Cell, Share] | None:
    """Rows for every kind of cell so that the slowest is as fast as whole rows allow; None where rows do not go round.

    Rows follow the speeds at their mean; what is left over goes, one by one, to the kind that is done first with it. Then
    the slowest cell hands over rows as long as another is done with one more before it.
    """
    cells = sum(counts.values())
    if rows < cells:
        return None
    if len(counts) == 1:
        (cell,) = counts
        return {cell: Share(*divmod(rows, cells))}
    mean = max(rows // cells, 1)
    speed = {cell: 1.0 / max(seconds(cell, mean), 1e-30) for cell in counts}
    whole = sum(count * speed[cell] for cell, count in counts.items())
    each = {cell: max(int(rows * speed[cell] / whole), 1) for cell in counts}
    left = rows - sum(count * each[cell] for cell, count in counts.items())
    while left < 0:
        slowest = max((cell for cell in counts if each[cell] > 1), key=lambda cell: seconds(cell, each[cell]))
        each[slowest] -= 1
        left += counts[slowest]
    more = dict.fromkeys(counts, 0)
    while left > 0:
        cell = min(counts, key=lambda cell: seconds(cell, each[cell] + 1))
        taken = min(left, counts[cell] - more[cell])
        left, more[cell] = left - taken, more[cell] + taken
        if more[cell] == counts[cell]:
            each[cell], more[cell] = each[cell] + 1, 0
    found = {cell: Share(each[cell], more[cell]) for cell in counts}
    for _ in range(rows):  # fewer are enough, but where more rows take less time
        slowest = max(counts, key=lambda cell: seconds(cell, found[cell].largest))
        taker = min(counts, key=lambda cell: seconds(cell, found[cell].rows + 1))
        largest = found[slowest].largest
        if slowest == taker or largest == 1 or seconds(taker, found[taker].rows + 1) >= seconds(slowest, largest):
            break
        found[slowest] = found[slowest].changed(-1, counts[slowest])
        found[taker] = found[taker].changed(1, counts[taker])
    return found


def rows_of(cells: Sequence[Cell], shared: Mapping[Cell, Share]) -> tuple[int, ...]:
    """By replica: its rows; of equal cells the first take one more."""
    left = {cell: share.more for cell, share in shared.items()}
    found = []
    for cell in cells:
        found.append(shared[cell].rows + (left[cell] > 0))
        left[cell] -= left[cell] > 0
    return tuple(found)
