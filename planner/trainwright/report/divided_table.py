"""Table that fits a narrow terminal: columns that do not fit follow in further tables below, beside the first column again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

GAP: Final = 2
"""Cells between two columns."""
READABLE: Final = 16
"""Width from which text may be broken into lines, rather than shown in a table below."""
NARROWEST_BROKEN: Final = 12
"""Minimum width of text in a terminal that is too narrow for two columns."""


class DividedTable(Table):
    """Table that is divided where it is wider than the terminal; its cells and headings are `Text`.

    A row without a text in a part is left out there. Columns with `no_wrap` break only where they do not fit beside the first column. Those justified to the right, which
    are numbers, never do: where they do not fit, the table is wider than the terminal.
    """

    def __init__(self) -> None:
        super().__init__(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, columns in enumerate(_divided(self.columns, options.max_width)):
            if number:
                yield Text()
            widths = _widths(columns, options.max_width)
            part = Table(box=self.box, pad_edge=False, show_edge=False, collapse_padding=True)
            for column, width in zip(columns, widths, strict=True):
                part.add_column(column.header, justify=column.justify, overflow="fold", width=width)
            for row, *cells in zip(self.rows, *(column.cells for column in columns), strict=True):
                if any(cast("Text", cell).plain.strip() for cell in cells):
                    part.add_row(*cells, end_section=row.end_section)
            yield from part.__rich_console__(console, options.update(width=max(options.max_width, _whole(widths))))


def _divided(columns: Sequence[Column], width: int) -> list[list[Column]]:
    """Return the columns of each part."""
    first, *others = columns
    parts, part = [], [first]
    for column in others:
        if len(part) > 1 and _whole([_readable(member) for member in (*part, column)]) > width:
            parts.append(part)
            part = [first]
        part.append(column)
    return [*parts, part]


def _readable(column: Column) -> int:
    widest = _widest(column)
    return widest if column.no_wrap else min(widest, max(READABLE, _longest_word(column)))


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """Return the columns' widths: lines that may break share what the others leave, the narrowest of them first."""
    widest = [_widest(column) for column in columns]
    widths = [_widest(column) if column.no_wrap else _longest_word(column) for column in columns]
    if _whole(widths) > width:
        breaks = [column.justify != "right" for column in columns]
        widths = [min(least, NARROWEST_BROKEN) if may else least for least, may in zip(widths, breaks, strict=True)]
    growing = [place for place, least in enumerate(widths) if least < widest[place]]
    while growing and _whole(widths) < width:
        widths[min(growing, key=lambda place: widths[place])] += 1
        growing = [place for place in growing if widths[place] < widest[place]]
    return widths


def _whole(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _texts(column: Column) -> list[str]:
    return [cast("Text", cell).plain for cell in (column.header, *column.cells)]


def _widest(column: Column) -> int:
    return max(cell_len(line) for text in _texts(column) for line in text.split("\n"))


def _longest_word(column: Column) -> int:
    return max((cell_len(word) for text in _texts(column) for word in text.split()), default=0)
