"""Types of quantities in documents that pods write, with the bounds that every reader may count on.

Documents are checked against them where they are read; code that makes a report is not.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field

LARGEST_INTEGER: Final = 2**63 - 1
"""Maximum of an integer that the API server stores."""
SHORTEST_SECONDS: Final = 1e-9
"""Minimum of an iteration's time: no clock measures less, and rates by it stay finite."""
LONGEST_SECONDS: Final = 1e9
MAX_ROWS: Final = 2**40
MAX_LOSS: Final = 1e24
"""Beyond it a loss counts as not finite."""

OMITTED_DEFAULT: Final[Any] = Field(exclude_if=lambda value: not value)
"""Mark of a field that documents leave out where it is zero or false: readers older than the field refuse to see it."""

OMITTED_ONE: Final[Any] = Field(exclude_if=lambda value: value == 1)
"""Likewise where it is one, or true."""

OMITTED_NONE: Final[Any] = Field(exclude_if=lambda value: value is None)
"""Likewise where it is absent: zero is a value."""

FLAT: Final = object()
"""Mark of a field whose own fields documents write in its place."""

Bytes = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Count = Annotated[int, Field(ge=0, le=LARGEST_INTEGER)]
Slot = Annotated[int, Field(ge=0, le=MAX_ROWS)]
Rows = Annotated[int, Field(ge=1, le=MAX_ROWS)]
"""Rows, and degrees of parallelism."""
Position = Annotated[int, Field(ge=1, le=MAX_ROWS)]
"""Place in an order, from 1."""
Seconds = Annotated[float, Field(ge=0, le=LONGEST_SECONDS)]
IterationSeconds = Annotated[float, Field(ge=SHORTEST_SECONDS, le=LONGEST_SECONDS)]
Ratio = Annotated[float, Field(ge=0, le=1e6)]
Loss = Annotated[float, Field(ge=0, le=MAX_LOSS)]
"""Mean of absolute losses."""
