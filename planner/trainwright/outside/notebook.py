"""Values that a notebook shows as drawings."""

from __future__ import annotations

from importlib import import_module


class ShownInNotebooks:
    """Value that Jupyter shows as HTML. What draws it stands floors above the values, so it is loaded by name, and only then."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        html: str = import_module("trainwright.report.notebook").notebook_html(self)
        return html
