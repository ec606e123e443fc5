"""HTML and SVG as element trees, which escape every name, and the frame of a page with a policy that forbids any network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Final, TypeAlias
from xml.etree.ElementTree import Element, tostring

from trainwright.outside.plain_text import plain_text

Content: TypeAlias = "Element | str | Iterable[Content] | None"
Row: TypeAlias = "list[Content]"
MANY_COLUMNS: Final = 5
"""Number of columns above which bars leave more room for the others."""


def element(tag: str, *content: Content, **attributes: str | float | None) -> Element:
    """Return an element with its content; attributes that are None are left out, `class_` and `aria_label` lose their underscores."""
    given = {name.strip("_").replace("_", "-"): value for name, value in attributes.items() if value is not None}
    made = Element(tag, {name: plain_text(str(value)) for name, value in given.items()})
    _append(made, content)
    return made


def _append(parent: Element, content: Content) -> None:
    if isinstance(content, str):
        text = plain_text(content)
        if len(parent):
            parent[-1].tail = (parent[-1].tail or "") + text
        else:
            parent.text = (parent.text or "") + text
    elif isinstance(content, Element):
        parent.append(content)
    elif content is not None:
        for part in content:
            _append(parent, part)


def markup(root: Element) -> str:
    """Return an element as HTML."""
    return tostring(root, encoding="unicode", method="html")


def missing_rows(shown: int, whole: int, what: str, why: str = "") -> str:
    """Say how many rows a table leaves out; empty if it shows all."""
    return f"{whole - shown} of {whole} {what} are left out{why}." if shown < whole else ""


def table(headings: Sequence[str], rows: Sequence[Row], *, label: str, left_out: str = "") -> Element:
    """Return a table that scrolls in itself where it is too wide, the first cell of each row its heading.

    Cells of text that begin with a digit or a sign are numbers, at the right; on a narrow screen each says its heading, and
    bars have a line of their own. `left_out` says which rows are missing.
    """
    numbers = {place for row in rows for place, cell in enumerate(row) if _cell_class(cell) == "number" and place}
    has_bars = any(_cell_class(cell) == "bar" for row in rows for cell in row)
    head = [
        element("th", heading, scope="col", class_="number" if place in numbers else None)
        for place, heading in enumerate(headings)
    ]
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [
                element("td", cell, class_=_cell_class(cell), data_label=headings[place] or None)
                for place, cell in enumerate(row[1:], 1)
            ],
        )
        for row in rows
    ]
    whole = [element("thead", element("tr", head)) if any(headings) else None, element("tbody", body)]
    kinds = [*(["bars"] if has_bars else ["plain"]), *(["many"] if len(headings) > MANY_COLUMNS else [])]
    scrolled = scrollable(element("table", whole, class_=" ".join(kinds)), label)
    return element("div", scrolled, element("p", left_out, class_="note") if left_out else None)


def scrollable(content: Element, label: str) -> Element:
    """Return the content so that it scrolls in itself, with the keyboard too, where it is wider than the screen."""
    return element("div", content, class_="wide", tabindex="0", role="region", aria_label=label)


def _cell_class(cell: Content) -> str | None:
    if isinstance(cell, Element):
        return "bar" if cell.tag == "svg" else None
    return "number" if isinstance(cell, str) and cell[:1] in {*"0123456789−+<?"} else None


def words(text: str) -> Element:
    """Return a cell of words, which may begin with a number."""
    return element("span", text)


def figure(label: str, *content: Content) -> Element:
    """Return a figure with its caption below."""
    return element("figure", content, element("figcaption", label))


def legend(*entries: tuple[str, str]) -> Element:
    """Return the legend of (class, words)."""
    swatches = [
        element(
            "li", element("svg", element("circle", class_=name, cx="50%", cy="50%", r="6"), class_="swatch"), meaning
        )
        for name, meaning in entries
    ]
    return element("ul", swatches, class_="legend")


def percent(part: float, whole: float) -> str:
    """Format a coordinate as a share of the drawing's width, which itself follows the screen."""
    return f"{100 * part / whole if whole else 0.0:.2f}%"


def bar(*shapes: Content, label: str) -> Element:
    """Return a drawing that is one line high and as wide as its cell; `label` says what it shows."""
    return element("svg", shapes, class_="line", role="img", aria_label=label)


def document(title: str, *content: Content) -> str:
    """Return a whole page. It carries its style, its script, and a policy that allows these two and no other source."""
    style, script = (_own_file(name) for name in ("page.css", "page.js"))
    policy = f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        _verbatim("style", style),
    )
    body = element("body", element("main", content), _verbatim("script", script))
    return f"<!doctype html>\n{markup(element('html', head, body, lang='en'))}\n"


def fragment(*content: Content) -> str:
    """Return parts of a page for another page, with the style of their own that reaches nothing else there."""
    style = _own_file("page.css").replace(":root", "&")
    for whole in ("body {", "main {"):
        style = style.replace(whole, "& {")
    return markup(
        element("div", _verbatim("style", f".trainwright-answer {{\n{style}}}"), content, class_="trainwright-answer")
    )


def picture(*content: Content, width: int, height: int) -> str:
    """Return an SVG file that shows parts of a page, in the theme of the page that embeds it."""
    body = element("div", _verbatim("style", _own_file("page.css")), element("main", content), xmlns=_XHTML)
    for drawing in body.iter("svg"):
        drawing.set("xmlns", _SVG)
    framed = element("foreignObject", body, width="100%", height="100%")
    drawn = element("svg", framed, xmlns=_SVG, width=width, height=height, viewBox=f"0 0 {width} {height}")
    return tostring(drawn, encoding="unicode") + "\n"


_XHTML: Final = "http://www.w3.org/1999/xhtml"
_SVG: Final = "http://www.w3.org/2000/svg"


def _own_file(name: str) -> str:
    return files("trainwright.report.page").joinpath(name).read_text(encoding="utf-8")


def _verbatim(tag: str, text: str) -> Element:
    made = Element(tag)
    made.text = text
    return made


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


SHADES: Final = 10
"""Number of colours of stages, which repeat."""
